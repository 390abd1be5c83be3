"""Bodies and requests: what is refused, with which field, limit and value; what is converted, and how."""

import json
import time

import pytest

from longread.spec.engine import GrammarSpec, SamplingParams
from longread.spec.errors import InvalidRequestError
from longread.spec.limits import MAX_GRAMMAR_CHARACTERS, MAX_LOGIT_BIAS, MAX_STOP_IDS
from longread.wire.body import MAX_CONTAINERS, MAX_DEPTH, parse_json
from longread.wire.fields import IGNORED, JSON_SCHEMA_IGNORED, NEUTRAL
from longread.wire.sampling import for_choice, to_sampling
from longread.wire.types import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    JsonSchema,
    TokenizeChatRequest,
    TokenizeTextRequest,
    validate,
)

ASK = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "empty"),
        (b'{"a": 1', "line 1, column 8"),
        (b'{"a":\n NaN}', "line 2, column 2"),
        (b'{"a": Infinity}', "not valid JSON"),
        (b'{"a": 1e999}', "infinity"),
        (b'{"a": "\xff"}', "not UTF-8 at byte 7"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"a": 1, "b": {"a": 1, "a": 2}}', "'a' twice"),
        (b"[" * 50_000 + b"]" * 50_000, "not valid JSON"),
        (b"[" * 5_000_000 + b"]" * 5_000_000, f"more than {MAX_CONTAINERS} objects and arrays"),
        (b"[" + b'{"a":1},' * MAX_CONTAINERS + b"1]", f"the {MAX_CONTAINERS + 1}th at byte"),
        (b'{"a":' * 200 + b"1" + b"}" * 200, f"deeper than {MAX_DEPTH}"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
        (b"{} x", "not valid JSON"),
    ],
)
def test_bad_bodies(body, says):
    with pytest.raises(InvalidRequestError) as caught:
        parse_json(body)
    assert says in caught.value.message


