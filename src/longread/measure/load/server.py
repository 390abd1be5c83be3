"""What the measured server says of itself, before and after a run.

Knows /v1/models, /version and /metrics; series are told apart by the doctor's table of names, old ones included. Must
not know what was asked. Only GETs. What a server does not tell is listed as missing.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx
import orjson

from longread.measure.load.pages import NoPageError, read, session
from longread.measure.load.target import Target
from longread.plan.doctor.live import compare
from longread.plan.doctor.series import Reading, read_metrics
from longread.spec.errors import ConfigError, LongreadError

SECONDS = 10.0
BODY_BYTES = 16 * 2**20
LABELS, LABEL_CHARACTERS = 64, 200
MOST_MODELS = 100  # that are listed; the first is asked
# Whose labels are facts about how a server was started, not about requests.
_INFO = re.compile(r"^((?:vllm|sglang|longread)[:_]\w*(?:config|info)\w*)\{(.*)\} \S+$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class NoServerError(LongreadError):
    """It does not answer, or does not say what it serves; the message says what to do."""


@dataclass(slots=True)
class Look:
    """One look. ``unread``: what could not be read, and why."""

    models: tuple[str, ...] = ()
    model_facts: dict[str, Any] = field(default_factory=dict)
    version: str | None = None
    metrics: Reading | None = None
    info: dict[str, dict[str, str]] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)


def look(target: Target) -> Look:
    """Reads the three pages of the server at ``target.base_url``; a page that is not there is in ``unread``."""
    found = Look()
    with session(target, SECONDS) as client:
        _models(client, target.base_url, found)
        version = _json(client, f"{target.base_url}/version", "version", found)
        if isinstance(version, Mapping) and isinstance(version.get("version"), str):
            found.version = version["version"][:LABEL_CHARACTERS]
        text = _get(client, f"{target.base_url}/metrics", "metrics", found)
    if text is not None:
        try:
            found.metrics = read_metrics(text)
        except ConfigError as error:
            found.unread["metrics"] = str(error)[:300]
        else:
            found.info = {
                name: {k: v[:LABEL_CHARACTERS] for k, v in _LABEL.findall(labels)[:LABELS]}
                for name, labels in _INFO.findall(text)
            }
    return found


def only_model(base_url: str, found: Look) -> str:
    """The one model that is served. Raises NoServerError where it cannot be told."""
    if "models" in found.unread and any(f"status {code}" in found.unread["models"] for code in (401, 403)):
        raise NoServerError(f"{found.unread['models']}: give its API key as OPENAI_API_KEY or by --header")
    if "models" in found.unread:
        raise NoServerError(f"{found.unread['models']}; is the server up at {base_url}? Name it with --base-url")
    if len(found.models) != 1:
        listed = ", ".join(found.models[:10]) or "none"
        count = f"{MOST_MODELS} models or more" if len(found.models) == MOST_MODELS else f"{len(found.models)} models"
        raise NoServerError(f"{base_url} serves {count} ({listed}): choose one with --model")
    return found.models[0]


def _models(client: httpx.Client, base: str, found: Look) -> None:
    page = _json(client, f"{base}/v1/models", "models", found)
    data = page.get("data") if isinstance(page, Mapping) else None
    if not isinstance(data, list):
        found.unread.setdefault("models", f"{base}/v1/models: no list of models")
        return
    entries = [entry for entry in data[:MOST_MODELS] if isinstance(entry, Mapping) and isinstance(entry.get("id"), str)]
    # A LoRA or an alias of the same weights names its parent; what is served first is the model itself.
    found.models = tuple(entry["id"][:LABEL_CHARACTERS] for entry in entries)
    if entries:
        plain = (str, int, float, bool)
        facts = {k: v for k, v in entries[0].items() if isinstance(v, plain) and k not in ("created", "object")}
        found.model_facts = {str(k)[:64]: v[:LABEL_CHARACTERS] if isinstance(v, str) else v for k, v in facts.items()}


def _json(client: httpx.Client, url: str, name: str, found: Look) -> object:
    text = _get(client, url, name, found)
    if text is None:
        return None
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        found.unread[name] = f"{url}: not JSON"
        return None


def _get(client: httpx.Client, url: str, name: str, found: Look) -> str | None:
    try:
        return read(client, url, BODY_BYTES).decode("utf-8", "replace")
    except NoPageError as error:
        found.unread[name] = f"{url}: {error}"
        return None


def facts(base_url: str, before: Look, after: Look, seconds: float) -> dict[str, Any]:
    """What is known of the server, as JSON: versions, how it was started, and what its counters did meanwhile."""
    told: dict[str, Any] = {
        "url": base_url,
        "version": after.version or before.version,
        "models": list(before.models),
        "model": before.model_facts,
        "info": before.info,
        "unread": {**before.unread, **after.unread},
        "engine": None,
    }
    if before.metrics is None or after.metrics is None:
        return told
    try:
        live = compare(base_url, before.metrics, after.metrics, seconds)
    except ConfigError as error:
        told["unread"]["metrics"] = str(error)
        return told
    queries, hits = live.grown.get("prefix queries"), live.grown.get("prefix hits")
    if queries is None and live.engine == "sglang":
        queries = live.grown.get("prompt tokens")  # it counts hits in tokens of prompts, without queries of their own
    told |= {
        "engine": live.engine,
        "restarted": live.restarted,
        "counters": {name: None if live.restarted else value for name, value in live.grown.items()},
        "gauges_before": dict(live.gauges_before),
        "gauges_after": dict(live.gauges),
        "prefix_cache_hit_rate": hits / queries if hits is not None and queries and not live.restarted else None,
        "latencies_s": {n: asdict(each) for n, each in live.latencies.items() if each.since == "interval"},
        "old_names": list(live.old_names),
        "missing": list(live.missing),
    }
    return told
