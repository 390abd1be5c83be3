"""A model without a checkpoint: a public model's name or a config.json, with as many layers as are asked for.

Knows specs only. A shape with fewer layers keeps each layer as it is, so that times and bytes of a whole model can be
reckoned from those that fit a smaller machine.
"""

import re
from dataclasses import replace
from pathlib import Path

from longread.spec.config_json import RUNNABLE, read_config, spec_from_config
from longread.spec.errors import ConfigError
from longread.spec.model import ModelSpec
from longread.spec.releases import release, release_name

_LAYERS = re.compile(r"(?:(\d{1,4})\+)?(\d{1,4})", re.ASCII)


def random_spec(model: str, layers: str | None = None) -> ModelSpec:
    """The spec of a model whose weights are drawn: of the folder ``model`` if it has a config.json, else of the public
    model of that name. Raises ConfigError (no such model, or one that cannot be run; ``layers``) and what a config.json
    raises.
    """
    path = Path(model)
    if (path / "config.json").is_file():
        spec = spec_from_config(read_config(path))
    elif release_name(model) is None and path.is_dir():
        raise ConfigError(f"random_weights: {model} has no config.json, and no public model is called so")
    else:
        spec = release(model)
        if spec.family not in RUNNABLE:
            raise ConfigError(
                f"{spec.label} is not served: the engine runs {', '.join(RUNNABLE)}, this one is {spec.family}; "
                f"`longread plan {model}` tells what it takes"
            )
    return spec if layers is None else reduced(spec, layers)


def reduced(spec: ModelSpec, layers: str) -> ModelSpec:
    """The first layers of a model: "32"; or for a model that begins with dense layers "1+3", one dense and three MoE
    ones. No drafter. Raises ConfigError.
    """
    match = _LAYERS.fullmatch(layers.strip())
    if match is None:
        raise ConfigError(f"layers: {layers[:64]!r} is no number of layers; write 32, or 1+3 (dense and MoE ones)")
    dense, rest = match[1], int(match[2])
    moe = spec.moe
    if dense is None:
        count, first_dense = rest, min(moe.first_dense, rest)
    else:
        count, first_dense = int(dense) + rest, int(dense)
        sparse = spec.layers - moe.first_dense
        if first_dense > moe.first_dense or rest > sparse:
            raise ConfigError(
                f"layers={layers}: {spec.label} has {moe.first_dense} dense and {sparse} MoE layers; ask for fewer"
            )
    if not 0 < count <= spec.layers:
        raise ConfigError(f"layers={layers}: {spec.label} has {spec.layers}; ask for 1 to {spec.layers}")
    if spec.shared_kv is not None:
        raise ConfigError(f"layers={layers}: layers of {spec.label} use each other's caches; it runs whole only")
    compressed = spec.compressed
    if compressed and any(compressed.ratios) and not any(compressed.ratios[:count]):
        least = next(i for i, ratio in enumerate(compressed.ratios, 1) if ratio)
        raise ConfigError(
            f"layers={layers}: the first {least - 1} layers of {spec.label} see a window only and keep nothing in the "
            f"cache; ask for {least} to {spec.layers}"
        )
    return replace(
        spec,
        label=f"{spec.label} with {layers.strip()} of {spec.layers} layers",
        layers=count,
        mtp_layers=0,
        dspark=None,
        moe=replace(moe, first_dense=first_dense, hash_layers=min(moe.hash_layers, count)),
        compressed=compressed and replace(compressed, ratios=compressed.ratios[:count]),
    )
