"""Train the small byte-level BPE that fixture checkpoints carry: ``python scripts/train_fixture_tokenizer.py``.

Same pre-tokeniser, special tokens and flags as DeepSeek's V4 tokenizer; the text is the standard library of the
running Python, so another Python version gives other merges. Run it by hand; the result is committed.
"""

import sysconfig
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TARGET = Path(__file__).parents[1] / "src/longread/weights/fixture_tokenizer.json"
SIZE = 1536  # longread.weights.fixture.FIXTURE_VOCAB
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


def main() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern.replace("CRLF", "\r\n")), "isolated") for pattern in SPLITS]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=True, trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted([*library.glob("*.py"), library / "pydoc_data/topics.py"])
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE - len(ADDED),
        special_tokens=list(FIRST),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train([str(file) for file in files], trainer)
    # Only the first three are "special" in DeepSeek's file: the turn and tool markers survive skip_special_tokens.
    tokenizer.add_tokens([AddedToken(token, normalized=True, special=False) for token in ADDED])
    if tokenizer.get_vocab_size() != SIZE:
        raise SystemExit(f"{tokenizer.get_vocab_size()} entries, expected {SIZE}")
    TARGET.write_text(tokenizer.to_str(pretty=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
