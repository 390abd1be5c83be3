"""The readers' byte-level BPE: ``python -m training.tokenizer`` writes ``training/tokenizer.json``.

DeepSeek's pre-tokeniser and special tokens, as in scripts/train_fixture_tokenizer.py, over merges of four kinds in this
order: characters beyond ASCII from their bytes, the words of the reading documents until each is one token, every
number of two and three digits, then common English from the standard library of the running Python (so another
version gives other last merges; the committed file is the one that counts). Needs only the tokenizers library.
"""

import heapq
import os
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise, product
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from longread.measure.reading import DOMAINS, LANGUAGES, write

PATH = Path(__file__).with_name("tokenizer.json")
SIZE = 4096
BOS, EOS, PAD = 0, 1, 2
FIRST = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
BARS = """fim▁hole fim▁begin fim▁end User Assistant System tool▁calls▁begin tool▁calls▁end tool▁call▁begin tool▁call▁end
tool▁outputs▁begin tool▁outputs▁end tool▁output▁begin tool▁output▁end tool▁sep begin▁of▁repo▁name end▁of▁repo▁name
begin▁of▁file▁name end▁of▁file▁name begin▁of▁file end▁of▁file begin▁sys end▁sys latest_reminder action query authority
domain task entity title answer search search▁begin search▁end extracted_url read_url"""
ADDED = [f"<｜{name}｜>" for name in BARS.split()] + ["<|EOT|>", "<think>", "</think>", "｜DSML｜"]
SPLITS = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    # CR and LF are the characters themselves here, as in DeepSeek's file.
    (
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^CRLF\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
        r" ?[\p{P}\p{S}]+[CRLF]*|\s*[CRLF]+|\s+(?!\S)|\s+"
    ),
)
DIGITS = frozenset("0123456789")
MARK = "\u2063"  # between the words of a spaced document
SEEDS, LINES, QUESTIONS = 120, 120, 40

Pair = tuple[str, str]
Split = tuple[str, ...]


@cache
def load() -> Tokenizer:
    """The committed tokenizer, one a process. Encodes in the calling thread: a data worker owns one core, and the
    library's thread pool does not survive a fork.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return Tokenizer.from_file(str(PATH))


def pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    """DeepSeek's: numbers in runs of three digits, Chinese runs, words with what stands before them, bytes."""
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern.replace("CRLF", "\r\n")), "isolated") for pattern in SPLITS]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def reading_texts() -> Iterator[str]:
    """Spaced documents of every language and domain, and what is asked and answered about them."""
    for seed, language, domain in product(range(SEEDS), LANGUAGES, DOMAINS):
        document = write(seed, LINES, language, domain, spaced=True)
        yield document.text
        for question in document.questions(QUESTIONS):
            yield from (question.text, question.thought, question.answer)


def pieces(texts: Iterable[str]) -> Counter[str]:
    """How often each pre-token without digits occurs, in the byte alphabet; a mark ends one."""
    split = pre_tokenizer()
    found: Counter[str] = Counter()
    for text in texts:
        for part in text.split(MARK):
            found.update(piece for piece, _ in split.pre_tokenize_str(part))
    return Counter({piece: n for piece, n in found.items() if DIGITS.isdisjoint(piece)})


def learn(words: Mapping[Split, int], known: Sequence[Pair] = (), limit: int | None = None) -> list[Pair]:
    """New merges, the most frequent pair first (of equals the alphabetically first), until ``limit`` or nothing is
    left. A pair of ``known`` or of an earlier merge can come up again where its parts arose in another way; it is then
    joined at once, as the encoder does.
    """
    splits, weights = list(words), list(words.values())
    rank = {pair: i for i, pair in enumerate(known)}
    count: Counter[Pair] = Counter()
    where: defaultdict[Pair, set[int]] = defaultdict(set)
    heap: list[tuple[bool, int, Pair]] = []
    merges: list[Pair] = []

    def add(i: int, sign: int) -> None:
        for pair in pairwise(splits[i]):
            count[pair] += sign * weights[i]
            where[pair].add(i)

    def push(pair: Pair) -> None:
        if count[pair] > 0:
            heapq.heappush(heap, (pair not in rank, rank.get(pair, -count[pair]), pair))

    for i in range(len(splits)):
        add(i, 1)
    for pair in list(count):
        push(pair)
    while heap and (limit is None or len(merges) < limit):
        new, order, best = heapq.heappop(heap)
        if new != (best not in rank) or not count[best] or (new and -order != count[best]):
            continue  # stale: it was pushed again as it is now, or is gone
        if new:
            rank[best] = len(rank)
            merges.append(best)
        changed: set[Pair] = set()
        for i in where.pop(best):
            changed.update(pairwise(splits[i]))
            add(i, -1)
            splits[i] = merged(splits[i], best)
            changed.update(pairwise(splits[i]))
            add(i, 1)
        for pair in changed:
            push(pair)
    return merges


