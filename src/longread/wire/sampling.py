"""From request fields to ``SamplingParams``: pure, and complete (a field that is accepted is honoured).

Defaults are OpenAI's and vLLM's: temperature 1, top_p 1, everything else off. What stays with the caller because it
needs text, not ids: stop strings, include_stop_str_in_output, skip_special_tokens, n, stream.
"""

from dataclasses import replace

import orjson

from longread.spec.engine import GrammarSpec, SamplingParams
from longread.spec.errors import InvalidRequestError
from longread.spec.limits import MAX_GRAMMAR_CHARACTERS
from longread.wire.types import ChatRequest, CompletionRequest, GenerateFields


def to_sampling(request: ChatRequest | CompletionRequest, *, grammar_after: int | None = None) -> SamplingParams:
    """Sampling of the first choice; ``for_choice`` makes the others' of it.

    ``grammar_after``: the id of ``</think>`` where the answer starts with reasoning, which no grammar constrains.
    Raises InvalidRequestError where a schema given as text is not JSON, or a grammar is too long.
    """
    grammar = grammar_of(request)
    top_k = request.top_k if request.top_k is not None and request.top_k > 0 else 0
    return SamplingParams(
        temperature=_given(request.temperature, 1.0),
        top_p=_given(request.top_p, 1.0),
        top_k=top_k,
        min_p=_given(request.min_p, 0.0),
        repetition_penalty=_given(request.repetition_penalty, 1.0),
        presence_penalty=_given(request.presence_penalty, 0.0),
        frequency_penalty=_given(request.frequency_penalty, 0.0),
        logit_bias=tuple(sorted((request.logit_bias or {}).items())),
        stop_token_ids=tuple(dict.fromkeys(request.stop_token_ids or ())),
        seed=request.seed,
        logprobs=wanted_logprobs(request),
        max_tokens=request.output_limit,
        min_tokens=request.min_tokens or 0,
        ignore_eos=bool(request.ignore_eos),
        grammar=grammar,
        grammar_after=grammar_after if grammar is not None else None,
    )


def for_choice(first: SamplingParams, choice: int) -> SamplingParams:
    """Sampling of one of the ``n`` choices: ``choice`` is added to the seed, so that seeded answers differ and repeat.
    Everything else is shared and not copied: a grammar may be long and the choices many.
    """
    return first if first.seed is None or not choice else replace(first, seed=_wrap(first.seed + choice))


def wanted_logprobs(request: ChatRequest | CompletionRequest) -> int | None:
    """Top entries a token: None for no logprobs at all, 0 for the sampled token's only."""
    if isinstance(request, ChatRequest):
        return (request.top_logprobs or 0) if request.logprobs else None
    return request.logprobs


def grammar_of(request: GenerateFields) -> GrammarSpec | None:
    """``response_format`` or ``structured_outputs`` as the engine's constraint; None where the output is free.

    Raises InvalidRequestError where a schema given as text is not JSON, or the grammar is too long.
    """
    grammar = _grammar(request)
    if grammar is not None and len(grammar.value) > MAX_GRAMMAR_CHARACTERS:
        raise InvalidRequestError(
            f"the {grammar.kind} grammar has {len(grammar.value)} characters; the limit is {MAX_GRAMMAR_CHARACTERS}",
            "response_format" if request.structured_outputs is None else "structured_outputs",
            code="invalid_grammar",
        )
    return grammar


def _grammar(request: GenerateFields) -> GrammarSpec | None:
    wanted = request.structured_outputs
    if wanted is not None:
        if wanted.json_ is not None:
            return GrammarSpec("json_schema", _schema_text(wanted.json_))
        if wanted.regex is not None:
            return GrammarSpec("regex", wanted.regex)
        if wanted.choice is not None:
            return GrammarSpec("choice", orjson.dumps(wanted.choice).decode())
        return GrammarSpec("json_object")
    form = request.response_format
    if form is None or form.type == "text":
        return None
    if form.json_schema is not None:
        return GrammarSpec("json_schema", _schema_text(form.json_schema.json_schema))
    return GrammarSpec("json_object")


def _schema_text(schema: object) -> str:
    if not isinstance(schema, str):
        return orjson.dumps(schema).decode()
    try:
        orjson.loads(schema)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(
            f"structured_outputs.json: not valid JSON: {error.msg} (line {error.lineno}, column {error.colno})",
            "structured_outputs.json",
        ) from None
    return schema


def _wrap(seed: int) -> int:
    """Back into the signed 64-bit range, which the seed itself may exhaust."""
    return (seed + 2**63) % 2**64 - 2**63


def _given(value: float | None, default: float) -> float:
    return default if value is None else float(value)
