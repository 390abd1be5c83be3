"""The tokenizer of a model that has none."""

import pytest

from longread.wire.placeholder import placeholder
from longread.wire.tokenizer import Tokenizer


def test_text_is_bytes_and_answers_are_numbers() -> None:
    tokenizer = Tokenizer(placeholder(2000), bos_id=0, eos_id=1)
    tokenizer.check_vocabulary(2000)
    text = "häll\no 你 <think>"
    ids = tokenizer.encode(text, special=True)
    assert list(ids) == list(text.encode())
    assert tokenizer.decode(list(ids), skip_special=False) == text
    assert tokenizer.decode([104, 300, 1999], skip_special=False) == "h 300 1999"


@pytest.mark.parametrize("vocab", [256, 257, 129280])
def test_every_id_has_a_name(vocab: int) -> None:
    assert Tokenizer(placeholder(vocab), bos_id=0, eos_id=1).vocab_size == vocab