def merged(split: Split, pair: Pair) -> Split:
    """``split`` with every occurrence of ``pair`` joined, from the left."""
    out: list[str] = []
    i = 0
    while i < len(split):
        if split[i : i + 2] == pair:
            out.append("".join(pair))
            i += 2
        else:
            out.append(split[i])
            i += 1
    return tuple(out)


def characters(words: Iterable[str]) -> list[Pair]:
    """Merges that make one token of every character beyond ASCII, lead byte first: no merge ever crosses two."""
    decode = decoders.ByteLevel().decode
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    seen = sorted({char for word in words for char in decode([word]) if ord(char) > 127})
    merges: dict[Pair, None] = {}
    for char in seen:
        coded = byte_level.pre_tokenize_str(char)[0][0]
        for end in range(1, len(coded)):
            merges[coded[:end], coded[end]] = None
    return list(merges)


def numbers() -> list[Pair]:
    """Merges for all numbers of two and three digits. A run of three may lose its first or its last pair to the
    merge of lowest rank, so both ways to its token are there.
    """
    digits = sorted(DIGITS)
    two = list(product(digits, digits))
    three = [(a + b, c) for a, b, c in product(digits, digits, digits)]
    return two + three + [(a, b + c) for a, b, c in product(digits, digits, digits)]


def assemble(merges: list[Pair]) -> Tokenizer:
    """A tokenizer with ids in order: the three special tokens, 256 bytes, the merges' tokens, then the markup."""
    tokens = [*FIRST, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.normalizer = normalizers.Sequence([])
    tokenizer.pre_tokenizer = pre_tokenizer()
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=True, trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(FIRST))
    # Only the first three are "special" in DeepSeek's file: the turn and tool markers survive skip_special_tokens.
    tokenizer.add_tokens([AddedToken(token, normalized=True, special=False) for token in ADDED])
    return tokenizer


def tokens_of(tokenizer: Tokenizer, words: Iterable[str]) -> dict[str, Split]:
    """What the merges so far make of each pre-token (in the byte alphabet)."""
    model = tokenizer.model
    return {word: tuple(token.value for token in model.tokenize(word)) for word in words}


def english() -> Counter[str]:
    """ASCII pre-tokens of the standard library of this Python."""
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted([*library.glob("*.py"), library / "pydoc_data/topics.py"])
    found = pieces(file.read_text(encoding="utf-8") for file in files)
    return Counter({word: n for word, n in found.items() if n > 1 and word.replace("Ġ", "").isascii()})


def build() -> tuple[Tokenizer, dict[str, int]]:
    """The tokenizer and how many tokens each kind of merge has. Raises SystemExit where the words leave no room."""
    words = pieces(reading_texts())
    merges = characters(words)
    kinds = {"words": len(words), "characters": len(merges)}
    merges += learn(dict.fromkeys(tokens_of(assemble(merges), sorted(words)).values(), 1), merges)
    kinds["word merges"] = len(merges) - kinds["characters"]
    merges += numbers()
    tokenizer = assemble(merges)
    room = SIZE - tokenizer.get_vocab_size()
    kinds["english"] = room
    if room < 0:
        raise SystemExit(f"the reading documents' words take {-room} entries more than there are: {kinds}")
    common = english()
    splits: Counter[Split] = Counter()
    for word, split in tokens_of(tokenizer, sorted(common)).items():
        splits[split] += common[word]
    have = {"".join(pair) for pair in merges}
    for pair in learn(splits, merges, 2 * room):  # a few make a token that is there already by another way
        have.add("".join(pair))
        merges.append(pair)
        if len(have) == SIZE - len(FIRST) - len(ADDED) - 256:
            break
    return assemble(merges), kinds


def main() -> None:
    tokenizer, kinds = build()
    if tokenizer.get_vocab_size() != SIZE:
        raise SystemExit(f"{tokenizer.get_vocab_size()} entries, expected {SIZE}")
    PATH.write_text(tokenizer.to_str(pretty=False) + "\n", encoding="utf-8")
    print(", ".join(f"{kind} {count}" for kind, count in kinds.items()))


if __name__ == "__main__":
    main()
