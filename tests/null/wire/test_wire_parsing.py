"""The output parser: each family's markup, each way a model goes wrong, and independence of how the text is cut."""

import itertools
import json
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longread.wire.encoding import ENCODINGS
from longread.wire.encoding.v3 import CALL, CALLS, END_CALL, END_CALLS, SEP
from longread.wire.parsing import ContentDelta, OutputParser, ReasoningDelta, ToolArgumentsDelta, ToolCallStart

V4_CALL = (
    "\n\n<｜DSML｜tool_calls>\n"
    '<｜DSML｜invoke name="search">\n'
    '<｜DSML｜parameter name="q" string="true">say "hi"\n\\o/</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="n" string="false">[1, {"a": null}]</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
    "</｜DSML｜tool_calls>"
)
ARGS = {"q": 'say "hi"\n\\o/', "n": [1, {"a": None}]}


def run(name, text, *, thinking=False, tools=("search",), size=None, truncated=False):
    ids = itertools.count()
    parser = OutputParser(ENCODINGS[name], in_reasoning=thinking, tools=tools, make_id=lambda: f"id{next(ids)}")
    events = []
    for i in range(0, len(text), size or max(len(text), 1)):
        events += parser.feed(text[i : i + (size or max(len(text), 1))])
    events += parser.finish(truncated=truncated)
    streamed = "".join(e.text for e in events if isinstance(e, ContentDelta))
    assert streamed == parser.content
    assert "".join(e.text for e in events if isinstance(e, ReasoningDelta)) == parser.reasoning
    for i, call in enumerate(parser.calls):
        assert call.arguments == "".join(e.text for e in events if isinstance(e, ToolArgumentsDelta) and e.index == i)
    assert [e.id for e in events if isinstance(e, ToolCallStart)] == [c.id for c in parser.calls]
    return parser


def outcome(parser):
    calls = [(c.name, c.arguments, c.complete) for c in parser.calls]
    return parser.reasoning, parser.content, calls


def fenced(*pairs):
    return CALLS + "\n".join(f"{CALL}function{SEP}{n}\n```json\n{a}\n```{END_CALL}" for n, a in pairs) + END_CALLS


def bare(*pairs):
    return CALLS + "".join(f"{CALL}{n}{SEP}{a}{END_CALL}" for n, a in pairs) + END_CALLS


def dsml(name, *pairs):
    block = {"v3.2": "function_calls", "v4": "tool_calls", "v4-0731": "tool_calls", "v4.1": " calls"}[name]
    s = " " if name == "v4.1" else ""
    calls = ""
    for tool, args in pairs:
        calls += f'<｜DSML｜{s}invoke name="{tool}">\n'
        for key, value in json.loads(args).items():
            kind, text = ("true", value) if isinstance(value, str) else ("false", json.dumps(value))
            calls += f'<｜DSML｜{s}parameter name="{key}" string="{kind}">{text}</｜DSML｜{s}parameter>\n'
        calls += f"</｜DSML｜{s}invoke>\n"
    return f"\n\n<｜DSML｜{block}>\n{calls}</｜DSML｜{block}>"


def markup(name, *pairs):
    if name in ("v3", "r1"):
        return fenced(*pairs)
    return bare(*pairs) if name == "v3.1" else dsml(name, *pairs)


@pytest.mark.parametrize("name", ENCODINGS)
def test_two_calls_with_text_around(name):
    text = "Let me look." + markup(name, ("search", '{"q": "a<b"}'), ("other", '{"n": 2}')) + "Done."
    parser = run(name, text, tools=("search", "other"))
    assert parser.content == "Let me look.Done."
    assert [(c.name, json.loads(c.arguments), c.complete) for c in parser.calls] == [
        ("search", {"q": "a<b"}, True),
        ("other", {"n": 2}, True),
    ]


@pytest.mark.parametrize("name", ENCODINGS)
def test_text_between_two_blocks_is_content(name):
    one = markup(name, ("search", '{"q": "1"}'))
    parser = run(name, one + "then " + one)
    assert parser.content == "then " and len(parser.calls) == 2 and all(c.complete for c in parser.calls)


