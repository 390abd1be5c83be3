"""DSML, the tag language of V3.2 and V4 for tool calls: its tag names a family, its tools section, its earlier calls.

A tag is ``<``, the special token ``｜DSML｜``, a name and attributes. Parameters carry their value raw where
``string="true"`` and as JSON otherwise. Wording of the tools sections: the releases' encoders (facts: models.md
section 10, which the models were trained on). Parsing is ``parsing``'s.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from longread.wire.encoding.conversation import Call, Conversation, to_json
from longread.wire.encoding.pieces import END_THINK, THINK, PieceWriter

DSML = "｜DSML｜"


@dataclass(frozen=True, slots=True)
class Names:
    """Tag names; V4.1's begin with a space."""

    block: str
    invoke: str
    parameter: str

    def open(self, name: str) -> str:
        """Beginning of an opening tag, without its end: attributes may follow."""
        return f"<{DSML}{name}"

    def close(self, name: str) -> str:
        """A closing tag."""
        return f"</{DSML}{name}>"


V32 = Names("function_calls", "invoke", "parameter")
V4 = Names("tool_calls", "invoke", "parameter")
V41 = Names(" calls", " invoke", " parameter")

_V4_TOOLS = """## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<[D][B]>" \
block like the following:

<[D][B]>
<[D][I] name="$TOOL_NAME">
<[D][P] name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</[D][P]>
...
</[D][I]>
<[D][I] name="$TOOL_NAME2">
...
</[D][I]>
</[D][B]>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> \
BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

[S]

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""

_V32_TOOLS = """## Tools
You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<[D][B]>" block like the following as part of your reply to the user:
<[D][B]>
<[D][I] name="$FUNCTION_NAME">
<[D][P] name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</[D][P]>
...
</[D][I]>
<[D][I] name="$FUNCTION_NAME2">
...
</[D][I]>
</[D][B]>
String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should \
use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types \
(numbers, booleans, arrays, objects).
If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. \
Here is an example:
<[D][B]>
...
</[D][B]>
<function_results>
...
</function_results>
<think>...thinking about results</think>
Here are the functions available in JSONSchema format:
<functions>
[S]
</functions>
"""


def write_tools(out: PieceWriter, conv: Conversation, names: Names) -> None:
    """The tools section, schemas one a line."""
    template = _V32_TOOLS if names is V32 else _V4_TOOLS
    for mark, value in (("[D]", DSML), ("[B]", names.block), ("[I]", names.invoke), ("[P]", names.parameter)):
        template = template.replace(mark, value)
    before, _, behind = template.partition("[S]")
    out.mixed(before, (DSML, THINK, END_THINK))
    out.text("\n".join(to_json(tool) for tool in conv.tools))
    out.mixed(behind, (DSML, THINK, END_THINK))


def write_calls(out: PieceWriter, calls: tuple[Call, ...], names: Names) -> None:
    """Earlier calls as the model wrote them, a blank line before."""
    out.text("\n\n")
    _tag(out, "<", names.block, ">\n")
    for call in calls:
        _tag(out, "<", names.invoke, f' name="{call.name}">\n')
        for i, (key, value) in enumerate(_arguments(call).items()):
            is_text = isinstance(value, str)
            _tag(out, "\n<" if i else "<", names.parameter, f' name="{key}" string="{"true" if is_text else "false"}">')
            out.text(value if isinstance(value, str) else to_json(value))
            _tag(out, "</", names.parameter, ">")
        out.text("\n")
        _tag(out, "</", names.invoke, ">\n")
    _tag(out, "</", names.block, ">")


def _tag(out: PieceWriter, head: str, name: str, tail: str) -> None:
    out.text(head)
    out.markup(DSML)
    out.text(name, tail)


def _arguments(call: Call) -> Mapping[str, object]:
    """Arguments that are no JSON object (a client may send anything back) become one parameter named "arguments"."""
    try:
        value = json.loads(call.arguments)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"arguments": call.arguments}
