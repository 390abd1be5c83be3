"""DeepSeek's public models as specs, and the name of a spec that equals one of them."""

import difflib
from dataclasses import replace
from functools import cache

from longread.spec.errors import ConfigError
from longread.spec.families import build
from longread.spec.model import ModelSpec
from longread.spec.release_configs import CONFIGS

# Same architecture and file format, other weights: one spec serves all names.
ALIASES = {
    "DeepSeek-V3-0324": "DeepSeek-V3",
    "DeepSeek-R1": "DeepSeek-V3",
    "DeepSeek-R1-0528": "DeepSeek-V3",
    "DeepSeek-V3.1-Terminus": "DeepSeek-V3.1",
    "DeepSeek-V3.2-Exp": "DeepSeek-V3.2",
    "DeepSeek-V4.1-Flash-1017": "DeepSeek-V4.1-Flash",
}


def release_names() -> tuple[str, ...]:
    """Every name that ``release`` knows, oldest architecture first."""
    return (*CONFIGS, *ALIASES)


def release_name(name: str) -> str | None:
    """The full name of a release that ``name`` means, an alias as itself; None: no release is called so."""
    return next((full for full in release_names() if _short(full) == _short(name)), None)


@cache
def release(name: str) -> ModelSpec:
    """The spec of a public model by its repository name; "DeepSeek-" may be left out, and case does not matter.

    Raises ``ConfigError`` for an unknown one, naming the nearest.
    """
    known = {_short(full): full for full in release_names()}
    found = release_name(name)
    if found is None:
        near = difflib.get_close_matches(_short(name), known, n=1)
        hint = f"; did you mean {known[near[0]]}?" if near else ""
        raise ConfigError(f"{name!r} is not a known model{hint} (known: {', '.join(release_names())})")
    base = ALIASES.get(found, found)
    return build(CONFIGS[base], label=base)


def _short(name: str) -> str:
    return name.lower().removeprefix("deepseek-ai/").removeprefix("deepseek-")


def label_for(spec: ModelSpec) -> str:
    """The public model with exactly this architecture and file format, or "custom <family>"."""
    for name in CONFIGS:
        if release(name) == replace(spec, label=name):
            return name
    return f"custom {spec.family}"
