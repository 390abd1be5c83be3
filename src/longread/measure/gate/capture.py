"""Asks a server what a plan says and keeps the answers; a candidate is led along the base's text where its own differs.

Knows the client and the plan; judges nothing.

Teacher forcing needs no echo: as long as two greedy answers are the same text, their positions have the same context
and are compared as they came. From the first difference on, the candidate is given the prompt's ids and the base's
answer up to each position and asked for one token; the prefix cache makes that cheap. A server that honours
``prompt_logprobs`` tells all of these positions in one request.
"""

import asyncio
import hashlib
from array import array
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

from longread.measure.gate.abilities import Abilities, read_prompt_logprobs
from longread.measure.gate.client import Answer, Client, ranked
from longread.measure.gate.distribution import Position, divergence_point
from longread.measure.gate.documents import GateAsk, Own, Paper, Style, asks_of
from longread.measure.gate.errors import GateError, MalformedError, RefusedError, UnreachableError
from longread.measure.gate.record import Said, packed

MOST_FORCED = 128  # positions of one answer
MOST_FAILED = 8  # asks without an answer before the gate gives up, if they are half of all


async def say(client: Client, abilities: Abilities, ask: GateAsk, base: Said | None = None) -> Said:
    """One ask answered; ``base``: what the other side said to it. Raises GateError."""
    answer = await _answered(client, abilities, ask)
    forced: tuple[Position, ...] = ()
    start = 0
    if base is not None and 1 in ask.levels and base.positions and answer.positions:
        start = divergence_point(base.distributions, answer.positions)
        if start < len(base.positions) and _may_force(abilities, base, answer):
            forced = await _forced(client, abilities, base, answer.prompt_ids or (), start)
    return _said(ask, answer, forced, start)


def _may_force(abilities: Abilities, base: Said, answer: Answer) -> bool:
    """Ids mean the same on both sides, as far as the prompt tells."""
    same = answer.prompt_ids is not None and base.prompt_ids == ids_fingerprint(answer.prompt_ids)
    return abilities.forces and same and base.token_ids is not None


def _said(ask: GateAsk, answer: Answer, forced: Sequence[Position] = (), start: int = 0) -> Said:
    return Said(
        **_asked(ask),
        text=answer.text,
        finish_reason=answer.finish_reason,
        positions=packed(answer.positions if 1 in ask.levels else ()),
        forced=packed(forced),
        forced_from=start if forced else 0,
        prompt_tokens=answer.prompt_tokens,
        output_tokens=answer.output_tokens,
        cached=answer.cached,
        token_ids=answer.token_ids,
        prompt_ids=None if answer.prompt_ids is None else ids_fingerprint(answer.prompt_ids),
        seconds=round(answer.seconds, 4),
    )


def _asked(ask: GateAsk) -> dict[str, Any]:
    return {
        "key": ask.key,
        "turn": ask.paper.turn,
        "paper": ask.paper.key,
        "length": ask.paper.length,
        "kind": ask.kind,
        "fingerprint": ask.fingerprint,
        "levels": tuple(sorted(ask.levels)),
        "depth": ask.depth,
        "expected": ask.expected,
        "values": ask.values,
        "critical": ask.critical,
        "judged": ask.judged,
        "alternatives": ask.alternatives,
    }


async def _answered(
    client: Client, abilities: Abilities, ask: GateAsk, more: Mapping[str, object] | None = None
) -> Answer:
    if ask.messages is None:
        fields: dict[str, object] = {"max_tokens": ask.max_tokens, "temperature": 0, **ask.extra, **(more or {})}
        if abilities.completion_top:
            fields["logprobs"] = abilities.completion_top
        return await client.complete(ask.prompt or "", **fields)
    fields = chat_fields(abilities, ask.max_tokens, told=1 in ask.levels) | dict(ask.extra) | dict(more or {})
    return await client.chat(ask.messages, **fields)


