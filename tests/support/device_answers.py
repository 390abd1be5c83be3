"""Prompts of random ids, and the tokens that an engine answers them with when they arrive while it works."""

import torch

from longread.engine.engine import LocalEngine
from longread.spec.engine import FinishEvent, GenerationRequest, SamplingParams, TokenEvent

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def prompt(length: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(2, 1500, (length,), generator=generator).tolist())


def answers(engine: LocalEngine, prompts: list[tuple[int, ...]], sampling: SamplingParams = GREEDY) -> list[list[int]]:
    """Tokens of requests that arrive two steps apart, so that steps hold rows and chunks side by side."""
    found: dict[str, list[int]] = {}
    left = list(enumerate(prompts))
    while left or engine.has_work():
        if left:
            number, ids = left.pop(0)
            engine.submit(GenerationRequest(str(number), ids, sampling))
        for event in [*engine.step(), *engine.step()]:
            if isinstance(event, TokenEvent):
                found.setdefault(event.request_id, []).append(event.token_id)
            elif isinstance(event, FinishEvent):
                assert event.reason == "length", event.error
    return [found[str(i)] for i in range(len(prompts))]
