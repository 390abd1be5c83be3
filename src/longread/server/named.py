"""The documents that a request names, as texts.

Knows: the shelf, the readings. Must not know: routes, encodings. Called off the loop: a shelf reads a disk.
"""

import logging
from collections.abc import Mapping
from difflib import get_close_matches

from longread.server.reading import store_failed
from longread.server.state import ServerState
from longread.spec.documents import DocumentShelf
from longread.spec.errors import DocumentNotFoundError, InvalidRequestError, PayloadTooLargeError, StoreError
from longread.wire.types import PromptFields

logger = logging.getLogger("longread.server")

MAX_NAMED = 64
SHOWN = 3  # near ids in an error
NO_SHELF = "this server keeps no documents: start it with --store DIR, or send the text itself"


def may_name_documents(body: bytes) -> bool:
    """Whether a body may name documents, before it is parsed: a short body can then mean long work. Escapes could hide
    the word.
    """
    return b"document" in body or b"\\u" in body


def shelf_of(state: ServerState) -> DocumentShelf:
    """Raises InvalidRequestError where the server has none."""
    if state.shelf is None:
        raise InvalidRequestError(NO_SHELF, code="no_document_store")
    return state.shelf


def texts_named(state: ServerState, fields: PromptFields) -> Mapping[str, str]:
    """The text of each document that the messages name. Raises DocumentNotFoundError with near ids,
    PayloadTooLargeError where they are longer together than a body may be, each counted as often as it is named, and
    OverloadedError where the store fails.
    """
    named = fields.named_documents
    if not named:
        return {}
    if len(named) > MAX_NAMED:
        raise InvalidRequestError(f"messages: {len(named)} documents are named, the limit is {MAX_NAMED}", "messages")
    try:
        read = _sizes_checked(state, named, fields.document_counts)
        return {key: read[key] if key in read else _stored_text(state, key, param) for key, param in named.items()}
    except StoreError as error:
        logger.error("the documents of a request cannot be read: %s", error)
        raise store_failed(error) from error


def _sizes_checked(state: ServerState, named: Mapping[str, str], counts: Mapping[str, int]) -> dict[str, str]:
    """The texts of those that are being read. By the sizes on record, each as often as it stands in the prompt: no
    stored text is unpacked, and none repeated, before all are known to fit.
    """
    read: dict[str, str] = {}
    size = 0
    for document_id, param in named.items():
        text = state.readings.text(document_id)
        known = None if text is not None else shelf_of(state).get(document_id)
        if text is not None:
            read[document_id] = text
        elif known is None:
            raise not_found(shelf_of(state), document_id, param)
        size += counts[document_id] * (known.size if known is not None else len((text or "").encode()))
        if size > state.options.max_body_bytes:
            raise PayloadTooLargeError(
                f"the named documents have {size} bytes or more together, each counted as often as it is named, the "
                f"limit is {state.options.max_body_bytes} (--max-body-bytes): name fewer",
                param,
                "payload_too_large",
            )
    return read


def _stored_text(state: ServerState, document_id: str, param: str) -> str:
    text = shelf_of(state).text(document_id)
    if text is None:
        raise DocumentNotFoundError(
            f"the text of document {document_id[:200]!r} is gone or damaged in the store: read it in again, or send "
            "the text",
            param,
            "document_not_found",
        )
    return text


def not_found(shelf: DocumentShelf, document_id: str, param: str | None) -> DocumentNotFoundError:
    """With the nearest ids, or the ids of the documents that have the given text as their name."""
    known = {document.id: document.name for document in shelf.list()}
    near = [key for key, name in known.items() if name == document_id][:SHOWN]
    near = near or get_close_matches(document_id[:200], known, n=SHOWN, cutoff=0.6)
    hint = "did you mean " + " or ".join(f"{key} ({known[key]!r})" for key in near) + "?; " if near else ""
    return DocumentNotFoundError(
        f"no document {document_id[:200]!r} is stored here; {hint}GET /v1/longread/documents lists them",
        param,
        "document_not_found",
    )
