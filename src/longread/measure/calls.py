"""A server's records of its last calls, read over HTTP.

Knows the routes and the records' shape. Knows nothing of how they are drawn. Texts in a record are a user's: whoever
prints them uses ``printable``, since a terminal obeys what it is sent.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx

from longread.spec.errors import LongreadError
from longread.spec.printing import printable

ROUTE = "/v1/longread/requests"
SECONDS = 30.0
SUMMARY = {
    "id",
    "route",
    "model",
    "state",
    "created",
    "prompt_tokens",
    "reused_tokens",
    "reason",
    "ttft_ms",
    "total_ms",
}


class CallsError(LongreadError):
    """The server did not answer, or not with a record."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where the records are. Raises CallsError from its methods, saying what to do."""

    url: str
    api_key: str | None = None

    def newest(self, limit: int) -> list[dict[str, Any]]:
        """Summaries, newest first."""
        data = self._get(f"{ROUTE}?limit={limit}").get("data")
        if not (isinstance(data, list) and all(isinstance(call, dict) and call.keys() >= SUMMARY for call in data)):
            raise self._strange()
        return data

    def one(self, name: str) -> dict[str, Any]:
        """The record of an answer's id or an X-Request-Id."""
        record = self._get(f"{ROUTE}/{quote(name, safe='')}")
        told = record.get("longread")
        whole = isinstance(told, dict) and "reuse" in told and isinstance(told.get("timing"), dict)
        if not (whole and record.keys() >= SUMMARY):
            raise self._strange()
        return record

    def _get(self, path: str) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key is not None else {}
        try:
            answer = httpx.get(self.url.rstrip("/") + path, headers=headers, timeout=SECONDS)
            data = answer.json()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise CallsError(
                f"{self.url} does not answer ({type(error).__name__}): start `longread serve`, or name the server "
                "with --url"
            ) from error
        except ValueError:
            raise self._strange() from None
        if answer.status_code != 200:
            raise CallsError(f"{self.url} answers {answer.status_code}: {printable(_message(data))[:500]}")
        if not isinstance(data, dict):
            raise self._strange()
        return data

    def _strange(self) -> CallsError:
        return CallsError(f"{self.url} does not answer as `longread serve` does: is it another server?")


def _message(data: object) -> str:
    error = data.get("error") if isinstance(data, Mapping) else None
    return str(error.get("message", "no reason given") if isinstance(error, Mapping) else "no reason given")


def head_line(record: Mapping[str, Any]) -> str:
    """Which call it was."""
    return "  ".join(printable(str(record[name])) for name in ("id", "route", "model", "state"))


def reuse_line(reuse: Mapping[str, Any] | None, prompt_tokens: int | None = None) -> str:
    """What was reused and why no more, as one sentence. ``prompt_tokens``: all that is known of one that has not begun
    to be read.
    """
    if reuse is None:
        return (
            "what was reused is not known"
            if prompt_tokens is None
            else f"{prompt_tokens:,} prompt tokens: what is reused is known when it begins to be read"
        )
    counts = [(reuse[f"{tier}_tokens"], f"from {tier}") for tier in ("device", "host", "disk")]
    parts = [f"{count:,} {what}" for count, what in [*counts, (reuse["recomputed_tokens"], "computed")] if count]
    why = printable(reuse["reason"])
    if reuse["note"]:
        why += f": {printable(reuse['note'])}"
    elif reuse["reason"] == "differs":
        why += f" at token {reuse['at']:,}"
    return f"{reuse['prompt_tokens']:,} prompt tokens: {', '.join(parts)}; {why}"
