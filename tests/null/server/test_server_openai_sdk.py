"""The real OpenAI client against a real server: what a user sees. Imported where it is used, so collecting is quick."""

import asyncio
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from serving import MODEL, Serving, serving, wait_until

if TYPE_CHECKING:
    import openai

pytestmark = pytest.mark.anyio

HELLO = [{"role": "user", "content": "Hello, who are you?"}]
WEATHER = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Current weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
V31_CALL = (
    "Let me look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    '{"city": "Bern"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving() as running:
        yield running


@pytest.fixture(scope="module")
def connected(server: Serving) -> Iterator["openai.OpenAI"]:
    import openai

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=20) as made:
        yield made


@pytest.fixture
def client(server: Serving, connected: "openai.OpenAI") -> Iterator["openai.OpenAI"]:
    server.answers.text = None
    server.answers.seen.clear()
    yield connected
    assert wait_until(lambda: server.pending() == 0), "a request was left behind"


def test_models(client: "openai.OpenAI") -> None:
    import openai

    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_chat_answers_with_usage_and_timings(server: Serving, client: "openai.OpenAI") -> None:
    server.answers.text = "I am a fake."
    answer = client.chat.completions.create(model=MODEL, messages=HELLO)
    assert answer.object == "chat.completion"
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "I am a fake.", "stop")
    assert choice.message.tool_calls is None
    seen = server.answers.seen[0]
    assert answer.usage.prompt_tokens == len(seen.prompt)
    assert answer.usage.completion_tokens == len(server.answers.tokenizer.encode("I am a fake.")) + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    timings = answer.model_extra["timings"]
    assert timings["ttft_ms"] == pytest.approx(timings["queue_ms"] + timings["prefill_ms"], abs=0.01)
    assert seen.prompt[0] == server.answers.tokenizer.bos_id


def test_a_repeated_long_prompt_reports_cached_tokens(client: "openai.OpenAI") -> None:
    messages = [{"role": "user", "content": "A long text about rivers and mountains. " * 60}]
    cold = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4)
    warm = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4)
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert warm.usage.prompt_tokens_details.cached_tokens >= 256
    assert warm.choices[0].message.content == cold.choices[0].message.content


def test_chat_stream_equals_the_whole_answer(server: Serving, client: "openai.OpenAI") -> None:
    server.answers.text = "Grüße aus Zürich: 你好 🙂!"
    whole = client.chat.completions.create(model=MODEL, messages=HELLO)
    stream = client.chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content == server.answers.text
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
    assert [c.usage for c in chunks if c.usage] == [chunks[-1].usage]
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].choices == []
    assert len({c.id for c in chunks}) == 1
    assert "�" not in text


def test_stream_without_usage_sends_none(server: Serving, client: "openai.OpenAI") -> None:
    server.answers.text = "ok"
    chunks = list(client.chat.completions.create(model=MODEL, messages=HELLO, stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_max_tokens_ends_with_length(client: "openai.OpenAI") -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        answer = client.chat.completions.create(model=MODEL, messages=HELLO, **{name: 7})
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == 7


def test_stop_string_across_tokens_ends_text_and_request(server: Serving, client: "openai.OpenAI") -> None:
    server.answers.text = "one two three STOP HERE four five six " * 20
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, stop=["STOP HERE", "never"])
    assert answer.choices[0].message.content == "one two three "
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].model_extra["stop_reason"] == "STOP HERE"
    assert answer.usage.completion_tokens <= len(server.answers.tokenizer.encode("one two three STOP HERE four"))
    stream = client.chat.completions.create(model=MODEL, messages=HELLO, stop="STOP HERE", stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in stream) == "one two three "


def test_stop_strings_do_not_count_before_min_tokens(server: Serving, client: "openai.OpenAI") -> None:
    server.answers.text = "one END two END three"
    least = len(server.answers.tokenizer.encode("one END two"))
    for extra, text in (({}, "one "), ({"min_tokens": least}, "one END two ")):
        answer = client.chat.completions.create(model=MODEL, messages=HELLO, stop="END", extra_body=extra)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (text, "stop")


def test_n_choices_have_their_own_seeds(server: Serving, client: "openai.OpenAI") -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, n=3, seed=11, max_tokens=6)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 3
    assert [r.sampling.seed for r in server.answers.seen] == [11, 12, 13]
    assert answer.usage.completion_tokens == 18
    assert answer.usage.prompt_tokens == len(server.answers.seen[0].prompt)
    stream = client.chat.completions.create(model=MODEL, messages=HELLO, n=3, seed=11, max_tokens=6, stream=True)
    texts = {0: "", 1: "", 2: ""}
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert list(texts.values()) == [choice.message.content for choice in answer.choices]


