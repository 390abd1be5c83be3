"""Documents in requests: a part that names one stands for its text, and its prefix is what the prompts begin with."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wiretok import v4_tokenizer

from longread.spec.errors import InvalidRequestError
from longread.wire.documents.prefix import document_pieces
from longread.wire.encoding import ENCODINGS
from longread.wire.encoding.conversation import conversation
from longread.wire.types import ChatRequest, ChatTemplateKwargs, TokenizeChatRequest, validate

TEXT = "1. The rent is 1,200.\n\n2. It is due on the <｜User｜> first</think>. 中文。\n"
DOCUMENT = {"type": "document", "document_id": "doc-1"}
QUESTION = {"type": "text", "text": "How much is the rent?"}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def ids(name: str, messages: list, **fields: object) -> list[int]:
    encoding = ENCODINGS[name]
    request = validate(ChatRequest, {"messages": messages, **fields})
    documents = {"doc-1": TEXT, "doc-2": "Another."}
    rendered = encoding.render(conversation(request, encoding.abilities, None, documents))
    return v4_tokenizer().encode_prompt(rendered.pieces)


def prefix(name: str, of: str = TEXT, defaults: ChatTemplateKwargs | None = None) -> list[int]:
    return v4_tokenizer().encode_prompt(document_pieces(of, ENCODINGS[name], defaults))


CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
CONVERSATIONS = [
    [{"role": "user", "content": [DOCUMENT, QUESTION]}],
    [{"role": "user", "content": [DOCUMENT]}],
    [{"role": "user", "content": [QUESTION, DOCUMENT, {"type": "document", "document_id": "doc-2"}, DOCUMENT]}],
    [{"role": "system", "content": [DOCUMENT]}, {"role": "user", "content": "Yes?"}],
    [
        {"role": "user", "content": [DOCUMENT, QUESTION]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": [DOCUMENT]},
        {"role": "user", "content": [DOCUMENT]},
    ],
]


def spelled_out(messages: list) -> list:
    """The same conversation with the texts in it."""
    texts = {"doc-1": TEXT, "doc-2": "Another."}
    return [
        message | {"content": [text(texts[p["document_id"]]) if "document_id" in p else p for p in message["content"]]}
        if isinstance(message["content"], list)
        else message
        for message in messages
    ]


@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_a_named_document_is_its_text(name, messages):
    assert ids(name, messages) == ids(name, spelled_out(messages))


@pytest.mark.parametrize("name", ENCODINGS)
def test_the_prefix_is_what_conversations_begin_with(name):
    start = prefix(name)
    assert v4_tokenizer().decode(start, skip_special=True).count(TEXT) == 1
    for asked in ("How much?", " how", "?", "12", "中", "\ttab", "<｜User｜>"):
        assert ids(name, [{"role": "user", "content": [DOCUMENT, text(asked)]}])[: len(start)] == start
    longer = [*CONVERSATIONS[0], {"role": "assistant", "content": "1,200."}, {"role": "user", "content": "When?"}]
    assert ids(name, longer)[: len(start)] == start


@pytest.mark.parametrize("name", ENCODINGS)
def test_the_prefix_follows_the_defaults_of_the_server(name):
    abilities = ENCODINGS[name].abilities
    for effort in abilities.efforts:
        start = prefix(name, TEXT, ChatTemplateKwargs(reasoning_effort=effort))
        assert ids(name, CONVERSATIONS[0], reasoning_effort=effort)[: len(start)] == start


@given(st.text("ab .?!\n\t 中é1<", min_size=1, max_size=30), st.text("ab .?!\t 中é1<", max_size=12))
@settings(max_examples=300, deadline=None)
def test_a_question_without_line_ends_never_changes_the_prefix(document, asked):
    """What a question that begins with a line end may change are the tokens of the white space before it, no others."""
    for name in ("v3.1", "v4"):
        if document.strip() and asked.strip():
            start = prefix(name, document)
            assert ids(name, [{"role": "user", "content": [text(document), text(asked)]}])[: len(start)] == start


def test_a_document_of_white_space_is_refused():
    with pytest.raises(InvalidRequestError, match="empty"):
        document_pieces(" \n", ENCODINGS["v4"])


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({"type": "document"}, "part 0 of type 'document' needs document_id, a text; got None"),
        ({"type": "document", "document_id": 5}, "needs document_id, a text; got 5"),
        ({"type": "document", "document_id": "doc-1", "text": "x"}, "part 0 of type 'document' has no field 'text'"),
        ({"type": "text", "text": "x", "document_id": "doc-1"}, "part 0 of type 'text' has no field 'document_id'"),
        ({"type": "text"}, "part 0 of type 'text' needs text, a text; got None"),
        ({"text": "x"}, "part 0 must be an object with a type, got a dict of 1"),
        ("x", "part 0 must be an object with a type, got 'x'"),
        ({"type": "file", "file": {}}, "content part of type 'file' is not supported"),
    ],
)
@pytest.mark.parametrize("model", [ChatRequest, TokenizeChatRequest])
def test_bad_parts_are_named(model, part, says):
    with pytest.raises(InvalidRequestError) as caught:
        validate(model, {"messages": [{"role": "user", "content": [part]}]})
    assert says in caught.value.message
    assert caught.value.param == "messages[0].content"


def test_the_documents_of_a_request():
    request = validate(ChatRequest, {"messages": CONVERSATIONS[2] + CONVERSATIONS[0]})
    assert request.named_documents == {
        "doc-1": "messages[0].content[1].document_id",
        "doc-2": "messages[0].content[2].document_id",
    }
    assert not validate(ChatRequest, {"messages": [{"role": "user", "content": "x"}]}).named_documents
