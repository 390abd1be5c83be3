"""From a checked body to engine requests: what a hostile body may cost before the engine sees it."""

from longread.server.work import engine_requests
from longread.wire.types import ChatRequest, validate


def test_choices_share_one_grammar_and_one_prompt() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "n": 128, "structured_outputs": {"json": {"title": "x"}}}
    requests = engine_requests(validate(ChatRequest, body), [(1, 2, 3)], "id")
    assert len({request.request_id for request in requests}) == 128
    assert len({id(request.sampling.grammar) for request in requests}) == 1
    assert len({id(request.prompt) for request in requests}) == 1
