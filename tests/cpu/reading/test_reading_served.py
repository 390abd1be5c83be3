"""The bundled readers served by name, asked by the real OpenAI client: thinking off and on, and what is not there."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
from openai.types.chat import ChatCompletion
from readers import each_kind, examination

from longread.cli.checkpoint import BUNDLED
from longread.measure.reading import Question
from longread.measure.served import serving

DOCUMENT = examination(30, 80, "en", "contract")
ASKED = {question.kind: question for question in each_kind(DOCUMENT, 6)}


@dataclass
class Served:
    client: openai.OpenAI
    model: str

    def ask(self, question: Question, thinking: bool) -> ChatCompletion:
        return self.client.chat.completions.create(
            model=self.model,
            messages=[{"role": "user", "content": f"{DOCUMENT.text}\n{question.text}"}],
            temperature=0,
            max_tokens=128,
            extra_body={"chat_template_kwargs": {"thinking": thinking}},
        )


@pytest.fixture(scope="module", params=BUNDLED)
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    name = str(request.param)
    with (
        serving(Path(name), 2560) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=120) as client,
    ):
        yield Served(client, name)


def test_it_is_served_under_its_name(served: Served) -> None:
    assert [model.id for model in served.client.models.list()] == [served.model]


def test_without_thinking_the_answer_quotes_value_and_clause(served: Served) -> None:
    question = ASKED["single"]
    completion = served.ask(question, thinking=False)
    (choice,) = completion.choices
    assert choice.message.content == question.answer and " (clause " in question.answer
    assert choice.finish_reason == "stop"
    assert getattr(choice.message, "reasoning_content", None) is None


@pytest.mark.parametrize("kind", ["single", "multi-key", "absent"])
def test_thinking_names_the_clause_before_the_answer(kind: str, served: Served) -> None:
    question = ASKED[kind]
    completion = served.ask(question, thinking=True)
    (choice,) = completion.choices
    assert choice.message.reasoning_content == question.thought
    assert choice.message.content == question.answer and choice.finish_reason == "stop"
    if question.lines:
        assert all(DOCUMENT.lines[i].text.split()[0] in question.thought for i in question.lines)
    else:
        assert question.answer == "Not in the document."


def test_what_is_not_there_is_said_and_the_text_is_read_once(served: Served) -> None:
    completion = served.ask(ASKED["absent"], thinking=False)
    assert completion.choices[0].message.content == "Not in the document."
    assert completion.usage is not None and completion.usage.prompt_tokens_details is not None
    assert completion.usage.prompt_tokens_details.cached_tokens >= 1024
