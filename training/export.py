"""``python -m training.export reader-v4 --state DIR --output PATH``: trained weights as a native checkpoint.

Writes what DeepSeek's own release would have: config.json, model.safetensors quantised as the config says,
tokenizer.json and tokenizer_config.json. ``--bf16`` also writes the unquantised master. Knows no arithmetic.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from longread.spec.config_json import spec_from_config
from longread.weights.export import write_checkpoint, write_tokenizer
from training.configs import CONFIGS
from training.state import load_weights
from training.tokenizer import PATH as TOKENIZER

QUANTISATION = ("quantization_config", "expert_dtype")


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m training.export", description=__doc__.splitlines()[0])
    parser.add_argument("reader", choices=sorted(CONFIGS))
    parser.add_argument("--state", type=Path, required=True, help="folder with weights-*.pt")
    parser.add_argument("--output", type=Path, required=True, help="checkpoint folder to write, quantised")
    parser.add_argument("--bf16", type=Path, help="checkpoint folder to write unquantised")
    options = parser.parse_args(arguments)
    weights = load_weights(options.state)
    export(options.output, CONFIGS[options.reader], weights)
    print(f"{options.output}: {folder_bytes(options.output):,} bytes")
    if options.bf16 is not None:
        export(options.bf16, master_config(CONFIGS[options.reader]), weights)
        print(f"{options.bf16}: {folder_bytes(options.bf16):,} bytes")


def master_config(config: Mapping[str, object]) -> dict[str, object]:
    """The same model, stored plainly in bfloat16."""
    return {key: value for key, value in config.items() if key not in QUANTISATION}


def export(path: Path, config: Mapping[str, object], weights: Mapping[str, Tensor]) -> None:
    """Write one checkpoint, one shard. Raises CheckpointError where the weights are not the config's."""
    write_checkpoint(path, config, weights)
    write_tokenizer(path, TOKENIZER.read_bytes(), spec_from_config(config).max_position)


def folder_bytes(path: Path) -> int:
    """Bytes of a folder's files."""
    return sum(file.stat().st_size for file in path.iterdir())


if __name__ == "__main__":
    main()
