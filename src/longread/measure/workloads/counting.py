"""How many tokens a text has: by a tokenizer where one is given, else by its characters, and then it is said so.

Knows tokenizers by their calls. Texts are counted piece by piece: pieces end with a newline, so their sum differs from
the count of the whole by a few tokens in a million.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from longread.spec.errors import CheckpointError, ConfigError
from longread.wire.tokenizer import Tokenizer, ids_of

# Characters a token of DeepSeek's vocabulary on these texts, which are full of numbers.
ASCII_CHARACTERS, OTHER_CHARACTERS = 3.4, 1.35


@dataclass(frozen=True, slots=True)
class Counter:
    """``count``: tokens of a text. ``exact``: by a tokenizer; ``label`` says by what. ``ids`` and ``text`` encode and
    decode, and ``vocabulary`` is the longest run of ids that are no markup; they need a tokenizer.
    """

    count: Callable[[str], int]
    exact: bool
    label: str
    ids: Callable[[str], list[int]] | None = None
    text: Callable[[Sequence[int]], str] | None = None
    vocabulary: range | None = None


def counter(tokenizer: object) -> Counter:
    """``tokenizer``: None, a checkpoint folder or a tokenizer.json, our tokenizer, or one of transformers' or
    tokenizers' objects. Raises ConfigError.
    """
    if tokenizer is None or tokenizer == "":
        label = f"characters ({ASCII_CHARACTERS:g} ASCII or {OTHER_CHARACTERS:g} other ones a token; no tokenizer)"
        return Counter(_by_characters, False, label)
    if isinstance(tokenizer, str | Path):
        path = Path(tokenizer)
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            found = file.stat()
        except OSError as error:
            raise _unreadable(file, error) from None
        name = path.resolve()
        label = name.name if path.is_dir() else name.parent.name
        return _ours(_opened(file, found.st_mtime_ns, found.st_size), label or "tokenizer.json")
    if isinstance(tokenizer, Tokenizer):
        return _ours(tokenizer, "the given tokenizer")
    if not callable(getattr(tokenizer, "encode", None)):
        raise ConfigError(f"a tokenizer of type {type(tokenizer).__name__} has no encode; give a folder or an object")
    return _foreign(tokenizer)


@lru_cache(2)
def _opened(file: Path, changed: int, size: int) -> Tokenizer:
    """A large vocabulary takes seconds to load, and a run asks for it several times."""
    try:
        # Only counted with: the ids of BOS and EOS, which a checkpoint's config gives, do not matter.
        tokenizer = Tokenizer(file.read_bytes(), bos_id=0, eos_id=0)
    except OSError as error:
        raise _unreadable(file, error) from None
    except CheckpointError as error:
        raise ConfigError(f"{file}: {error}") from None
    tokenizer.hasten()
    return tokenizer


def _unreadable(file: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{file}: cannot be read ({error.strerror or error}); name a folder that has a tokenizer.json, or none: "
        "lengths are then estimated from characters"
    )


def _ours(tokenizer: Tokenizer, label: str) -> Counter:
    def count(text: str) -> int:
        return len(tokenizer.encode_bytes(text)) // 4

    def ids(text: str) -> list[int]:
        return ids_of(tokenizer.encode_bytes(text))

    vocabulary = _longest_run(tokenizer.added_ids, tokenizer.vocab_size)
    return Counter(count, True, f"tokenizer {label}", ids, lambda ids: tokenizer.decode(ids), vocabulary)


def _longest_run(taken: Iterable[int], size: int) -> range:
    edges = [-1, *sorted(i for i in taken if i < size), size]
    return max((range(low + 1, high) for low, high in pairwise(edges)), key=len)


def _foreign(tokenizer: Any) -> Counter:
    def ids(text: str) -> list[int]:
        found = tokenizer.encode(text, add_special_tokens=False)
        return list(getattr(found, "ids", found))

    size = getattr(tokenizer, "vocab_size", None)
    if size is None and callable(getattr(tokenizer, "get_vocab_size", None)):
        size = tokenizer.get_vocab_size(with_added_tokens=False)
    special = getattr(tokenizer, "all_special_ids", ())
    vocabulary = _longest_run(special, size) if isinstance(size, int) else None
    name = Path(str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)).name
    return Counter(lambda text: len(ids(text)), True, f"tokenizer {name}", ids, tokenizer.decode, vocabulary)


def _by_characters(text: str) -> int:
    wide = 0 if text.isascii() else sum(character > "\x7f" for character in text)
    return max(round((len(text) - wide) / ASCII_CHARACTERS + wide / OTHER_CHARACTERS), 1) if text else 0
