"""``python -m training.train``: train a reader for some minutes, resuming what the state folder holds.

Knows the command line and which twin belongs to which name. Schedules (row lengths, learning rates, rounding, sparse
selection) go by progress = trained seconds / planned seconds, kept in the state folder over all runs: the GPU is lent
by time. Run it again with the same folder until it says that it has finished.
"""

import argparse
import time
from dataclasses import MISSING, Field, fields
from pathlib import Path

from training.options import DEFAULTS, Options

_HELP = {
    "state": "folder of state.pt, weights-*.pt, progress.json and log.jsonl; made where it is missing",
    "minutes": "wall clock of this run from the start of the process, saving included",
    "planned_minutes": "trained time over all runs that the schedules are stretched over",
    "planned_steps": "let the schedules follow steps, not time: the same on every machine",
    "steps": "end this run after so many steps",
    "workers": "processes that make batches, divided among the row lengths of a stage; 0: none beside this one",
    "tokens_per_step": "rows = this // row length",
    "clip": "norm that the gradients of the AdamW parameters are clipped to",
    "bias_rate": "step of the routers' load balancing, times the schedule's factor",
    "document_weight": "weight of the loss on an eighth of the document's tokens",
    "stages": "JSON file with other stages than the built-in ones",
    "profile": "record so many steps, from the eleventh on, into profile.txt",
}
_SWITCHES = {
    "compile": "compile what the twin offers to compile",
    "graphs": "capture each kind of step as a CUDA graph: small models are bound by launches otherwise",
}
_TYPES = {"state": Path, "stages": Path, "device": str, "planned_steps": int, "steps": int}


def default_of(option: "Field[object]") -> str:
    """An option's default for --help, of each reader where they differ."""
    if option.default is not MISSING:
        return str(option.default)
    return ", ".join(f"{values[option.name]} for {name}" for name, values in DEFAULTS.items())


def parse(arguments: list[str] | None = None) -> Options:
    """The options of a command line; argparse ends the process where they are wrong."""
    parser = argparse.ArgumentParser(prog="python -m training.train", description=__doc__)
    parser.add_argument("name", choices=sorted(DEFAULTS))
    for option in fields(Options):
        if option.name == "name":
            continue
        flag = "--" + option.name.replace("_", "-")
        if option.name in _SWITCHES:
            parser.add_argument(flag, action="store_true", help=_SWITCHES[option.name])
        elif option.name == "state":
            parser.add_argument(flag, type=Path, required=True, help=_HELP["state"])
        else:
            kind = _TYPES.get(option.name, float if option.default is MISSING else type(option.default))
            text = f"{_HELP.get(option.name, '')} (default: {default_of(option)})"
            parser.add_argument(flag, type=kind, default=argparse.SUPPRESS, help=text)
    given = vars(parser.parse_args(arguments))
    return Options(**(dict(DEFAULTS[given["name"]]) | given))


def main() -> None:
    started = time.monotonic()
    options = parse()
    # Start-up: --help and the batch workers' look at this module need no torch.
    import torch

    from training.configs import CONFIGS
    from training.data import Batches
    from training.loop import Run
    from training.stages import STAGES, read_stages
    from training.twin_v3 import TwinV3
    from training.twin_v4 import TwinV4

    stages = STAGES[options.name] if options.stages is None else read_stages(options.stages)
    if not options.has_selection and any(stage.sparse for stage in stages):
        raise ValueError(f"{options.name} selects nothing: its stages must not be sparse")
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    twin = (TwinV4 if options.has_selection else TwinV3)(CONFIGS[options.name], options.seed)
    # One entry for each row length, ratio, rounding and selection; beyond the limit attention would run uncompiled.
    torch._dynamo.config.recompile_limit = 256
    torch._dynamo.config.accumulated_recompile_limit = 4096
    if options.compile:
        twin.compile_layers()
    run = Run(options, stages, twin, Batches, started)
    reason = run()
    print(f"{options.name}: step {run.progress.step}, {run.progress.tokens:,} tokens, {reason}")


if __name__ == "__main__":
    main()
