"""The ASGI application: which route answers what.

Knows: starlette, the routes. Must not know: how an answer is made. Starting it starts loading the model, stopping it
stops the engine; until the model is there, every route that needs it answers 503.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from longread.server import chat, completions, documents, errors, plain, profile, records, text
from longread.server.gate import REQUEST_ID_HEADER, TIMING_HEADER, Gate
from longread.server.state import ServerState
from longread.spec.errors import RequestError

ROUTES = (
    Route("/v1/chat/completions", chat.create, methods=["POST"]),
    Route("/v1/completions", completions.create, methods=["POST"]),
    Route("/v1/models", plain.models, methods=["GET"]),
    Route("/v1/models/{model:path}", plain.model, methods=["GET"]),
    Route("/v1/longread/requests", records.newest, methods=["GET"]),
    Route("/v1/longread/requests/{id:path}", records.one, methods=["GET"]),
    Route("/v1/longread/documents", documents.create, methods=["POST"]),
    Route("/v1/longread/documents", documents.listed, methods=["GET"]),
    Route("/v1/longread/documents/{id:path}", documents.one, methods=["GET"]),
    Route("/v1/longread/documents/{id:path}", documents.remove, methods=["DELETE"]),
    Route("/tokenize", text.tokenize, methods=["POST"]),
    Route("/detokenize", text.detokenize, methods=["POST"]),
    Route("/start_profile", profile.start, methods=["POST"]),
    Route("/stop_profile", profile.stop, methods=["POST"]),
    Route("/health", plain.health, methods=["GET"]),
    Route("/ready", plain.ready, methods=["GET"]),
    Route("/metrics", plain.metrics, methods=["GET"]),
    Route("/version", plain.version, methods=["GET"]),
)


def create_app(state: ServerState) -> Starlette:
    """One server's application; ``state.driver`` is started and closed with it."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        state.driver.start()
        yield
        await state.driver.close()

    middleware = [
        Middleware(
            Gate,
            api_keys=state.options.api_key,
            metrics=state.metrics,
            routes=frozenset(route.path for route in ROUTES),
        )
    ]
    if state.options.allowed_origins:
        # Outside the gate: a browser's preflight carries no key.
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(state.options.allowed_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID_HEADER, TIMING_HEADER],
        )
        middleware.insert(0, cors)
    app = Starlette(
        routes=list(ROUTES),
        lifespan=lifespan,
        middleware=middleware,
        exception_handlers={
            RequestError: errors.on_request_error,
            HTTPException: errors.on_http_error,
            ClientDisconnect: errors.on_disconnect,
            Exception: errors.on_crash,
        },
    )
    app.router.redirect_slashes = False
    app.state.server = state
    return app
