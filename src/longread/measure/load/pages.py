"""Pages of a server beside its answers (/metrics, /v1/models, a profile), read with bounds.

Knows httpx and how a page can fail to come. Must not know what stands in it.
"""

import ssl
from collections.abc import Mapping
from functools import cache
from typing import Any

import httpx
import orjson

from longread.measure.load.stream import said_of
from longread.measure.load.target import Target
from longread.spec.errors import LongreadError


class NoPageError(LongreadError):
    """It did not come; the message says why."""


def session(target: Target, seconds: float) -> httpx.Client:
    """For the pages of ``target``, with its headers and at most ``seconds`` each."""
    headers = {name: value for name, value in target.headers.items() if name.lower() != "content-type"}
    local = target.local
    return httpx.Client(timeout=seconds, headers=headers, trust_env=not local, verify=trusted(not local))


@cache
def trusted(environment: bool) -> ssl.SSLContext:
    """The certificates that are trusted, read once: that takes 30 ms of the processor that the load client needs."""
    return httpx.create_ssl_context(trust_env=environment)


def read(client: httpx.Client, url: str, most: int, body: Mapping[str, Any] | None = None) -> bytes:
    """The page by GET, or by POST of ``body``; at most ``most`` bytes. Raises NoPageError."""
    try:
        with client.stream("GET" if body is None else "POST", url, json=body) as response:
            data = b""
            for piece in response.iter_bytes():
                data += piece
                if len(data) > most:
                    raise NoPageError(f"more than {most // 2**20} MiB")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise NoPageError(str(error)[:200] or type(error).__name__) from None
    if response.status_code != 200:
        raise NoPageError(f"status {response.status_code}" + ("" if body is None else f": {_said(data)}"))
    return data


def _said(data: bytes) -> str:
    try:
        return said_of(orjson.loads(data))
    except orjson.JSONDecodeError:
        return data[:100].decode("utf-8", "replace") or "no reason given"