@pytest.mark.parametrize("name", ENCODINGS)
def test_markup_without_offered_tools_is_text(name):
    text = "See" + markup(name, ("search", '{"q": "1"}'))
    parser = run(name, text, tools=())
    assert parser.content == text and parser.calls == []


@pytest.mark.parametrize("name", [n for n in ENCODINGS if n != "v3"])
def test_reasoning_then_content(name):
    assert outcome(run(name, "why</think>because", thinking=True)) == ("why", "because", [])


@pytest.mark.parametrize("name", [n for n in ENCODINGS if n != "v3"])
@pytest.mark.parametrize("text", ["only reasoning", "only reasoning</think>", "only reasoning</think>\n\n"])
@pytest.mark.parametrize("truncated", [False, True])
def test_no_answer_falls_back_to_the_reasoning(name, text, truncated):
    parser = run(name, text, thinking=True, truncated=truncated)
    assert parser.reasoning == "only reasoning"
    assert parser.content.strip() == "only reasoning"


def test_v3_has_no_reasoning_tags():
    assert run("v3", "a<think>b</think>c").content == "a<think>b</think>c"


@pytest.mark.parametrize(
    ("text", "thinking", "reasoning", "content"),
    [
        ("a</think>b</think>c", True, "a", "b</think>c"),
        ("a</think>\n</think>b", True, "a", "\nb"),
        ("</think>b", False, "", "b"),
        ("<think>a</think>b", True, "a", "b"),
        ("<think>a</think>b", False, "a", "b"),
        ("a</think><think>b</think>c", True, "ab", "c"),
        ("a<think>b</think>c", True, "a<think>b", "c"),
        ("x <think> y", False, "", "x <think> y"),
        ("a</thin", True, "a</thin", "a</thin"),
        ("a</think>b</thi", True, "a", "b</thi"),
    ],
)
def test_think_tags_twice_or_partial(text, thinking, reasoning, content):
    parser = run("v4", text, thinking=thinking)
    assert (parser.reasoning, parser.content) == (reasoning, content)


def test_dsml_values_raw_and_json():
    parser = run("v4", "Hm." + V4_CALL)
    assert parser.content == "Hm."
    assert json.loads(parser.calls[0].arguments) == ARGS
    assert parser.calls[0].complete


@pytest.mark.parametrize("name", [n for n in ENCODINGS if n != "v3"])
def test_call_inside_reasoning_of_an_offered_tool_is_a_call(name):
    call = markup(name, ("search", '{"q": "1"}'))
    parser = run(name, f"so I search{call} and then</think>answer", thinking=True)
    assert parser.reasoning == "so I search and then" and parser.content == "answer"
    assert [(c.name, c.complete) for c in parser.calls] == [("search", True)]


@pytest.mark.parametrize("name", [n for n in ENCODINGS if n != "v3"])
def test_call_inside_reasoning_of_an_unknown_tool_is_a_quotation(name):
    call = markup(name, ("nope", '{"q": "1"}'))
    parser = run(name, f"one writes{call} like so</think>answer", thinking=True)
    assert parser.calls == [] and parser.content == "answer"
    assert parser.reasoning == f"one writes{call} like so"


@pytest.mark.parametrize("name", ENCODINGS)
def test_unknown_tool_in_the_answer_is_a_call(name):
    parser = run(name, markup(name, ("nope", '{"q": "1"}')))
    assert [(c.name, c.arguments, c.complete) for c in parser.calls] == [("nope", '{"q": "1"}', True)]


@pytest.mark.parametrize("name", ENCODINGS)
def test_markup_inside_a_string_is_text(name):
    inner = f"x{END_CALL}{END_CALLS}</｜DSML｜invoke><｜DSML｜tool_calls>y</think>"
    parser = run(name, markup(name, ("search", json.dumps({"q": inner}, ensure_ascii=False)), ("b", "{}")))
    assert [json.loads(c.arguments) for c in parser.calls] == [{"q": inner}, {}]
    assert parser.content == ""


