"""The server's tests run on asyncio, the loop that uvicorn uses."""

import pytest


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
