"""What a server can do that a gate needs: asked, never assumed. A few requests of one or two tokens.

Knows the fields of OpenAI's API and vLLM's extensions. What a server refuses is left out afterwards; a level that needs
it says so.
"""

import json
import math
import re
from collections.abc import Awaitable, Mapping
from dataclasses import asdict, dataclass, field

from longread.measure.gate.client import Answer, Client, number
from longread.measure.gate.errors import GateError, MalformedError, RefusedError
from longread.spec.errors import ConfigError

TOPS = (20, 10, 5)  # top_logprobs that servers take: Longread and vLLM 20, SGLang any, OpenAI's own 20 or 5
HELLO = ({"role": "user", "content": "Hello"},)
NO_THINKING: Mapping[str, object] = {"thinking": False, "enable_thinking": False}
_CAPACITY = re.compile(r"^(?:\w+:)?cache_config_info\{([^}]*)\}", re.M)
DTYPE = re.compile(r"(?!auto$)[a-z][a-z0-9_]{1,31}", re.ASCII)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Abilities:
    """``top``: best tokens told a position in chats, 0 none; ``completion_top`` the same for /v1/completions, where
    ``text_prompts`` and ``id_prompts`` are taken. ``ids``: prompt and answer are told as ids. ``capacity``: tokens that
    the cache holds, None where /metrics does not tell. ``without``: what was refused, with the server's words.
    """

    model: str
    max_model_len: int | None
    top: int
    completion_top: int
    text_prompts: bool
    id_prompts: bool
    ids: bool
    prompt_logprobs: bool
    seed: bool
    salt: bool
    cached_told: bool
    capacity: int | None
    dtype: str | None = None
    cache_dtype: str | None = None
    chat_fields: Mapping[str, object] = field(default_factory=dict)
    without: Mapping[str, str] = field(default_factory=dict)

    def document(self) -> dict[str, object]:
        """As JSON."""
        return asdict(self)

    @property
    def forces(self) -> bool:
        """Whether any continuation can be put in front of the model token by token."""
        return self.ids and self.id_prompts and self.completion_top > 0


class _Prober:
    def __init__(self, client: Client):
        self.client = client
        self.fields: dict[str, object] = {"max_tokens": 2, "temperature": 0}
        self.without: dict[str, str] = {}

    async def tries(self, name: str, extra: Mapping[str, object]) -> Answer | None:
        """A chat with ``extra``; None where it is refused as such (4xx)."""
        return await self._answered(name, self.client.chat(HELLO, **self.fields, **extra))

    async def completes(self, name: str, prompt: str | tuple[int, ...], extra: Mapping[str, object]) -> Answer | None:
        """The same for /v1/completions; vLLM and others answer 404 where they have no such route."""
        return await self._answered(name, self.client.complete(prompt, max_tokens=1, temperature=0, **extra))

    async def _answered(self, name: str, asked: Awaitable[Answer]) -> Answer | None:
        try:
            return await asked
        except RefusedError as error:
            if not 400 <= error.status < 500:
                raise
            self.without[name] = str(error)
        except MalformedError as error:
            self.without[name] = str(error)
        return None


async def probe(client: Client, model: str | None) -> Abilities:
    """Ask the server. Sets ``client.model``. Raises GateError where it serves no chat at all, ConfigError for a model
    that it does not have.
    """
    client.model, longest = await _model(client, model)
    prober = _Prober(client)
    first = await prober.tries("chat", {})
    if first is None:
        raise GateError(f"the server takes no chat: {prober.without['chat']}")
    chat_fields: dict[str, object] = {}
    if await prober.tries("chat_template_kwargs", {"chat_template_kwargs": NO_THINKING}) is not None:
        chat_fields["chat_template_kwargs"] = dict(NO_THINKING)
    top = await _top(prober)
    seed = await prober.tries("seed", {"seed": 7}) is not None
    salt = await prober.tries("cache_salt", {"cache_salt": "gate"}) is not None
    told = await prober.tries("return_token_ids", {"return_token_ids": True})
    ids = told is not None and told.prompt_ids is not None and told.token_ids is not None
    texts = await _completion_top(prober, "text prompts", "Hello", top)
    metrics = await client.get("/metrics") or ""
    prompt = told.prompt_ids if ids and told is not None and told.prompt_ids else None
    by_ids = await _completion_top(prober, "id prompts", prompt, top) if prompt else 0
    return Abilities(
        model=client.model,
        max_model_len=longest,
        top=top,
        completion_top=max(texts, by_ids),
        text_prompts=texts > 0,
        id_prompts=by_ids > 0,
        ids=ids,
        prompt_logprobs=bool(prompt) and await _prompt_logprobs(client, prompt or ()),
        seed=seed,
        salt=salt,
        cached_told=first.cached is not None,
        capacity=capacity_of(metrics),
        dtype=dtypes_of(metrics)[0],
        cache_dtype=dtypes_of(metrics)[1],
        chat_fields=chat_fields,
        without=prober.without,
    )


