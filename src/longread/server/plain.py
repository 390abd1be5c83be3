"""The routes that run no model: names, health, metrics, version.

Knows: the driver's state. Must not know: prompts.
"""

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from longread.server.errors import error_response, json_response
from longread.server.metrics import CONTENT_TYPE
from longread.server.state import state_of
from longread.spec.errors import RequestError
from longread.wire.responses import model_list


async def health(request: Request) -> Response:
    """Live: the process answers and the engine has not failed for good. 200 while the model loads, also again: killing
    the server would not make that faster.
    """
    driver = state_of(request).driver
    if driver.state == "failed":
        return json_response({"status": "failed", "detail": type(driver.error).__name__}, status=503)
    if driver.state == "restarting":
        return json_response({"status": "ok", "detail": "the engine ended and is being started again"})
    return json_response({"status": "ok"})


async def ready(request: Request) -> Response:
    """Ready: requests are accepted. 503 while the model loads (again), when the engine has failed, and during
    shutdown.
    """
    try:
        info = state_of(request).driver.engine_info
    except RequestError as error:
        response = error_response(error)
        response.status_code = 503
        return response
    return json_response({"status": "ready", "max_model_len": info.max_model_len, "max_num_seqs": info.max_num_seqs})


async def models(request: Request) -> Response:
    """GET /v1/models: every served name. 503 while the model loads."""
    state = state_of(request)
    info = state.driver.engine_info
    return json_response(model_list(state.model_names, created=state.created, max_model_len=info.max_model_len))


async def model(request: Request) -> Response:
    """GET /v1/models/NAME: one of them. 404 for a name that is not served."""
    state = state_of(request)
    info = state.driver.engine_info
    name = state.check_model(request.path_params["model"])
    listed = model_list(state.model_names, created=state.created, max_model_len=info.max_model_len)["data"]
    assert isinstance(listed, list)
    return json_response(listed[state.model_names.index(name)])


async def metrics(request: Request) -> Response:
    """GET /metrics: Prometheus text, made off the loop."""
    state = state_of(request)
    current = state.driver.current
    if current is not None:
        info, stats = current
        state.metrics.queue(state.driver.admission.outlook(info, stats.known_cost))
    body = await asyncio.to_thread(state.metrics.render)
    return Response(body, headers={"Content-Type": CONTENT_TYPE})


async def version(request: Request) -> Response:
    """GET /version."""
    return json_response({"version": state_of(request).version})