def chat_fields(abilities: Abilities, max_tokens: int, told: bool = True) -> dict[str, object]:
    """A greedy chat's fields; ``told``: with log-probabilities and ids, as far as the server has them."""
    fields: dict[str, object] = {"max_tokens": max_tokens, "temperature": 0, **abilities.chat_fields}
    if told and abilities.top:
        fields |= {"logprobs": True, "top_logprobs": abilities.top}
        if abilities.ids:
            fields["return_token_ids"] = True
    return fields


async def _forced(
    client: Client, abilities: Abilities, base: Said, prompt: Sequence[int], start: int
) -> tuple[Position, ...]:
    ids = base.token_ids or ()
    end = min(len(base.positions), len(ids) + 1, start + MOST_FORCED)
    if abilities.prompt_logprobs:
        body = {
            "prompt": [*prompt, *ids[:end]],
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": abilities.completion_top,
        }
        told = read_prompt_logprobs(await client.post("/v1/completions", body))
        if told is None or len(told) < len(prompt) + end:
            raise MalformedError("prompt_logprobs: fewer entries than the prompt has tokens")
        return tuple(_along(base, at, told[len(prompt) + at]) for at in range(start, min(end, len(ids))))
    out = []
    for at in range(start, end):
        answer = await client.complete(
            [*prompt, *ids[:at]], max_tokens=1, temperature=0, logprobs=abilities.completion_top
        )
        if not answer.positions:
            raise MalformedError("no log-probabilities were told for a forced position")
        out.append(_along(base, at, dict(answer.positions[0].top)))
    return tuple(out)


def _along(base: Said, at: int, told: Mapping[str, float]) -> Position:
    """The candidate's distribution in front of the base's token number ``at``."""
    token = base.positions[at][0]
    return Position(token, told.get(token), ranked(list(told.items())))


def ids_fingerprint(ids: Sequence[int]) -> str:
    """Of a prompt's ids."""
    return hashlib.blake2b(array("q", ids).tobytes(), digest_size=12).hexdigest()


async def say_all(
    client: Client,
    abilities: Abilities,
    papers: Iterable[Paper],
    style: Style,
    levels: frozenset[int],
    base: Mapping[str, Said] | None,
    keep: Callable[[Said], None],
    own: Own | None = None,
) -> None:
    """All asks about ``papers``, one paper's one after the other (it is read once), the papers side by side.

    ``base`` not None: only what stands there is asked, and an ask that fails is kept as failed; a base itself may have
    no failures, so there the error is raised. ``keep`` is told of each answer as it comes.
    """
    failed = [0, 0]

    async def one_paper(paper: Paper) -> None:
        for ask in asks_of(paper, style, levels, abilities.text_prompts, own):
            before = None if base is None else base.get(ask.key)
            if base is not None and base and before is None:
                continue
            if before is not None and before.fingerprint != ask.fingerprint:
                raise GateError(f"{ask.key}: the base was asked something else; make it anew with this version")
            failed[1] += 1
            try:
                keep(await say(client, abilities, ask, before))
            except (RefusedError, MalformedError, UnreachableError) as error:
                failed[0] += 1
                if base is None or (failed[0] >= MOST_FAILED and 2 * failed[0] > failed[1]):
                    raise
                keep(Said(**_asked(ask), text="", finish_reason=None, error=str(error)))

    await all_of(one_paper(paper) for paper in papers)


async def say_again(
    client: Client,
    abilities: Abilities,
    papers: Iterable[Paper],
    style: Style,
    keep: Callable[[Said], None],
    own: Own | None = None,
) -> None:
    """What level 1 asks about ``papers`` once more, under conditions that must not matter: a cache of its own where the
    server has salts, the last ask first, two at a time.
    """

    async def one(ask: GateAsk) -> None:
        answer = await _answered(client, abilities, ask, {"cache_salt": "gate-again"} if abilities.salt else {})
        keep(_said(ask, answer))

    level = frozenset((1,))
    for paper in papers:
        asks = list(asks_of(paper, style, level, abilities.text_prompts, own))[::-1]
        for at in range(0, len(asks), 2):
            await all_of(one(ask) for ask in asks[at : at + 2])


async def all_of(work: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run side by side; the first error ends the others and is raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
