"""The routes of stored documents: read one in, list them, look at one, remove one.

Knows: the shelf, the readings, the chat encoding. Must not know: how a document is stored. All keys of a server see,
ask about and remove the same documents.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from longread.server.body import with_body
from longread.server.errors import json_response
from longread.server.named import not_found, shelf_of
from longread.server.prompts import pieces_bytes, prompt_of
from longread.server.reading import Reading, store_failed
from longread.server.state import ServerState, state_of
from longread.server.streaming import while_connected
from longread.spec.documents import Document, document_id, landing_key
from longread.spec.errors import ContextLengthError, StoreError
from longread.wire.body import parse_json
from longread.wire.documents.prefix import document_pieces
from longread.wire.responses import Json
from longread.wire.types import DocumentRequest, validate

logger = logging.getLogger("longread.server")

Result = TypeVar("Result")


async def create(request: Request) -> Response:
    """Read a text into the store. 200 with the document once it is read; with ``wait`` false 202 at once, and GET says
    how it stands. Raises RequestError; the client may go away, the reading goes on.
    """
    state = state_of(request)
    shelf = shelf_of(state)
    made, _ = await with_body(request, state.bodies, state.options.max_body_bytes, lambda body: prepare(state, body))
    reading, wait = made
    reading.owner = request.state.owner
    await _ask(lambda: shelf.get(reading.id))  # a store that fails is found before the reading, not behind it
    reading = await state.readings.begin(reading, shelf)
    if not wait:
        return json_response(reading_json(reading, state.model_names[0]), status=202)
    assert reading.task is not None
    await while_connected(request.receive, _ended(reading.task))
    if reading.error is not None:
        raise reading.error
    return json_response(reading_json(reading, state.model_names[0]))


def prepare(state: ServerState, body: bytes) -> tuple[Reading, bool]:
    """From bytes to what is to be read, and whether the client waits for it. Raises RequestError."""
    fields = validate(DocumentRequest, parse_json(body))
    state.check_model(fields.model)
    pieces = document_pieces(fields.text, state.encoding, state.template_defaults)
    try:
        prompt = prompt_of(state, pieces_bytes(state, pieces))
    except ContextLengthError as error:
        raise ContextLengthError(error.message, "text") from None
    key = document_id(landing_key(state.driver.engine_info.cache_root, prompt.ids))
    reading = Reading(key, fields.name or key, fields.text, prompt.ids, prompt.hashed, bool(fields.pinned))
    return reading, fields.wait is not False


async def listed(request: Request) -> Response:
    """Those on their way, then the stored ones, the newest first."""
    state = state_of(request)
    stored = await _ask(shelf_of(state).list)
    going = [reading_json(reading, state.model_names[0]) for reading in state.readings.all()]
    ids = {entry["id"] for entry in going}
    return json_response(
        {"object": "list", "data": going + [document_json(each) for each in stored if each.id not in ids]}
    )


async def one(request: Request) -> Response:
    """404 for an id that is neither stored nor on its way."""
    state, name = state_of(request), request.path_params["id"]
    shelf = shelf_of(state)
    reading = state.readings.find(name)
    if reading is not None and reading.state == "reading":
        return json_response(reading_json(reading, state.model_names[0]))
    stored = await _ask(lambda: shelf.get(name))
    if stored is not None:
        return json_response(document_json(stored))
    if reading is not None:
        return json_response(reading_json(reading, state.model_names[0]))
    raise await _ask(lambda: not_found(shelf, name, None))


async def remove(request: Request) -> Response:
    """Stop reading it, or forget it. 404 as above."""
    state, name = state_of(request), request.path_params["id"]
    shelf = shelf_of(state)
    stopped = state.readings.stop(name)
    removed = await _ask(lambda: shelf.remove(name))
    if not (stopped or removed):
        raise await _ask(lambda: not_found(shelf, name, None))
    return json_response({"id": name, "object": "longread.document", "deleted": True})


def document_json(document: Document) -> Json:
    """A stored document. "incomplete": its text is here, of its state some was evicted or damaged."""
    return {
        "id": document.id,
        "object": "longread.document",
        "status": "ready" if document.whole else "incomplete",
        "name": document.name,
        "model": document.model,
        "bytes": document.size,
        "tokens": document.tokens,
        "created": int(document.created),
        "last_used": int(document.last_used),
        "pinned": document.pinned,
    }


def reading_json(reading: Reading, model: str) -> Json:
    """One on its way, or one that has just arrived: then with how many of its tokens had been read before."""
    if reading.document is not None:
        return document_json(reading.document) | {"reused_tokens": reading.reused_tokens}
    told: Json = {
        "id": reading.id,
        "object": "longread.document",
        "status": reading.state,
        "name": reading.name,
        "model": model,
        "bytes": reading.size,
        "tokens": reading.tokens,
        "created": int(reading.created),
        "pinned": reading.pinned,
    }
    if reading.state == "reading" and reading.progress is not None:
        told["tokens_read"] = reading.progress.tokens
    if reading.error is not None:
        told["error"] = {"message": reading.error.message, "code": reading.error.code}
    return told


async def _ended(task: "asyncio.Task[None]") -> None:
    """Wait for a reading that nobody's leaving may cancel."""
    await asyncio.shield(task)


async def _ask(call: Callable[[], Result]) -> Result:
    """What the shelf says, asked off the loop. Raises OverloadedError where the store fails."""
    try:
        return await asyncio.to_thread(call)
    except StoreError as error:
        logger.error("the document store cannot be used: %s", error)
        raise store_failed(error) from error
