"""Program: serve a long prompt and decode with everything that the cache holds touched; print what it took, as JSON.

Run by itself, because a process's peak memory never goes down: ``python serve_and_measure.py MODEL OPTIONS-AS-JSON``.
"""

import json
import random
import sys
from pathlib import Path

from longread.engine.engine import LocalEngine
from longread.engine.load import load_resolved
from longread.plan.machine import probe_machine
from longread.plan.resolve import resolve
from longread.spec.config import EngineOptions
from longread.spec.config_json import read_config, spec_from_config
from longread.spec.engine import FinishEvent, GenerationRequest, SamplingParams

LIBRARY_BYTES = 176 * 2**20  # of torch's and others' files, as a plain install maps them


def peak_bytes() -> int:
    """The most memory so far, with a fixed part for libraries: how much of their files the system maps at once depends
    on how it read them (60 to 120 MiB more behind a fresh install), and it takes that back when it needs to.
    """
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return (int(lines["VmHWM"].split()[0]) - int(lines["RssFile"].split()[0])) * 1024 + LIBRARY_BYTES


def serve(engine: LocalEngine, lengths: list[int], vocab: int) -> None:
    draw = random.Random(1)
    sampling = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=8, ignore_eos=True)
    for number, length in enumerate(lengths):
        tokens = tuple(draw.randrange(5, vocab - 5) for _ in range(length))
        engine.submit(GenerationRequest(f"{number}-{length}", tokens, sampling))
    left = len(lengths)
    while left:
        left -= sum(isinstance(event, FinishEvent) for event in engine.step())


def main(model: str, options: dict[str, object], prompt: int) -> None:
    spec = spec_from_config(read_config(Path(model)), label="measured")
    config = resolve(EngineOptions(model=model, **options), spec, probe_machine())
    engine = load_resolved(Path(model), spec, config)
    loaded = peak_bytes()
    for view in engine._core.state.values():
        view.fill_(0)  # as a server that has run for a while: every page was written once
    serve(engine, [prompt], spec.vocab)
    serve(engine, [200] * config.max_num_seqs, spec.vocab)
    plan = config.memory
    said = {"predicted": plan.total, "peak": peak_bytes(), "loaded": loaded, "cache": plan.kv_cache}
    print(json.dumps(said | {"allocated": engine.info.allocated_bytes, "planned": plan.allocated}))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]))
