"""One engine in one process, measured: ``python -m longread.measure.worker`` with a task as JSON on standard input.

A process of its own gives each engine its own peak memory and keeps it out of the other's way. Answers with one JSON
line on standard output. Knows Longread's engine and ``transformers``; knows nothing of tables or files.
"""

import json
import random
import resource
import sys
import time
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from longread.engine.load import load_engine
from longread.spec.config import EngineOptions
from longread.spec.engine import FinishEvent, GenerationRequest, SamplingParams, TokenEvent


@dataclass(frozen=True, slots=True)
class Task:
    """What to measure: ``quantity`` is "prefill", "decode" or "warm"."""

    engine: str
    checkpoint: str
    quantity: str
    context: int
    batch: int
    new_tokens: int
    repeats: int
    seed: int


class Peer(Protocol):
    """What both engines can be asked for; times in seconds."""

    vocab: int

    def prefill(self, prompt: list[int]) -> float: ...

    def decode(self, prompts: list[list[int]], new_tokens: int) -> float: ...


class LongreadPeer:
    """This project's engine, driven through the public protocol."""

    def __init__(self, task: Task):
        room = task.context + task.new_tokens + 64
        options = EngineOptions(
            model=task.checkpoint, dtype="float32", max_model_len=room, max_num_seqs=max(task.batch, 1)
        )
        self.engine = load_engine(options)
        self.vocab = self.engine.info.vocab
        self.serial = 0

    def prefill(self, prompt: list[int]) -> float:
        """Seconds to the first token."""
        started = time.perf_counter()
        self._run([prompt], 1)
        return time.perf_counter() - started

    def decode(self, prompts: list[list[int]], new_tokens: int) -> float:
        """Tokens per second over the batch, counted after every request has its first token."""
        return self._run(prompts, new_tokens)

    def _run(self, prompts: list[list[int]], new_tokens: int) -> float:
        sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        for prompt in prompts:
            self.serial += 1
            self.engine.submit(GenerationRequest(str(self.serial), tuple(prompt), sampling))
        seen: set[str] = set()
        after_first, started, running = 0, 0.0, len(prompts)
        while running:
            for event in self.engine.step():
                if isinstance(event, TokenEvent):
                    after_first += len(seen) == len(prompts)
                    seen.add(event.request_id)
                    if len(seen) == len(prompts) and not started:
                        started = time.perf_counter()
                elif isinstance(event, FinishEvent):
                    running -= 1
                    if event.reason != "length":
                        raise RuntimeError(f"request {event.request_id} ended as {event.reason}: {event.error}")
        return after_first / (time.perf_counter() - started) if after_first else 0.0


class TransformersPeer:
    """``transformers`` generate on the same checkpoint, greedy, its default attention and expert implementations."""

    def __init__(self, task: Task):
        from transformers import AutoModelForCausalLM  # optional dependency of the measured peer

        self.model: Any = AutoModelForCausalLM.from_pretrained(task.checkpoint, dtype=torch.float32).eval()
        self.model.generation_config.eos_token_id = None
        self.vocab = int(self.model.config.vocab_size)

    def prefill(self, prompt: list[int]) -> float:
        """Seconds to the first token."""
        started = time.perf_counter()
        self._generate([prompt], 1)
        return time.perf_counter() - started

    def decode(self, prompts: list[list[int]], new_tokens: int) -> float:
        """Tokens per second over the batch, counted after the first token."""
        times = self._generate(prompts, new_tokens)
        return len(prompts) * (len(times) - 1) / (times[-1] - times[0])

    def _generate(self, prompts: list[list[int]], new_tokens: int) -> list[float]:
        from transformers import StoppingCriteria  # optional dependency of the measured peer

        times: list[float] = []

        class Clock(StoppingCriteria):  # type: ignore[misc]  # called once after each token
            def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
                times.append(time.perf_counter())
                return input_ids.new_zeros((input_ids.shape[0],)).bool()

        ids = torch.tensor(prompts)
        with torch.inference_mode():
            self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                do_sample=False,
                stopping_criteria=[Clock()],
                pad_token_id=0,
            )
        return times


def measure(task: Task) -> dict[str, object]:
    """Run one task: samples in the quantity's unit (prefill: seconds; decode: tokens/s; warm: seconds, with the cold
    ones beside), and this process's peak resident memory in bytes.
    """
    peer: Peer = LongreadPeer(task) if task.engine == "longread" else TransformersPeer(task)
    draw = random.Random(task.seed)

    def prompt(tokens: int) -> list[int]:
        return [draw.randrange(3, peer.vocab) for _ in range(tokens)]

    peer.prefill(prompt(32))  # first-call costs belong to no sample
    samples: list[float] = []
    cold: list[float] = []
    for _ in range(task.repeats):
        if task.quantity == "decode":
            samples.append(peer.decode([prompt(task.context) for _ in range(task.batch)], task.new_tokens))
        elif task.quantity == "prefill":
            samples.append(peer.prefill(prompt(task.context)))
        else:
            document = prompt(task.context)
            cold.append(peer.prefill(document + prompt(32)))
            samples.append(peer.prefill(document + prompt(32)))
    return {"samples": samples, "cold": cold, "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def main() -> None:
    """Read a task from standard input, measure, print one JSON line."""
    print(json.dumps(measure(Task(**json.load(sys.stdin)))))


if __name__ == "__main__":
    main()
