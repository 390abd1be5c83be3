"""What to measure, what to ask, and what else the words of a claim could mean."""

from dataclasses import replace

from longread.plan.claims.claim import Claim
from longread.plan.claims.limits import cold_rungs, generous
from longread.plan.claims.words import many, seconds


def measurement(claim: Claim) -> list[str]:
    """The protocol that settles the claim, step by step."""
    streams, isl = claim.streams, claim.isl or 1024
    percentile = claim.percentile or "p50 and p99"
    lines = []
    if claim.ttft is not None:
        lines.append(
            f"cold: {max(3, min(streams, 10))} prompts of {isl:,} tokens that share nothing (each begins differently), "
            "the cache emptied before, one at a time; the response's cached_tokens must be 0"
        )
        lines.append(
            f"warm: one prompt of {isl:,} tokens twice, then with suffixes of 1, 32, 512 and 4,096 new tokens behind "
            "it; cached_tokens of each response is kept, and the tier its prefix lay in (cards, then host, then disk)"
        )
        if streams > 1:
            lines.append(
                f"load: {streams} requests, once all sent within 10 ms, once by a Poisson process at a rate that keeps "
                f"{streams} in flight; once on one shared document, once on {streams} distinct ones"
            )
        lines.append(
            "clock: starts when the client has sent the last byte of the request; ends when the first byte of a "
            f"non-empty token arrives (not headers, not an empty role chunk). Report {percentile} of at least 100 warm "
            "requests, and all cold ones"
        )
    if claim.tpot is not None or (claim.rate is not None and claim.rate.of == "output"):
        lines.append(
            f"decode: {many(streams, 'stream')} of {isl:,} tokens each, {claim.osl or 1024:,} tokens out, end token "
            "ignored, drafts off and on; TPOT = (last - first token time) / (tokens - 1) of each request; tokens/s = "
            "output tokens over the time in which all streams were busy, at least three requests a stream"
        )
        lines.append("with drafts: tokens accepted a step on the claimant's text and on random text, side by side")
    if claim.rate is not None and claim.rate.of == "input":
        lines.append(
            f"prefill: distinct prompts of {isl:,} tokens with one token out each, as many in flight as saturate; "
            "prompt tokens that were not cached, over the time between the first and the last completion"
        )
    lines.append(
        f"memory: fill with distinct contexts of {isl:,} tokens until the first is evicted; that number, and "
        "nvidia-smi of every card"
    )
    lines.append(
        "beside the figures: engine version and all flags, clocks and throttle reasons, driver, and the first "
        "answers' text, to see that it is the model"
    )
    return lines


def questions(claim: Claim) -> list[str]:
    """What the claim leaves open, most telling first."""
    asked = []
    if claim.ttft is not None:
        if claim.state is None and claim.new_tokens is None:
            asked.append(
                "What share of the prompt was read before (hit ratio, cached_tokens), and how long was the new suffix?"
            )
        if claim.tier is None and claim.state != "cold":
            asked.append("Where did the cached part lie: in the cards' memory, host memory, or on disk?")
        if claim.streams > 1 and claim.together is None:
            asked.append(
                f"Did the {claim.streams} requests arrive at the same moment, or spread; and in flight or accepted?"
            )
        if claim.streams > 1 and claim.shared is None:
            asked.append("One document or many distinct ones? Is the length that of each request, or the sum over all?")
        asked.append(
            "When does the clock start (bytes received, tokenised, scheduled) and what stops it (a token, or a chunk)?"
        )
        if claim.ids is None:
            asked.append("Did text or token ids come in?")
    if claim.percentile is None:
        asked.append("Which percentile, over how many requests?")
    if claim.rate is not None and claim.rate.scope is None:
        asked.append("Tokens/s of each stream, of each card, or in all; output alone, or prompt tokens as well?")
    if claim.tpot is not None or claim.rate is not None:
        asked.append("With drafts (MTP)? How many tokens were accepted a step, on which text?")
        if claim.concurrency is None:
            asked.append("At how many streams, with how many tokens in and out?")
    if claim.engine is None:
        asked.append("Which engine and version, which split (TP, DP, CP, PP, EP), which weights and cache formats?")
    if len(claim.hardware) > 1:
        asked.append(f"Which card: {' or '.join(h.card.name for h in claim.hardware)}?")
    if len(claim.specs) > 1:
        asked.append(f"Which model: {' or '.join(s.label for s in claim.specs)}?")
    return asked


def other_meanings(claim: Claim) -> list[str]:
    """Readings under which the figure would be no feat."""
    found = []
    if claim.ttft is not None and claim.isl is not None and claim.streams > 1:
        each = max(claim.isl // claim.streams, 1)
        for spec in claim.specs:
            own = replace(claim, isl=each)
            floor = cold_rungs(spec, generous(own.hardware[0]), each)[0].floor.seconds
            found.append(
                f"{claim.isl:,} tokens summed over {claim.streams} requests ({each:,} each): {spec.label} needs at "
                f"least {seconds(floor)} for one and {seconds(floor * claim.streams)} for all, cold"
            )
    if claim.ttft is not None:
        found.append("the same prompt repeated, so that nothing but its last token is computed")
        found.append("time to the first chunk or header of the response, before any token")
        found.append("time from the engine's scheduler on, with token ids, without the CPU's part")
    if claim.rate is not None and claim.rate.of == "output":
        found.append("prompt and output tokens counted together, cached prompt tokens included")
    return found
