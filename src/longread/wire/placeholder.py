"""A tokenizer for a model that has none: bytes for what is written, numbers for what is answered.

Knows tokenizer.json's format. Token ids mean nothing to random weights; prompts are best given as ids.
"""

import orjson

from longread.wire.tokenizer import BYTES


def placeholder(vocab: int) -> bytes:
    """A tokenizer.json of ``vocab`` ids: the first 256 are bytes, any other reads as its number behind a space."""
    letters = sorted(BYTES, key=lambda letter: BYTES[letter])
    space = letters[0x20]
    names = {letter: i for i, letter in enumerate(letters[:vocab])}
    names |= {f"{space}{i}": i for i in range(len(names), vocab)}
    layer = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return orjson.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": layer,
            "post_processor": None,
            "decoder": layer,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": names,
                "merges": [],
            },
        }
    )
