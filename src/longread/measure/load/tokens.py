"""Tokens counted by a tokenizer, after a run, beside or instead of what the server says.

Knows texts and a counter. Must not know requests' times.
"""

from collections.abc import Iterable, Sequence

from longread.measure.load.outcome import Outcome
from longread.measure.workloads.ask import Ask
from longread.measure.workloads.counting import Counter


def count_outputs(outcomes: Iterable[Outcome], counter: Counter) -> None:
    """Fills ``counted_tokens``, and ``output_tokens`` where the server told none."""
    for each in outcomes:
        if each.status != "ok":
            continue
        each.counted_tokens = counter.count(each.reasoning) + counter.count(each.text)
        if each.output_tokens is None:
            each.output_tokens, each.tokens_from = each.counted_tokens, "tokenizer"


def count_prompts(outcomes: Iterable[Outcome], asks: Sequence[Ask], counter: Counter) -> int:
    """Fills ``prompt_tokens`` where the server told none: of the texts, without the chat's markup. Returns how many."""
    filled = 0
    for each in outcomes:
        if each.status == "ok" and each.prompt_tokens is None:
            each.prompt_tokens = _prompt(asks[each.index], counter)
            filled += each.prompt_tokens is not None
    return filled


def _prompt(ask: Ask, counter: Counter) -> int | None:
    """None where a part of it is not text, or is an answer that only the run knew."""
    if isinstance(ask.prompt, str):
        return counter.count(ask.prompt)
    if ask.prompt is not None:
        return len(ask.prompt)
    total = 0
    for message in ask.messages or ():
        content = message.get("content")
        if not isinstance(content, str):
            return None
        total += counter.count(content)
    return total
