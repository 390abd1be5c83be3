"""The part of a prompt that a document stands for: what every conversation about it has in common.

That is a conversation that opens with the document, as the first part of the first user message, without system text
and tools, up to where the next part begins: BOS, the user's token, the text, and what the encoding puts between parts.
Knows encodings; must not know tokenizers, models or stores.

Why the tokens of the prefix are those of the whole prompt: the text ends in the separator (line ends), and DeepSeek's
pre-tokeniser ends a piece behind line ends unless more white space with a line end follows. A question that begins so
has other tokens for the separator itself; what was read is then reused up to the last page end before it.
"""

from longread.spec.errors import InvalidRequestError
from longread.wire.encoding import ChatEncoding
from longread.wire.encoding.conversation import conversation
from longread.wire.encoding.pieces import Piece
from longread.wire.types import ChatRequest, ChatTemplateKwargs, validate

_QUESTION = "?"  # stands for what follows; cut off again


def document_pieces(text: str, encoding: ChatEncoding, defaults: ChatTemplateKwargs | None = None) -> tuple[Piece, ...]:
    """The prompt prefix of a document, as ``Tokenizer.encode_prompt`` takes it. ``defaults``: as ``conversation``'s.

    Raises InvalidRequestError for a text that holds nothing but white space.
    """
    if not text.strip():
        raise InvalidRequestError("text: the document is empty; give one with some text in it", "text")
    parts = [{"type": "text", "text": part} for part in (text, _QUESTION)]
    asked = validate(ChatRequest, {"messages": [{"role": "user", "content": parts}]})
    pieces = encoding.render(conversation(asked, encoding.abilities, defaults)).pieces
    at = max(i for i, piece in enumerate(pieces) if not piece.markup and piece.text.startswith(text))
    cut = pieces[at].text.rindex(_QUESTION)
    return (*pieces[:at], Piece(pieces[at].text[:cut], False))