def test_good_bodies():
    assert parse_json('{"a": ["é", "\\ud83d\\ude00", 1.5, null]}'.encode()) == {"a": ["é", "😀", 1.5, None]}
    assert parse_json(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    assert len(parse_json(b"[" + b"{}," * (MAX_CONTAINERS - 2) + b"{}]")) == MAX_CONTAINERS - 1
    code = "{[, \\" * MAX_CONTAINERS  # braces of a text are none of the body's
    assert parse_json(json.dumps({"a": code, "b": [code]}).encode()) == {"a": code, "b": [code]}


def test_values_are_counted(monkeypatch):
    monkeypatch.setattr("longread.wire.body.MAX_COMMAS", 1000)
    assert len(parse_json(b"[1" + b",1" * 1000 + b"]")) == 1001
    with pytest.raises(InvalidRequestError, match="more than 1000 values"):
        parse_json(b"[1" + b",1" * 1001 + b"]")


def test_a_hostile_body_is_refused_before_it_is_parsed():
    """16 MB of small objects: parsing them twice held the interpreter lock for seconds."""
    body = b"[" + b'{"a":1},' * 2_000_000 + b"{}]"
    before = time.process_time()
    with pytest.raises(InvalidRequestError, match="objects and arrays"):
        parse_json(body)
    assert time.process_time() - before < 0.5  # 3 s when it is parsed


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"temperature": float("nan")}, "temperature", "finite"),
        ({"temperature": -0.1}, "temperature", "greater than or equal to 0, got -0.1"),
        ({"temperature": 2.1}, "temperature", "less than or equal to 2, got 2.1"),
        ({"temperature": True}, "temperature", "got True"),
        ({"temperature": "1"}, "temperature", "got '1'"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"top_k": True}, "top_k", "got True"),
        ({"top_k": -2}, "top_k", "got -2"),
        ({"min_p": 1.5}, "min_p", "got 1.5"),
        ({"repetition_penalty": 0}, "repetition_penalty", "greater than or equal to 0.001, got 0"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty", "greater than or equal to 0.001, got 1e-300"),
        ({"presence_penalty": float("inf")}, "presence_penalty", "finite"),
        ({"n": 0}, "n", "got 0"),
        ({"n": 129}, "n", "less than or equal to 128, got 129"),
        ({"max_tokens": 0}, "max_tokens", "got 0"),
        ({"max_tokens": 1e30}, "max_tokens", "got 1e+30"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, None, "contradict"),
        ({"min_tokens": 5, "max_tokens": 4}, None, "min_tokens 5 is larger than max_tokens 4"),
        ({"stop": ["a", ""]}, "stop[1]", "at least 1"),
        ({"stop": 3}, "stop", "got 3"),
        ({"stop": ["a"] * 65}, "stop", "at most 64"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "got -1"),
        ({"stop_token_ids": [5] * (MAX_STOP_IDS + 1)}, "stop_token_ids", f"at most {MAX_STOP_IDS}"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "'x'"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "from 0 to 2147483647, got '999"),
        ({"logit_bias": {"2147483648": 1}}, "logit_bias", "from 0 to 2147483647"),
        ({"logit_bias": {"05": 1, "5": 2}}, "logit_bias", "got '05'"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", f"at most {MAX_LOGIT_BIAS}"),
        ({"logit_bias": {"7": 101}}, "logit_bias[7]", "got 101"),
        ({"seed": 2**63}, "seed", str(2**63)),
        ({"top_logprobs": 2}, None, "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20, got 21"),
        ({"stream_options": {}}, None, "stream: true"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "Extra"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema is needed"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'xml'"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "2 are"),
        ({"structured_outputs": {}}, "structured_outputs", "0 are"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar", "Extra"),
        ({"guided_json": {}}, "guided_json", "structured_outputs"),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "'huge'"),
        ({"chat_template_kwargs": {"thinking": 1}}, "chat_template_kwargs.thinking", "got 1"),
        ({"chat_template_kwargs": {"thinking": True, "enable_thinking": False}}, "chat_template_kwargs", "contradict"),
        ({"chat_template_kwargs": {"foo": 1}}, "chat_template_kwargs.foo", "Extra"),
        ({"tool_choice": "required"}, "tool_choice", "not honoured"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "not honoured"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function", "'a b'"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools[0].function", "object"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]},
            "tools[0].function",
            "strict must be true or false, got 'yes'",
        ),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "messages[0].role", "'bot'"),
        ({"messages": [{"role": "user"}]}, "messages[0]", "needs content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "got 5"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content",
            "'image_url' is not supported",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]", "tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "prefix": True}]}, "prefix", "not supported"),
        ({"continue_final_message": True}, None, "add_generation_prompt"),
        ({"continue_final_message": True, "add_generation_prompt": False}, None, "'user'"),
        ({"temprature": 1}, "temprature", "did you mean 'temperature'"),
        ({"echo": True}, "echo", "only null or False is accepted, got True"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls", "got False"),
    ],
)
def test_refused_chat_fields(fields, param, says):
    with pytest.raises(InvalidRequestError) as caught:
        validate(ChatRequest, {**ASK, **fields})
    assert caught.value.param == param
    assert says in caught.value.message


@pytest.mark.parametrize("data", [None, [], 5, "x"])
def test_a_body_must_be_an_object(data):
    with pytest.raises(InvalidRequestError, match="JSON object"):
        validate(ChatRequest, data)


def test_ignored_and_neutral_fields_are_accepted():
    neutral = {name: values[0] if values else None for name, values in NEUTRAL.items()}
    request = validate(ChatRequest, {**ASK, **neutral, **dict.fromkeys(IGNORED, "anything")})
    assert request == validate(ChatRequest, ASK)
    assert not set(IGNORED) & set(NEUTRAL)
    known = ChatRequest.model_fields.keys() | CompletionRequest.model_fields.keys()
    assert not (set(IGNORED) | set(NEUTRAL)) & known
    assert not set(JSON_SCHEMA_IGNORED) & JsonSchema.model_fields.keys()
    tool = {"type": "function", "function": {"name": "f", "strict": True}}
    assert validate(ChatRequest, {**ASK, "tools": [tool]}).offered_tools[0].name == "f"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
    ],
)
def test_prompt_shapes(prompt, expected):
    assert validate(CompletionRequest, {"prompt": prompt}).prompts == expected


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([], "not empty"),
        ([1, "a"], "item 1 is 'a'"),
        ([1, True], "item 1 is True"),
        ([1, -1], "got -1"),
        ([[1], []], "item 1"),
        ([[1], [2**31]], str(2**31)),
        ([1.5], "got 1.5"),
        (None, "must be a text"),
        ({}, "must be a text"),
    ],
)
def test_bad_prompts(prompt, says):
    with pytest.raises(InvalidRequestError) as caught:
        validate(CompletionRequest, {"prompt": prompt})
    assert says in caught.value.message and caught.value.param == "prompt"


