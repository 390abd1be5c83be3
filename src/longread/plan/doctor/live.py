"""A live server's /metrics read twice, with /v1/models and /version.

Knows: HTTP and its failures. Must not know: what a value means. Only GETs, no prompt is sent, nothing is changed.
"""

import json
import time
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit, urlunsplit

import httpx

from longread.plan.doctor.facts import Live
from longread.plan.doctor.saved.text import value
from longread.plan.doctor.series import Reading, latencies, read_metrics
from longread.spec.errors import ConfigError

BODY_BYTES = 8 * 2**20
CONNECT_SECONDS, READ_SECONDS, WHOLE_SECONDS = 5.0, 15.0, 30.0
REDIRECTS = 3
INTERVAL = 5.0
LOOPBACK = {"localhost", "::1", "0.0.0.0"}


def base_url(text: str) -> str:
    """``"host:8000"`` and ``"http://host:8000/metrics"`` as "http://host:8000". ConfigError for what is no such URL."""
    whole = text.strip() if "://" in text else f"http://{text.strip()}"
    try:
        parts = urlsplit(whole)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(f"--url {text[:200]!r} is not a server's address; give it as http://HOST:PORT")
    if parts.username or parts.password:
        raise ConfigError("--url holds a user name or password; give a key with --api-key")
    path = parts.path.rstrip("/")
    for end in ("/metrics", "/v1"):
        path = path.removesuffix(end)
    return urlunsplit((parts.scheme, parts.netloc, path, "", ""))


def is_local(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return host in LOOPBACK or host.startswith("127.")


def read_live(
    url: str,
    api_key: str | None = None,
    seconds: float = INTERVAL,
    say: Callable[[str], None] = lambda _: None,
    sleep: Callable[[float], None] = time.sleep,
) -> Live:
    """Raises ConfigError with what to do where the server cannot be read. Takes ``seconds`` and the answers' time."""
    base = base_url(url)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx.Timeout(READ_SECONDS, connect=CONNECT_SECONDS)
    with httpx.Client(
        timeout=timeout,
        headers=headers,
        follow_redirects=True,
        max_redirects=REDIRECTS,
        trust_env=not is_local(base),
    ) as client:
        say(f"reading {base}/metrics")
        began = time.monotonic()
        before = _metrics(client, base)
        unread: dict[str, str] = {}
        models, longest = _models(client, base, unread)
        version = _version(client, base, unread) if before.engine != "sglang" else None  # it has no such route
        say(f"reading {base}/metrics again in {seconds:g} s")
        sleep(max(0.0, seconds - (time.monotonic() - began)))
        again = time.monotonic()
        after = _metrics(client, base)
    return compare(base, before, after, again - began, models, longest, version, unread)


def compare(
    url: str,
    before: Reading,
    after: Reading,
    seconds: float,
    models: tuple[str, ...] | None = None,
    longest: int | None = None,
    version: str | None = None,
    unread: Mapping[str, str] | None = None,
) -> Live:
    if before.engine != after.engine:
        raise ConfigError(f"{url} answered as {before.engine} first and then as {after.engine}: is it a load balancer?")
    grown = {name: count - before.counters.get(name, 0.0) for name, count in after.counters.items()}
    restarted = any(count < 0 for count in grown.values())
    if restarted:  # or another replica answered: what is there now is all that is known
        grown = dict.fromkeys(grown, 0.0)
        before = Reading(before.engine, gauges=before.gauges, histograms=after.histograms)
    return Live(
        url=url,
        engine=after.engine,
        seconds=round(seconds, 3),
        version=version,
        models=models,
        max_model_len=longest,
        gauges=after.gauges,
        gauges_before=before.gauges,
        totals=after.counters,
        grown=grown,
        latencies=latencies(before, after),
        old_names=tuple(after.old),
        missing=tuple(after.missing),
        restarted=restarted,
        unread=unread or {},
    )


def _metrics(client: httpx.Client, base: str) -> Reading:
    response, body = _get(client, f"{base}/metrics")
    if response.status_code in (401, 403):
        raise ConfigError(f"{base}/metrics: {response.status_code}, the server wants a key; give it with --api-key")
    if response.status_code == 404:
        raise ConfigError(f"{base}/metrics: 404; SGLang has it with --enable-metrics only; vLLM and Longread always")
    if response.status_code != 200:
        raise ConfigError(f"{base}/metrics: status {response.status_code}, {value(body[:200])!r}")
    if body.lstrip()[:1] == "<" or "text/html" in response.headers.get("content-type", ""):
        raise ConfigError(f"{base}/metrics: a web page, not metrics; is this the server's own port?")
    try:
        return read_metrics(body)
    except ConfigError as error:
        raise ConfigError(f"{base}/metrics: {value(str(error))}") from None


def _get(client: httpx.Client, url: str) -> tuple[httpx.Response, str]:
    """The whole answer, within 8 MiB and 30 s."""
    deadline = time.monotonic() + WHOLE_SECONDS
    try:
        with client.stream("GET", url) as response:
            size, chunks = 0, []
            for chunk in response.iter_bytes():
                size += len(chunk)
                if size > BODY_BYTES:
                    raise ConfigError(f"{url}: more than {BODY_BYTES // 2**20} MiB")
                if time.monotonic() > deadline:
                    raise ConfigError(f"{url}: not complete after {WHOLE_SECONDS:g} s")
                chunks.append(chunk)
            return response, b"".join(chunks).decode("utf-8", "replace")
    except httpx.TimeoutException:
        raise ConfigError(
            f"{url}: no answer within {READ_SECONDS:g} s ({CONNECT_SECONDS:g} s to connect); a blocked server "
            f"looks like "
            "this, and so does a firewall"
        ) from None
    except httpx.TooManyRedirects:
        raise ConfigError(f"{url}: more than {REDIRECTS} redirects") from None
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        raise ConfigError(
            f"{url}: {value(str(error)) or type(error).__name__}; is the server up, and is that its port?"
        ) from None


def _json(client: httpx.Client, url: str, name: str, unread: dict[str, str]) -> object:
    try:
        response, body = _get(client, url)
        if response.status_code == 200:
            return json.loads(body)
        unread[name] = f"{url}: status {response.status_code}"
    except ConfigError as error:
        unread[name] = str(error)
    except (ValueError, RecursionError):
        unread[name] = f"{url}: not JSON"
    return None


def _models(client: httpx.Client, base: str, unread: dict[str, str]) -> tuple[tuple[str, ...] | None, int | None]:
    document = _json(client, f"{base}/v1/models", "models", unread)
    data = document.get("data") if isinstance(document, dict) else None
    if not isinstance(data, list):
        return None, None
    entries = [entry for entry in data[:100] if isinstance(entry, dict)]
    lengths = [entry["max_model_len"] for entry in entries if isinstance(entry.get("max_model_len"), int)]
    return tuple(value(str(entry.get("id", "?"))) for entry in entries), max(lengths, default=None)


def _version(client: httpx.Client, base: str, unread: dict[str, str]) -> str | None:
    document = _json(client, f"{base}/version", "version", unread)
    found = document.get("version") if isinstance(document, dict) else None
    return value(found) if isinstance(found, str) else None
