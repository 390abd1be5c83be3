"""Which requests an engine may accept: the one check, and its limits, for every implementation of the protocol.

Pure, callable from any thread. Knows the protocol's requests and an engine's own limits; must not know tensors, queues
or text. Refusals name the field, the limit and the value.
"""

import math
from collections.abc import Sequence

from longread.spec.engine import EngineInfo, GenerationRequest, SamplingParams
from longread.spec.errors import ContextLengthError, InvalidRequestError

MAX_LOGPROBS = 20
MAX_STOP_IDS = 256
MIN_REPETITION_PENALTY = 1e-3  # logits are divided by it: far smaller ones overflow
MAX_LOGIT_BIAS = 1024
MAX_GRAMMAR_CHARACTERS = 256 * 1024
MAX_SEED = 2**64 - 1


def check_request(request: GenerationRequest, info: EngineInfo) -> None:
    """Check a request's tokens and sampling (not its grammar). Raises InvalidRequestError or ContextLengthError."""
    if not request.request_id:
        raise InvalidRequestError("request_id is empty", param="request_id")
    known = request.hashed
    # Made beside the ids by whoever hashed them: a million ids are not looked at again on the engine's thread.
    if known is None or not known.fits(info.cache_root, request.prompt) or known.least < 0 or known.most >= info.vocab:
        check_tokens(request.prompt, info.vocab)
    check_sampling(request.sampling, info.vocab)
    sampling = request.sampling
    wanted = sampling.max_tokens if sampling.max_tokens is not None else max(1, sampling.min_tokens)
    check_length(len(request.prompt), wanted, info)


def check_tokens(tokens: Sequence[int], vocab: int) -> None:
    """Refuse an empty sequence and ids outside 0 .. vocab-1."""
    if not tokens:
        raise InvalidRequestError("the prompt is empty: give at least one token", param="prompt")
    if min(tokens) < 0 or max(tokens) >= vocab:
        at, bad = next((i, t) for i, t in enumerate(tokens) if not 0 <= t < vocab)
        raise InvalidRequestError(f"prompt: token id {bad} at position {at} is outside 0..{vocab - 1}", param="prompt")


def check_length(prompt: int, output: int, info: EngineInfo) -> None:
    """Refuse what the context, or the page pool alone, cannot hold."""
    if prompt + output <= info.max_request_tokens:
        return
    if info.max_request_tokens < info.max_model_len:
        limit = (
            f"the cache's {info.num_pages} pages hold {info.max_request_tokens} tokens "
            f"(max_model_len is {info.max_model_len})"
        )
    else:
        limit = f"max_model_len is {info.max_model_len} tokens"
    raise ContextLengthError(
        f"{limit}, but the request has {prompt} prompt tokens and asks for at least {output} output tokens, "
        f"{prompt + output} in all: shorten the prompt or lower max_tokens"
    )


def check_sampling(params: SamplingParams, vocab: int) -> None:
    """Refuse values outside their range. top_k above the vocabulary keeps every token, as in vLLM."""
    _number("temperature", params.temperature, 0.0, 100.0)
    _number("top_p", params.top_p, 0.0, 1.0, low_open=True)
    _integer("top_k", params.top_k, 0, 2**31 - 1, "0 turns it off")
    _number("min_p", params.min_p, 0.0, 1.0)
    _number("repetition_penalty", params.repetition_penalty, MIN_REPETITION_PENALTY, 100.0)
    _number("presence_penalty", params.presence_penalty, -2.0, 2.0)
    _number("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    if params.seed is not None:
        _integer("seed", params.seed, -(2**63), MAX_SEED)
    if params.logprobs is not None:
        _integer("logprobs", params.logprobs, 0, MAX_LOGPROBS)
    if params.max_tokens is not None:
        _integer("max_tokens", params.max_tokens, 1, 2**31 - 1)
    _integer("min_tokens", params.min_tokens, 0, 2**31 - 1 if params.max_tokens is None else params.max_tokens)
    _check_ids(params, vocab)


def _check_ids(params: SamplingParams, vocab: int) -> None:
    """Token ids among the parameters."""
    if len(params.logit_bias) > MAX_LOGIT_BIAS:
        raise InvalidRequestError(
            f"logit_bias has {len(params.logit_bias)} entries; the limit is {MAX_LOGIT_BIAS}", param="logit_bias"
        )
    for token, bias in params.logit_bias:
        _integer("logit_bias", token, 0, vocab - 1, "token ids of this model")
        _number("logit_bias", bias, -100.0, 100.0)
    if len({token for token, _ in params.logit_bias}) != len(params.logit_bias):
        raise InvalidRequestError("logit_bias names a token id twice", param="logit_bias")
    if len(params.stop_token_ids) > MAX_STOP_IDS:
        raise InvalidRequestError(
            f"stop_token_ids has {len(params.stop_token_ids)} entries; the limit is {MAX_STOP_IDS}",
            param="stop_token_ids",
        )
    for token in params.stop_token_ids:
        _integer("stop_token_ids", token, 0, vocab - 1, "token ids of this model")
    if params.grammar_after is not None:
        _integer("grammar_after", params.grammar_after, 0, vocab - 1, "a token id of this model")
        if params.grammar is None:
            raise InvalidRequestError("grammar_after is given without a grammar", param="grammar_after")


def _number(name: str, value: object, low: float, high: float, low_open: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequestError(f"{name} must be a number, not {value!r}", param=name)
    if not math.isfinite(value) or value > high or value < low or (low_open and value == low):
        bracket = "(" if low_open else "["
        raise InvalidRequestError(f"{name} must lie in {bracket}{low:g}, {high:g}], not {value!r}", param=name)


def _integer(name: str, value: object, low: int, high: int, meaning: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be a whole number, not {value!r}", param=name)
    if not low <= value <= high:
        note = f" ({meaning})" if meaning else ""
        raise InvalidRequestError(f"{name} must lie in {low}..{high}{note}, not {value}", param=name)
