"""DeepSeek's chat encodings: which family renders how, thinks how, and writes its tool calls how.

One file a family. This module knows the table of families and nothing of HTTP. The table is the whole answer to "what
does this checkpoint speak": an explicit ``--chat-encoding``, or ``auto``, which decides by model family, by the release
in the label, and for V3's architecture (shared by V3, R1 and V3.1) by label first and vocabulary second.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

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


def encoding_for(name: str, family: str, label: str, *, has_think: bool) -> ChatEncoding:
    """The encoding that ``--chat-encoding name`` means for a model.

    ``has_think``: the vocabulary has ``<think>`` as a token. ``auto`` picks v3.2, v4.1 by family; v4-0731 where a V4
    label names release 0731 or 0813, else v4; for V3's architecture r1 where the label says R1, v3 where the vocabulary
    has no ``<think>``, else v3.1; v3 for V2. Raises ConfigError for an unknown name.
    """
    if name != "auto":
        if name not in ENCODINGS:
            raise ConfigError(f"--chat-encoding must be one of {', '.join(ENCODING_NAMES)}, got {name!r}")
        return ENCODINGS[name]
    words = label.lower()
    if family == "deepseek_v41":
        chosen = "v4.1"
    elif family == "deepseek_v4":
        chosen = "v4-0731" if "0731" in words or "0813" in words else "v4"
    elif family == "deepseek_v32":
        chosen = "v3.2"
    elif family == "deepseek_v3" and has_think:
        chosen = "r1" if "r1" in words.replace("_", "-").split("-") else "v3.1"
    else:
        chosen = "v3"
    return ENCODINGS[chosen]