async def _model(client: Client, wanted: str | None) -> tuple[str, int | None]:
    text = await client.get("/v1/models")
    if text is None:
        raise GateError(f"{client.root} has no /v1/models: is it an OpenAI-compatible server?")
    models = read_models(text)
    if wanted is None:
        return next(iter(models.items()))
    if wanted not in models:
        raise ConfigError(f"--model {wanted}: the server has {', '.join(list(models)[:8])}")
    return wanted, models[wanted]


def read_models(text: str) -> dict[str, int | None]:
    """Names and their max_model_len (None: not told). Raises MalformedError."""
    try:
        rows = json.loads(text)["data"]
        found = {str(row["id"]): row.get("max_model_len") for row in rows}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise MalformedError("/v1/models: not a list of models") from None
    if not found:
        raise MalformedError("/v1/models: the server has no model")
    return {name: value if type(value) is int and value > 0 else None for name, value in found.items()}


async def _top(prober: _Prober) -> int:
    for count in TOPS:
        answer = await prober.tries("logprobs", {"logprobs": True, "top_logprobs": count})
        if answer is not None and answer.positions and answer.positions[0].top:
            prober.without.pop("logprobs", None)
            return count
    prober.without.setdefault("logprobs", "the server accepts them and tells none")
    return 0


async def _completion_top(prober: _Prober, name: str, prompt: str | tuple[int, ...], top: int) -> int:
    for count in dict.fromkeys((top or TOPS[0], TOPS[-1])):
        answer = await prober.completes(name, prompt, {"logprobs": count})
        if answer is not None and answer.positions and answer.positions[0].top:
            prober.without.pop(name, None)
            return count
    prober.without.setdefault(name, "accepted, but no log-probabilities are told")
    return 0


async def _prompt_logprobs(client: Client, prompt: tuple[int, ...]) -> bool:
    """vLLM's: log-probabilities of the prompt's own positions."""
    try:
        found = await client.post(
            "/v1/completions", {"prompt": list(prompt), "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
        )
        return read_prompt_logprobs(found) is not None
    except (RefusedError, MalformedError):
        return False


def read_prompt_logprobs(found: Mapping[str, object]) -> list[dict[str, float]] | None:
    """Per prompt position (the first has none: {}), log-probabilities by the token's text. None: not told.

    Raises MalformedError for entries that are none.
    """
    choices = found.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    told = choice.get("prompt_logprobs") if isinstance(choice, dict) else None
    if not isinstance(told, list):
        return None
    out: list[dict[str, float]] = []
    for entry in told:
        if entry is None:
            out.append({})
            continue
        if not isinstance(entry, dict):
            raise MalformedError("prompt_logprobs: an entry is no object")
        here: dict[str, float] = {}
        for one in entry.values():
            if not isinstance(one, dict) or not isinstance(one.get("decoded_token"), str):
                raise MalformedError("prompt_logprobs: an entry without decoded_token")
            value = number(one.get("logprob"))
            before = here.get(one["decoded_token"])
            here[one["decoded_token"]] = value if before is None else _added(before, value)
        out.append(here)
    return out


def _added(one: float, other: float) -> float:
    return min(0.0, math.log(math.exp(one) + math.exp(other)))


def _cache_config(metrics: str) -> dict[str, str]:
    """The labels of ``cache_config_info`` (vLLM's name, and Longread's)."""
    found = _CAPACITY.search(metrics)
    return dict(_LABEL.findall(found[1])) if found else {}


def capacity_of(metrics: str) -> int | None:
    """Tokens of the cache."""
    labels = _cache_config(metrics)
    try:
        return int(labels["block_size"]) * int(labels["num_gpu_blocks"]) or None
    except (KeyError, ValueError):
        return None


def dtypes_of(metrics: str) -> tuple[str | None, str | None]:
    """What is computed in, and what is cached; None where that is not told (vLLM tells the cache's as "auto") or is no
    name of a type.
    """
    labels = _cache_config(metrics)
    known = [labels.get(name) for name in ("dtype", "cache_dtype")]
    dtype, cache = (value if value is not None and DTYPE.fullmatch(value) else None for value in known)
    return dtype, cache