def test_sampling_defaults_are_the_engines():
    assert to_sampling(validate(ChatRequest, ASK)) == SamplingParams()
    assert to_sampling(validate(CompletionRequest, {"prompt": "x"})) == SamplingParams(max_tokens=16)


def test_sampling_takes_every_field():
    request = validate(
        ChatRequest,
        {
            **ASK,
            "temperature": 0,
            "top_p": 0.5,
            "top_k": 3,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "seed": 2**63 - 1,
            "presence_penalty": 1,
            "frequency_penalty": -1,
            "logit_bias": {"9": 1, "3": -2.5},
            "ignore_eos": True,
            "stop_token_ids": [5, 5, 6],
            "logprobs": True,
            "max_completion_tokens": 9,
            "min_tokens": 2,
            "n": 3,
        },
    )
    assert for_choice(to_sampling(request), 1) == SamplingParams(
        temperature=0.0,
        top_p=0.5,
        top_k=3,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        logit_bias=((3, -2.5), (9, 1.0)),
        stop_token_ids=(5, 6),
        seed=-(2**63),
        logprobs=0,
        max_tokens=9,
        min_tokens=2,
        ignore_eos=True,
    )
    assert to_sampling(validate(ChatRequest, {**ASK, "top_k": -1})).top_k == 0


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, GrammarSpec("json_object")),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "object"}, "strict": False, "description": "d"},
                }
            },
            GrammarSpec("json_schema", '{"type":"object"}'),
        ),
        ({"structured_outputs": {"json": '{"a":1}'}}, GrammarSpec("json_schema", '{"a":1}')),
        ({"structured_outputs": {"regex": "a+"}}, GrammarSpec("regex", "a+")),
        ({"structured_outputs": {"choice": ["a", "é"]}}, GrammarSpec("choice", '["a","é"]')),
        ({"structured_outputs": {"json_object": True}}, GrammarSpec("json_object")),
    ],
)
def test_grammars(fields, expected):
    request = validate(ChatRequest, {**ASK, **fields})
    params = to_sampling(request, grammar_after=7)
    assert params.grammar == expected
    assert params.grammar_after == (None if expected is None else 7)


def test_choices_share_one_grammar():
    schema = {"type": "object", "title": "x" * 1000}
    first = to_sampling(validate(ChatRequest, {**ASK, "seed": 1, "structured_outputs": {"json": schema}}))
    assert [for_choice(first, i).seed for i in range(3)] == [1, 2, 3]
    assert for_choice(first, 2).grammar is first.grammar


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"json": {"title": "x" * MAX_GRAMMAR_CHARACTERS}}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "x" * (MAX_GRAMMAR_CHARACTERS + 1)}}, "structured_outputs"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"title": "x" * MAX_GRAMMAR_CHARACTERS}},
                }
            },
            "response_format",
        ),
    ],
)
def test_a_grammar_that_is_too_long_is_refused(fields, param):
    with pytest.raises(InvalidRequestError, match=f"limit is {MAX_GRAMMAR_CHARACTERS}") as caught:
        to_sampling(validate(ChatRequest, {**ASK, **fields}))
    assert caught.value.param == param


def test_schema_text_that_is_no_json_is_refused():
    with pytest.raises(InvalidRequestError, match="column") as caught:
        to_sampling(validate(ChatRequest, {**ASK, "structured_outputs": {"json": "{"}}))
    assert caught.value.param == "structured_outputs.json"


def test_tokenize_and_detokenize_requests():
    assert validate(TokenizeTextRequest, {"prompt": "x"}).prompt == "x"
    assert validate(TokenizeChatRequest, ASK).messages[0].texts({}) == ("hi",)
    assert validate(DetokenizeRequest, {"tokens": [1, 2]}).tokens == [1, 2]
    with pytest.raises(InvalidRequestError, match=r"tokens\[1\]"):
        validate(DetokenizeRequest, {"tokens": [1, -2]})


@pytest.mark.parametrize("value", [0, 1, -7, 100, 2**63 - 1])
def test_priority_is_any_whole_number(value: int) -> None:
    body = {"messages": [{"role": "user", "content": "?"}], "priority": value}
    assert validate(ChatRequest, body).priority == value
    assert validate(CompletionRequest, {"prompt": "a", "priority": value}).priority == value


@pytest.mark.parametrize("value", [1.0, 1.5, "1", True, [1], 2**63])
def test_a_priority_that_is_no_whole_number_is_refused_by_name(value: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        validate(ChatRequest, {"messages": [{"role": "user", "content": "?"}], "priority": value})
    assert caught.value.param == "priority"