def test_dsml_close_tag_inside_a_json_string_is_text():
    value = json.dumps(["a</｜DSML｜parameter>b"], ensure_ascii=False)
    text = (
        '<｜DSML｜tool_calls><｜DSML｜invoke name="search"><｜DSML｜parameter name="n" string="false">'
        f"{value}</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>"
    )
    assert json.loads(run("v4", text).calls[0].arguments) == {"n": ["a</｜DSML｜parameter>b"]}


@pytest.mark.parametrize("value", ["hello", "{'a': 1}", '"open', "NaN", "", "[1,"])
def test_dsml_value_that_is_no_json_becomes_a_string(value):
    text = (
        '<｜DSML｜invoke name="search">\n<｜DSML｜parameter name="n" string="false">'
        f"{value}</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
    )
    parser = run("v4", text)
    assert json.loads(parser.calls[0].arguments) == {"n": value}
    assert parser.calls[0].complete and parser.content == ""


@pytest.mark.parametrize("size", [None, 1000])
def test_end_tags_inside_an_open_string_cost_linear_time(size):
    """Looking at the whole value again at each tag took seconds, on the event loop."""
    inside = "a</｜DSML｜parameter>" * 4000
    text = f'<｜DSML｜invoke name="search">\n<｜DSML｜parameter name="n" string="false">"{inside}'
    before = time.process_time()
    assert json.loads(run("v4", text + '"</｜DSML｜parameter></｜DSML｜invoke>', size=size).calls[0].arguments) == {
        "n": inside
    }
    run("v4", text, size=size)
    assert time.process_time() - before < 1.0  # 10 s


def test_malformed_json_arguments_stay_as_written_and_do_not_swallow_the_end():
    parser = run("v3.1", bare(("search", '{"q": "open}')) + "after")
    assert [(c.arguments, c.complete) for c in parser.calls] == [('{"q": "open}', True)]
    assert parser.content == "after"
    assert run("v3.1", bare(("search", "not json"))).calls[0].arguments == "not json"


@pytest.mark.parametrize("name", ["v3.2", "v4", "v4.1"])
def test_dsml_arguments_as_one_json_object(name):
    tag = " invoke" if name == "v4.1" else "invoke"
    text = f'<｜DSML｜{tag} name="search">\n{{"q": "</｜DSML｜{tag}>"}}</｜DSML｜{tag}>'
    parser = run(name, text)
    assert json.loads(parser.calls[0].arguments) == {"q": f"</｜DSML｜{tag}>"}
    assert parser.calls[0].complete and parser.content == ""


def test_call_without_the_outer_tag_and_with_a_stray_closing_one():
    inner = V4_CALL.replace("\n\n<｜DSML｜tool_calls>\n", "")
    parser = run("v4", "Hm. " + inner)
    assert parser.content == "Hm. " and len(parser.calls) == 1
    noisy = V4_CALL.replace("</｜DSML｜tool_calls>", "noise</｜DSML｜tool_calls>tail")
    assert run("v4", noisy).content == "\nnoisetail"


def test_missing_end_of_call_is_closed_by_the_end_of_the_block():
    parser = run("v4", V4_CALL.replace("</｜DSML｜invoke>\n", ""))
    assert json.loads(parser.calls[0].arguments) == ARGS and parser.calls[0].complete
    parser = run("v3.1", bare(("search", "{}")).replace(END_CALL, ""))
    assert (parser.calls[0].arguments, parser.calls[0].complete) == ("{}", True)


def test_junk_inside_a_call_is_content():
    parser = run("v4", V4_CALL.replace("</｜DSML｜parameter>\n<", "</｜DSML｜parameter>\n oops \n<", 1))
    assert parser.content == "\n oops \n"
    assert json.loads(parser.calls[0].arguments) == ARGS


@pytest.mark.parametrize("name", ENCODINGS)
def test_block_without_a_call_is_text(name):
    opener = markup(name, ("f", "{}")).partition(">")[0] + ">"
    assert run(name, opener).content == opener
    assert run(name, opener + " and so on").content == opener + " and so on"