def test_logprobs_have_tokens_bytes_and_alternatives(server: Serving, client: "openai.OpenAI") -> None:
    server.answers.text = "Grüße, 你"
    whole = client.chat.completions.create(model=MODEL, messages=HELLO, logprobs=True, top_logprobs=3)
    entries = whole.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == server.answers.text
    assert all(len(entry.top_logprobs) == 3 and entry.logprob == -0.25 for entry in entries)
    assert entries[0].top_logprobs[0].token == entries[0].token
    stream = client.chat.completions.create(model=MODEL, messages=HELLO, logprobs=True, top_logprobs=3, stream=True)
    streamed = [e for c in stream for e in (c.choices[0].logprobs.content if c.choices[0].logprobs else [])]
    assert [e.token for e in streamed] == [e.token for e in entries]
    plain = client.chat.completions.create(model=MODEL, messages=HELLO, logprobs=True)
    assert plain.choices[0].logprobs.content[0].top_logprobs == []


def test_tool_calls(server: Serving, client: "openai.OpenAI") -> None:
    server.answers.text = V31_CALL
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, tools=WEATHER, tool_choice="auto")
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert message.content == "Let me look."
    assert [(c.type, c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls] == [
        ("function", "get_weather", {"city": "Bern"})
    ]
    assert message.tool_calls[0].id

    stream = client.chat.completions.create(model=MODEL, messages=HELLO, tools=WEATHER, stream=True)
    names, arguments, reasons, text = [], "", [], ""
    for chunk in stream:
        choice = chunk.choices[0]
        text += choice.delta.content or ""
        reasons += [choice.finish_reason] if choice.finish_reason else []
        for call in choice.delta.tool_calls or []:
            names += [call.function.name] if call.function.name else []
            arguments += call.function.arguments or ""
    assert (names, json.loads(arguments), reasons, text) == (
        ["get_weather"], {"city": "Bern"}, ["tool_calls"], "Let me look."
    )  # fmt: skip


def test_a_call_that_broke_off_is_no_finished_call(server: Serving, client: "openai.OpenAI") -> None:
    server.answers.text = V31_CALL[: V31_CALL.index("Bern")]
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, tools=WEATHER)
    assert answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "stop"


def test_a_tool_turn_can_be_sent_back(server: Serving, client: "openai.OpenAI") -> None:
    server.answers.text = V31_CALL
    first = client.chat.completions.create(model=MODEL, messages=HELLO, tools=WEATHER)
    call = first.choices[0].message.tool_calls[0]
    server.answers.text = "It rains."
    messages = [
        *HELLO,
        first.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ]
    second = client.chat.completions.create(model=MODEL, messages=messages, tools=WEATHER)
    assert second.choices[0].message.content == "It rains."


def test_required_tool_choice_is_refused_clearly(client: "openai.OpenAI") -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        client.chat.completions.create(model=MODEL, messages=HELLO, tools=WEATHER, tool_choice="required")


def test_json_schema_reaches_the_engine_and_parses(server: Serving, client: "openai.OpenAI") -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    server.answers.text = '{"a": 3}'
    answer = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}},
    )
    assert json.loads(answer.choices[0].message.content) == {"a": 3}
    grammar = server.answers.seen[-1].sampling.grammar
    assert grammar.kind == "json_schema" and json.loads(grammar.value) == schema
    client.chat.completions.create(model=MODEL, messages=HELLO, response_format={"type": "json_object"})
    assert server.answers.seen[-1].sampling.grammar.kind == "json_object"
    client.chat.completions.create(
        model=MODEL, messages=HELLO, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    assert server.answers.seen[-1].sampling.grammar.kind == "choice"


def test_a_bad_schema_is_a_400(client: "openai.OpenAI") -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match="schema"):
        client.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "bad"}}},
        )


def test_reasoning_goes_to_its_own_field(server: Serving, client: "openai.OpenAI") -> None:
    server.answers.text = "First I think.</think>Then I answer."
    body = {"chat_template_kwargs": {"thinking": True}}
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, extra_body=body)
    message = answer.choices[0].message
    assert message.content == "Then I answer."
    assert message.model_extra["reasoning_content"] == message.model_extra["reasoning"] == "First I think."
    assert answer.usage.completion_tokens_details.reasoning_tokens > 0
    stream = client.chat.completions.create(model=MODEL, messages=HELLO, stream=True, extra_body=body)
    thoughts = said = ""
    for chunk in stream:
        delta = chunk.choices[0].delta
        thoughts += (delta.model_extra or {}).get("reasoning_content") or ""
        said += delta.content or ""
    assert (thoughts, said) == ("First I think.", "Then I answer.")


def test_reasoning_that_never_closes_still_answers(server: Serving, client: "openai.OpenAI") -> None:
    server.answers.text = "I think and think."
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, extra_body={"chat_template_kwargs": {"thinking": True}}
    )
    assert answer.choices[0].message.content


