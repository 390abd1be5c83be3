"""What is loaded and under which name: repositories, and each release's own notation of thoughts and tool calls.

Releases that share an architecture differ here: R1 always thinks, V3.1 may, V3 does not. Knows no flag.
"""

from dataclasses import dataclass

from longread.plan.deployment import Deployment
from longread.plan.launch.command import Options
from longread.spec.errors import ConfigError
from longread.spec.releases import ALIASES, release_name


@dataclass(frozen=True, slots=True)
class Notation:
    """Parsers by vLLM's names (SGLang's differ in hyphens, ``sglang_reasoning`` and ``sglang_tool``).

    ``encoder``: vLLM's tokenizer mode that writes prompts, where the release ships no chat template.
    """

    reasoning: str | None = None
    tool: str | None = None
    encoder: str | None = None

    @property
    def sglang_reasoning(self) -> str | None:
        return self.reasoning.replace("_", "-") if self.reasoning is not None else None

    @property
    def sglang_tool(self) -> str | None:
        return self.tool.replace("_", "") if self.tool is not None else None


_V3, _R1 = Notation(None, "deepseek_v3"), Notation("deepseek_r1", "deepseek_v3")
_V31 = Notation("deepseek_v3", "deepseek_v31")
_V32 = Notation("deepseek_v3", "deepseek_v32", "deepseek_v32")
_V4 = Notation("deepseek_v4", "deepseek_v4", "deepseek_v4")
_V41 = Notation("deepseek_v41", "deepseek_v41", "deepseek_v41")
NOTATIONS = {
    "DeepSeek-V2-Lite": Notation(),
    "DeepSeek-V2": Notation(),
    "DeepSeek-V3": _V3,
    "DeepSeek-V3-0324": _V3,
    "DeepSeek-R1": _R1,
    "DeepSeek-R1-0528": _R1,
    "DeepSeek-V3.1": _V31,
    "DeepSeek-V3.1-Terminus": _V31,
    "DeepSeek-V3.2-Exp": _V31,  # ships V3.1's chat template (assets/chat_template.jinja), not V3.2's encoder
    "DeepSeek-V3.2": _V32,
    "DeepSeek-V4-Flash": _V4,
    "DeepSeek-V4-Flash-0731": _V4,
    "DeepSeek-V4-Pro": _V4,
    "DeepSeek-V4-Pro-0813": _V4,
    "DeepSeek-V4.1-Flash": _V41,
    "DeepSeek-V4.1-Flash-1017": _V41,
}
_FAMILIES = {
    "deepseek_v2": Notation(),
    "deepseek_v3": _V3,
    "deepseek_v32": _V32,
    "deepseek_v4": _V4,
    "deepseek_v41": _V41,
}


def release_of(d: Deployment, options: Options) -> str | None:
    """The public release: as asked, by the last part of what is loaded, or by the architecture. None: none of them."""
    for text in (options.name, _last(options.model) if options.model is not None else None, d.spec.label):
        found = release_name(text) if text is not None else None
        if found is not None:
            return found
    return None


def name_of(d: Deployment, options: Options) -> str:
    """What clients write in "model"."""
    if options.name is not None:
        return options.name
    return _last(options.model) if options.model is not None else d.spec.label


def model_of(d: Deployment, options: Options) -> str:
    """Repository or folder that the engine loads. Raises ``ConfigError`` for a model without a public name."""
    if options.model is not None:
        return options.model
    found = release_name(options.name or d.spec.label)
    if found is None:
        raise ConfigError(
            f"{d.spec.label} has no public checkpoint; name the folder that the engine shall load (--model-path)"
        )
    return f"deepseek-ai/{found}"


def notation_of(d: Deployment, options: Options) -> Notation:
    found = release_of(d, options)
    return NOTATIONS[found] if found is not None else _FAMILIES[d.spec.family]


def unsure(d: Deployment, options: Options) -> str | None:
    """A note where several releases share the architecture and nothing named one."""
    alike = [d.spec.label, *(alias for alias, base in ALIASES.items() if base == d.spec.label)]
    named = [options.name, _last(options.model) if options.model is not None else None]
    if len(alike) == 1 or options.model is None or any(n is not None and release_name(n) is not None for n in named):
        return None
    return (
        f"the folder may hold any of {', '.join(alike)}: parsers are those of {alike[0]}; for another plan by its name "
        "with --model-path"
    )


def _last(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1] or path
