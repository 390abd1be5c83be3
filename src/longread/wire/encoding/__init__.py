"""DeepSeek's chat encodings: which family renders how, thinks how, and writes its tool calls how.

One file a family. This module knows the table of families and nothing of HTTP. The table is the whole answer to "what
does this checkpoint speak": an explicit ``--chat-encoding``, or ``auto``, which decides by what config.json is known to
be, and guesses by the folder's name and the vocabulary only where releases share a config.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Literal, NamedTuple

from longread.spec.errors import ConfigError
from longread.wire.encoding import dsml
from longread.wire.encoding.conversation import Abilities, Conversation
from longread.wire.encoding.pieces import Rendered
from longread.wire.encoding.v3 import render_r1, render_v3
from longread.wire.encoding.v4 import render_v4, render_v4_0731
from longread.wire.encoding.v31 import render_v31
from longread.wire.encoding.v32 import render_v32
from longread.wire.encoding.v41 import EFFORTS as V41_EFFORTS
from longread.wire.encoding.v41 import render_v41

ToolSyntax = Literal["fenced", "bare"] | dsml.Names


@dataclass(frozen=True, slots=True)
class ChatEncoding:
    """One family's wire format. ``tool_syntax`` is what ``parsing`` looks for in the output."""

    abilities: Abilities
    render: Callable[[Conversation], Rendered]
    tool_syntax: ToolSyntax

    @property
    def name(self) -> str:
        """As ``--chat-encoding`` takes it."""
        return self.abilities.name

    @property
    def thinks(self) -> bool:
        """Whether ``<think>`` and ``</think>`` mean anything in this family's output."""
        return self.abilities.thinking != "never"


# Thinking is on by default where vLLM's tokenizer for the family has it on (V4, V4.1), off for V3.1 and V3.2.
# The aliases of effort names are vLLM's too; the preview of V4 has no level between "high" (no text) and "max".
_ON = {"high": "high"}
_V4 = {"high": "high", "max": "max"}
_ALIASES_0731 = {"minimal": "low", "low": "low", "medium": "low", "high": "high", "xhigh": "high", "max": "max"}
_ENCODINGS = (
    ChatEncoding(Abilities("v3", "never", False, {}), render_v3, "fenced"),
    ChatEncoding(Abilities("r1", "always", True, _ON), render_r1, "fenced"),
    ChatEncoding(Abilities("v3.1", "switch", False, _ON), render_v31, "bare"),
    ChatEncoding(Abilities("v3.2", "switch", False, _ON), render_v32, dsml.V32),
    ChatEncoding(Abilities("v4", "switch", True, _V4, "high", keeps_reasoning=True), render_v4, dsml.V4),
    ChatEncoding(
        Abilities("v4-0731", "switch", True, _ALIASES_0731, "high", keeps_reasoning=True), render_v4_0731, dsml.V4
    ),
    ChatEncoding(
        Abilities("v4.1", "switch", True, V41_EFFORTS, V41_EFFORTS["high"], numeric_effort=True, keeps_reasoning=True),
        render_v41,
        dsml.V41,
    ),
)
ENCODINGS = {encoding.name: encoding for encoding in _ENCODINGS}
ENCODING_NAMES = ("auto", *ENCODINGS)


# What config.json or a bundled model's name decides. V3, V3-0324, R1 and R1-0528 share one config and are not here.
_BY_FAMILY = {"deepseek_v2": "v3", "deepseek_v32": "v3.2", "deepseek_v41": "v4.1"}
_BY_RELEASE = {
    "DeepSeek-V3.1": "v3.1",
    "DeepSeek-V4-Flash": "v4",
    "DeepSeek-V4-Pro": "v4",
    "DeepSeek-V4-Flash-0731": "v4-0731",
    "DeepSeek-V4-Pro-0813": "v4-0731",
    "reader-v3": "v3.1",
    "reader-v4": "v4",
}


class Choice(NamedTuple):
    """``why`` is for the operator; a choice that the checkpoint does not settle says that it is a guess."""

    encoding: ChatEncoding
    why: str


def encoding_for(name: str, family: str, label: str, folder: str, *, has_think: bool) -> Choice:
    """The encoding that ``--chat-encoding name`` means for a model, and why.

    ``label``: the spec's, which is a release's name where config.json is exactly that release's, and a bundled model's
    own. ``folder``: the checkpoint folder's name, asked only where the config leaves it open. ``has_think``: the
    vocabulary has ``<think>`` as a token. Raises ConfigError for an unknown name.
    """
    if name != "auto":
        if name not in ENCODINGS:
            raise ConfigError(f"--chat-encoding must be one of {', '.join(ENCODING_NAMES)}, got {name!r}")
        return Choice(ENCODINGS[name], "as --chat-encoding says")
    if family in _BY_FAMILY:
        return Choice(ENCODINGS[_BY_FAMILY[family]], f"the only one of {family}")
    if label in _BY_RELEASE:
        return Choice(ENCODINGS[_BY_RELEASE[label]], f"config.json is that of {label}")
    words = set(folder.lower().replace("_", "-").split("-"))
    chosen, why = _guess_v4(words) if family == "deepseek_v4" else _guess_v3(label, words, has_think)
    return Choice(ENCODINGS[chosen], f"a guess: {why}; --chat-encoding settles it")


def _guess_v4(words: Set[str]) -> tuple[str, str]:
    if words & {"0731", "0813"}:
        return "v4-0731", "the folder's name says 0731 or 0813"
    return "v4", "config.json is no known release's and the folder's name says neither 0731 nor 0813"


def _guess_v3(label: str, words: Set[str], has_think: bool) -> tuple[str, str]:
    same = "V3 and R1 have the same config.json" if label == "DeepSeek-V3" else "config.json is no known release's"
    if "r1" in words:
        return "r1", f"{same} and the folder's name says R1"
    if not has_think:
        return "v3", f"{same} and the vocabulary has no <think>"
    if label != "DeepSeek-V3":
        return "v3.1", f"{same} and the vocabulary has <think>"
    if "v3" in words:
        return "v3", f"{same} and the folder's name says V3"
    return "r1", f"{same} and the vocabulary has <think>"