def test_reasoning_never_stands_where_a_grammar_binds(server: Serving, client: "openai.OpenAI") -> None:
    server.answers.text = "I think and think."
    for bound, content in (({"structured_outputs": {"choice": ["yes", "no"]}}, ""), ({}, "I think and think.")):
        body = {"chat_template_kwargs": {"thinking": True}, **bound}
        answer = client.chat.completions.create(model=MODEL, messages=HELLO, extra_body=body)
        message = answer.choices[0].message
        assert (message.content, message.model_extra["reasoning"]) == (content, "I think and think.")


def test_completions_of_text_ids_and_lists(server: Serving, client: "openai.OpenAI") -> None:
    server.answers.text = " in Europe."
    text = client.completions.create(model=MODEL, prompt="Switzerland lies")
    assert text.object == "text_completion"
    assert (text.choices[0].text, text.choices[0].finish_reason) == (" in Europe.", "stop")
    ids = list(server.answers.seen[-1].prompt)
    same = client.completions.create(model=MODEL, prompt=ids)
    assert server.answers.seen[-1].prompt == tuple(ids)
    assert same.choices[0].text == text.choices[0].text
    many = client.completions.create(model=MODEL, prompt=["a", "b"], n=2)
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    prompts = [r.prompt for r in server.answers.seen[-4:]]
    assert prompts[0] == prompts[1] != prompts[2] == prompts[3]
    assert many.usage.prompt_tokens == len(prompts[0]) + len(prompts[2])
    client.completions.create(model=MODEL, prompt=[[3, 4], [5, 6, 7]])
    assert [r.prompt for r in server.answers.seen[-2:]] == [(3, 4), (5, 6, 7)]


def test_completions_stream_and_logprobs(server: Serving, client: "openai.OpenAI") -> None:
    server.answers.text = "one two"
    whole = client.completions.create(model=MODEL, prompt="x", logprobs=2)
    found = whole.choices[0].logprobs
    assert "".join(found.tokens) == "one two"
    assert found.text_offset == [sum(map(len, found.tokens[:i])) for i in range(len(found.tokens))]
    assert len(found.token_logprobs) == len(found.top_logprobs) == len(found.tokens)
    assert all(token in top for token, top in zip(found.tokens, found.top_logprobs, strict=True))
    stream = list(
        client.completions.create(
            model=MODEL, prompt="x", logprobs=2, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(c.choices[0].text for c in stream if c.choices) == "one two"
    tokens = [t for c in stream if c.choices and c.choices[0].logprobs for t in c.choices[0].logprobs.tokens]
    offsets = [o for c in stream if c.choices and c.choices[0].logprobs for o in c.choices[0].logprobs.text_offset]
    assert (tokens, offsets) == (found.tokens, found.text_offset)
    assert stream[-1].usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.parametrize("extra", [{"echo": True}, {"suffix": "end"}, {"best_of": 3}])
def test_completion_options_that_are_not_honoured_are_refused(client: "openai.OpenAI", extra: dict) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match=next(iter(extra))):
        client.completions.create(model=MODEL, prompt="x", **extra)


def test_errors_are_the_sdks_own(client: "openai.OpenAI") -> None:
    import openai

    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-4", messages=HELLO)
    assert unknown.value.code == "model_not_found"
    assert MODEL in unknown.value.message
    with pytest.raises(openai.BadRequestError) as too_long:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "word " * 5000}])
    assert (too_long.value.code, too_long.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.BadRequestError) as too_many:
        client.completions.create(model=MODEL, prompt=[5] * 4000, max_tokens=500)
    assert (too_many.value.code, too_many.value.param) == ("context_length_exceeded", "prompt")
    assert "4096" in too_long.value.message
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=MODEL, messages=HELLO, temperature=9)
    with pytest.raises(openai.BadRequestError, match="made_up"):
        client.chat.completions.create(model=MODEL, messages=HELLO, extra_body={"made_up": 1})


def test_closing_a_stream_cancels_the_request(server: Serving, client: "openai.OpenAI") -> None:
    stream = client.chat.completions.create(model=MODEL, messages=HELLO, stream=True, max_tokens=100000 // 30)
    next(iter(stream))
    stream.close()
    assert wait_until(lambda: server.pending() == 0)


async def test_the_async_client_streams_many_at_once(server: Serving) -> None:
    import openai

    server.answers.text = None
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30) as client:

        async def one(number: int) -> str:
            stream = await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": f"number {number}"}],
                stream=True,
                max_tokens=20,
                stream_options={"include_usage": True},
            )
            text, usage = "", None
            async for chunk in stream:
                text += chunk.choices[0].delta.content or "" if chunk.choices else ""
                usage = chunk.usage or usage
            assert usage.completion_tokens == 20
            return text

        texts = await asyncio.gather(*map(one, range(20)))
        assert texts[7] == await one(7)
        whole = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "number 7"}], max_tokens=20
        )
        assert whole.choices[0].message.content == texts[7]
    assert wait_until(lambda: server.pending() == 0)
