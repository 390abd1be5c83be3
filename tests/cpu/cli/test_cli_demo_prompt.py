"""The demo asks the readers in exactly the tokens that they were trained on, thinking off and on, in both languages."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer as RawTokenizer
from training.configs import CONFIGS
from training.data import conversation as trained
from training.tokenizer import PATH as TOKENIZER

from longread.measure import demo
from longread.measure.reading import LANGUAGES, Question
from longread.spec.config_json import spec_from_config
from longread.wire.encoding import encoding_for
from longread.wire.encoding.conversation import conversation
from longread.wire.types import ChatRequest, validate


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_demo_asks_in_the_tokens_of_training(name: str, language: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    folder.joinpath("tokenizer.json").write_bytes(TOKENIZER.read_bytes())
    reader = demo.Reader.open(folder, spec_from_config(CONFIGS[name], label=name))
    document = demo.document_of(reader, 2048, language, 5)
    assert abs(reader.tokens(document.text) - 2048) <= 100
    exam = demo.contract(reader, 2048, language, 5)
    assert exam.text == document.text and [inquiry.thinking for inquiry in exam.inquiries] == [False, False, True]
    encoding, _ = encoding_for("auto", reader.spec.family, name, name, has_think=True)
    raw = RawTokenizer.from_file(str(TOKENIZER))
    for inquiry in exam.inquiries:
        body = {
            "messages": [{"role": "user", "content": exam.turn(inquiry)}],
            "chat_template_kwargs": reader.template(inquiry.thinking),
        }
        rendered = encoding.render(conversation(validate(ChatRequest, body), encoding.abilities, None))
        prompt = reader.tokenizer.encode_prompt(rendered.pieces)
        asked = Question("single", inquiry.question, str(inquiry.expected), "It is in clause 1.1.", ())
        whole, _ = trained(document, [asked], inquiry.thinking, raw)
        assert whole[: len(prompt)] == prompt
        thought = f"{asked.thought}</think>" if inquiry.thinking else ""
        assert reader.tokenizer.decode(whole[len(prompt) :]) == f"{thought}{inquiry.expected}"