@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize("truncated", [False, True])
def test_cut_anywhere_never_looks_complete_and_never_is_empty(name, truncated):
    whole = "Ok" + markup(name, ("search", '{"q": "a b", "n": [1, 2]}'), ("other", '{"k": true}'))
    for size in range(3, len(whole)):
        parser = run(name, whole[:size], tools=("search", "other"), truncated=truncated)
        assert parser.content.startswith("Ok")
        for call, want in zip(parser.calls, ({"q": "a b", "n": [1, 2]}, {"k": True}), strict=False):
            if call.complete:
                got = json.loads(call.arguments)
                assert got == want or (not truncated and got.items() <= want.items())
            elif truncated and call is parser.calls[-1]:
                cut = re.sub(r"</?(｜[^>]*)?$", "", call.arguments)  # a "<" at the cut may be the value's own
                assert cut.strip() in json.dumps(want)
                with pytest.raises(ValueError):
                    json.loads(call.arguments)


def test_long_heads_are_text():
    text = '<｜DSML｜tool_calls><｜DSML｜invoke name="' + "x" * 5000 + '">'
    assert run("v4", text).content == text == run("v4", text, size=7).content


FRAGMENTS = [
    *("a", " ", "\n", "\n\n", "é", "<", ">", "{", "}", '"', "\\", "</", "｜", "```", "{}", '{"k": "v"}', "text "),
    *(
        "<think>",
        "</think>",
        CALLS,
        CALL,
        SEP,
        END_CALL,
        END_CALLS,
        "function",
        "search",
        "other",
        "\n```json\n",
        "\n```",
    ),
    *("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", '<｜DSML｜invoke name="search">', '<｜DSML｜invoke name="zz">'),
    *("</｜DSML｜invoke>", '<｜DSML｜parameter name="p" string="true">', '<｜DSML｜parameter name="p" string="false">'),
    *(
        "<｜DSML｜parameter name=>",
        "</｜DSML｜parameter>",
        V4_CALL,
        bare(("search", '{"q": 1}')),
        fenced(("search", "{}")),
    ),
    *(
        "<｜DSML｜ calls>",
        '<｜DSML｜ invoke name="search">',
        "</｜DSML｜ invoke>",
        "</｜DSML｜ calls>",
        "<｜DSML｜",
        "</｜DSM",
    ),
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)


@given(
    name=st.sampled_from(sorted(ENCODINGS)),
    text=TEXTS,
    thinking=st.booleans(),
    offered=st.booleans(),
    truncated=st.booleans(),
    size=st.integers(1, 9),
)
def test_any_split_gives_the_same_result(name, text, thinking, offered, truncated, size):
    tools = ("search", "other") if offered else ()
    whole = run(name, text, thinking=thinking, tools=tools, truncated=truncated)
    parts = run(name, text, thinking=thinking, tools=tools, truncated=truncated, size=size)
    assert outcome(parts) == outcome(whole)


@given(
    name=st.sampled_from(sorted(ENCODINGS)),
    fragments=st.lists(st.sampled_from([*FRAGMENTS, *["Α"] * 5]), max_size=20),
    thinking=st.booleans(),
)
def test_no_letter_is_lost(name, fragments, thinking):
    """Letters strewn between tags and halves of tags all come out again, each once: only tags may disappear."""
    marked = "".join(chr(ord("Α") + i) if part == "Α" else part for i, part in enumerate(fragments))
    parser = run(name, marked, thinking=thinking, tools=("search", "other"))
    reasoning, content = parser.reasoning, parser.content
    if content.endswith(reasoning):  # no letter comes twice, so this is the reasoning repeated for want of an answer
        content = content[: len(content) - len(reasoning)]
    got = reasoning + content + "".join(c.name + c.arguments for c in parser.calls)
    assert sorted(c for c in got if "Α" <= c <= "Ω") == sorted(c for c in marked if "Α" <= c <= "Ω")


@given(name=st.sampled_from(sorted(ENCODINGS)), text=TEXTS)
def test_without_tools_and_thinking_tags_the_text_is_unchanged(name, text):
    text = text.replace("think", "thought")
    assert run(name, text, tools=()).content == text
