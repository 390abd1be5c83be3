"""One run of the training: steps until its time is up, with everything saved, so that the next run goes on.

Knows the twin's contract, the optimisers, and the clock. Where the schedules stand follows the *time* trained, not the
number of steps: a GPU is lent by the hour, and a faster program then trains on more instead of ending early. The time
of a run before its first step is done (start, compilation) does not count as trained; later compilations do.
"""

import json
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from training.feed import Batch, Feed, Source, Targets
from training.graphs import Stepper
from training.muon import Muon
from training.objective import FIGURES, Reader, objective
from training.options import Options
from training.saved import Progress, belongs, read_progress, save_weights, write_atomically
from training.stages import Stage, draw_length, rate_factor, stage_at
from training.state import load_weights

LOG_STEPS = 20
SAVE_SECONDS = 120.0
RESERVE_SECONDS = 10.0
"""Kept at the end of a run for saving."""
AHEAD_SECONDS = 10.0
"""How long before a stage its workers start."""
_IN_FLIGHT = 2
"""Steps the host may be ahead of the device: enough to hide launches, few enough for the clock to be honest."""
_PROFILE_AFTER = 10


class Twin(Reader, Protocol):
    """What the loop needs of a twin, which is an nn.Module too."""

    fake_quant: bool
    eager: bool

    def update_router_bias(self, rate: float | Tensor) -> None: ...
    def native(self) -> dict[str, Tensor]: ...
    def groups(self) -> dict[str, list[nn.Parameter]]: ...


class Clock:
    """Trained seconds, over all runs; stands still until `start`."""

    def __init__(self, seconds: float) -> None:
        self._before = seconds
        self._since: float | None = None

    def start(self) -> None:
        if self._since is None:
            self._since = time.monotonic()

    def read(self) -> float:
        return self._before + (0.0 if self._since is None else time.monotonic() - self._since)


class Optimisers:
    """Muon for the matrices, AdamW for everything else, with the schedule's factor on all rates.

    Gradients and, on a GPU, rates are tensors that stay where they are: a captured step finds them there.
    """

    def __init__(self, groups: dict[str, list[nn.Parameter]], options: Options) -> None:
        cuda = options.device.startswith("cuda")
        self._base = (options.lr_muon, options.lr_adam, options.lr_embed, options.bias_rate)
        self.rates = [torch.zeros((), device=options.device) if cuda else 0.0 for _ in self._base]
        self._clip = options.clip
        self._small = [*groups["adam"], *groups["embed"]]
        self._grads = []
        for parameter in (*groups["muon"], *self._small):
            parameter.grad = torch.zeros_like(parameter)
            self._grads.append(parameter.grad)
        self.muon = Muon(groups["muon"])
        self.adam = torch.optim.AdamW(
            [{"params": groups["adam"]}, {"params": groups["embed"]}],
            lr=options.lr_adam,
            betas=(0.9, 0.95),
            weight_decay=0.0,
            fused=cuda,
            capturable=cuda,
        )
        self.steps = 0

    def schedule(self, progress: float) -> float:
        """Set the rates of the next step; returns the factor that the schedule gives them."""
        factor = rate_factor(progress, self.steps)
        for i, base in enumerate(self._base):
            rate = self.rates[i]
            if isinstance(rate, Tensor):
                rate.fill_(base * factor)
            else:
                self.rates[i] = base * factor
        self.adam.param_groups[0]["lr"], self.adam.param_groups[1]["lr"] = self.rates[1], self.rates[2]
        self.steps += 1
        return factor

    def zero(self) -> None:
        torch._foreach_zero_(self._grads)

    def step(self) -> None:
        """Update all parameters by their gradients."""
        with record_function("adam"):
            nn.utils.clip_grad_norm_(self._small, self._clip)
            self.adam.step()
        with record_function("muon"):
            self.muon.step(self.rates[0])

    def state_dict(self) -> dict[str, Any]:
        return {"muon": self.muon.state_dict(), "adam": self.adam.state_dict(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])
        self.steps = state["steps"]


class Log:
    """log.jsonl: what was measured, gathered on the device and read every LOG_STEPS steps."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._steps: list[tuple[int, int]] = []
        self._figures: list[Tensor] = []
        self._since = time.monotonic()
        self._waited = 0.0
        self._tokens = 0

    def write(self, record: dict[str, object]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def add(self, step: int, length: int, tokens: int, figures: Tensor, waited: float) -> None:
        self._steps.append((step, length))
        self._figures.append(figures)
        self._waited += waited
        self._tokens += tokens

    def flush(self, common: dict[str, object]) -> None:
        """Write one line per row length since the last flush.

        Raises FloatingPointError, naming the step, where a loss was not finite.
        """
        if not self._steps:
            return
        # The only wait for the device: everything queued is done behind it.
        figures = torch.stack(self._figures).cpu()
        for (step, length), row in zip(self._steps, figures, strict=True):
            if not row[0].isfinite():
                raise FloatingPointError(
                    f"the loss of step {step} (rows of {length} tokens) is {row[0].item()}; the last saved state is "
                    "unharmed: resume from it with lower rates"
                )
        now = time.monotonic()
        speed = self._tokens / (now - self._since)
        for length in sorted({length for _, length in self._steps}):
            rows = figures[[own == length for _, own in self._steps]]
            mean = dict(zip(FIGURES, rows.mean(0).tolist(), strict=True))
            exact, answers = rows[:, 4].sum().item(), rows[:, 5].sum().item()
            self.write(
                common
                | {"length": length, "steps": len(rows)}
                | {name: round(mean[name], 5) for name in FIGURES[:4]}
                | {"exact": round(exact / max(answers, 1), 4), "answers": int(answers)}
                | {"tokens_s": round(speed), "waited": round(self._waited / max(now - self._since, 1e-9), 3)}
            )
        self._steps, self._figures, self._since, self._waited, self._tokens = [], [], now, 0.0, 0


class Run:
    """The training of one twin in one process. `started`: time.monotonic() when the process began."""

    def __init__(self, options: Options, stages: Sequence[Stage], twin: Any, source: Source, started: float) -> None:
        self.options, self.stages, self.twin = options, tuple(stages), twin
        self.device = torch.device(options.device)
        self.folder = options.state
        self.folder.mkdir(parents=True, exist_ok=True)
        self._deadline = started + options.minutes * 60 - RESERVE_SECONDS
        twin.eager = self.device.type == "cpu"
        twin.to(self.device).train()
        self.optimisers = Optimisers(twin.groups(), options)
        self.progress = self._resume()
        self.clock = Clock(self.progress.seconds)
        self.log = Log(self.folder / "log.jsonl")
        self.feed = Feed(
            source,
            self.stages,
            seed=options.seed,
            tokens=options.tokens_per_step,
            workers=options.workers,
            pin=self.device.type == "cuda",
            taken=self.progress.taken,
        )
        self._stage = -1
        self._first = self.progress.step
        self._saved = time.monotonic()
        self._done: list[torch.cuda.Event] = []
        self._index_weight = 0.0
        self._stepper = Stepper(self._update, self._no_graph) if options.graphs and self.device.type == "cuda" else None
        self._profiler: profile | None = None

    def __call__(self) -> str:
        """Train until the time or the plan is over, save, and return which of them it was."""
        self.log.write({"event": "start", "at_step": self.progress.step} | self._circumstances())
        if self.device.type == "cuda":  # captures need another stream than the default one, from the first step on
            torch.cuda.set_stream(torch.cuda.Stream())
        reason = "time"
        try:
            while (now := self._progress()) < 1.0:
                if time.monotonic() > self._deadline or self._had_steps():
                    break
                self._enter(stage_at(self.stages, now))
                self._step(now)
            else:
                reason = "finished"
            self._save()
        finally:
            self.feed.close()
        self.log.write({"event": "stop", "reason": reason, "step": self.progress.step, "progress": self._progress()})
        return reason

    def _progress(self) -> float:
        if self.options.planned_steps is not None:
            return self.progress.step / self.options.planned_steps
        return self.clock.read() / (self.options.planned_minutes * 60)

    def _had_steps(self) -> bool:
        return self.options.steps is not None and self.progress.step - self._first >= self.options.steps

    def _enter(self, stage: int) -> None:
        """Make a stage the current one, and start the next one's workers when it is near."""
        self.feed.open(stage)
        if self.options.planned_steps is None:
            ahead = AHEAD_SECONDS / (self.options.planned_minutes * 60)
            self.feed.open(stage_at(self.stages, self._progress() + ahead))
        if stage == self._stage:
            return
        if self._stage >= 0:
            # New shapes may compile for long, or not fit.
            self._save()
        self.feed.close(before=stage)
        self._stage = stage
        if self._stepper is not None:
            self._stepper.forget()
        self._index_weight = self.stages[stage].index_weight
        self.twin.fake_quant = self.stages[stage].fake_quant
        if self.options.has_selection:
            self.twin.selection = "topk" if self.stages[stage].sparse else "dense"
        self.log.write({"event": "stage", "stage": stage, "step": self.progress.step} | asdict(self.stages[stage]))

    def _step(self, now: float) -> None:
        stage = self.stages[self._stage]
        length = draw_length(stage, self.options.seed, self.progress.step)
        before = time.monotonic()
        batch = to_device(self.feed.take(self._stage, length), self.device)
        waited = time.monotonic() - before
        self._profile()
        factor = self.optimisers.schedule(now)
        inputs = leaves(batch)
        figures = self._update(inputs) if self._stepper is None else self._stepper((self._stage, length), inputs)
        self.progress.step += 1
        self.progress.tokens += batch.ids.numel()
        self._keep_pace()
        self.log.add(self.progress.step, length, batch.ids.numel(), figures, waited)
        if self.progress.step % LOG_STEPS == 0:
            self._flush(factor)
        if time.monotonic() - self._saved > SAVE_SECONDS:
            self._save()

    def _update(self, inputs: Sequence[Tensor]) -> Tensor:
        """Forward, backward, all updates; returns the figures. It is captured, so nothing here waits or decides."""
        batch = from_leaves(inputs)
        self.optimisers.zero()
        with record_function("forward"), torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda"):
            loss, figures = objective(
                self.twin, batch, document_weight=self.options.document_weight, index_weight=self._index_weight
            )
        with record_function("backward"):
            loss.backward()
        self.optimisers.step()
        self.twin.update_router_bias(self.optimisers.rates[3])
        return figures

    def _no_graph(self, why: str) -> None:
        self.log.write({"event": "no graph", "step": self.progress.step, "why": why[-600:]})

    def _keep_pace(self) -> None:
        """Wait for the step before the last, and for the first one, from whose end on the clock runs."""
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            self._done.append(event)
            if len(self._done) > _IN_FLIGHT or self.progress.step == self._first + 1:
                self._done.pop(0).synchronize()
        self.clock.start()

    def _flush(self, factor: float | None = None) -> None:
        common: dict[str, object] = {
            "step": self.progress.step,
            "seconds": round(self.clock.read(), 2),
            "tokens": self.progress.tokens,
            "progress": round(self._progress(), 5),
            "stage": self._stage,
        }
        if factor is not None:
            common["lr"] = round(self.options.lr_muon * factor, 6)
        if self.device.type == "cuda":
            common["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
        self.log.flush(common)

    def _save(self) -> None:
        """Write everything, after making sure that it is worth keeping."""
        self._flush()
        finite = torch.stack([p.detach().sum().isfinite() for p in self.twin.parameters()])
        if not finite.all():
            raise FloatingPointError(f"a weight is not finite after step {self.progress.step}; nothing was saved")
        self.progress.seconds = self.clock.read()
        self.progress.taken = dict(self.feed.taken)
        state = {
            "twin": self.twin.state_dict(),
            "optimisers": self.optimisers.state_dict(),
            "progress": self.progress.to_json(),
            "random": {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()},
        }
        write_atomically(state, self.folder / "state.pt")
        save_weights(self.folder, self.twin.native(), self.progress)
        self._saved = time.monotonic()

    def _resume(self) -> Progress:
        """Where the folder's run stood: by state.pt, else by weights and progress.json alone, else the beginning."""
        path = self.folder / "state.pt"
        if path.exists():
            state = torch.load(path, map_location="cpu", weights_only=True)
            progress = belongs(Progress.from_json(state["progress"]), self.options.name, self.folder)
            self.twin.load_state_dict(state["twin"])
            self.optimisers.load_state_dict(state["optimisers"])
            torch.set_rng_state(state["random"]["cpu"])
            if self.device.type == "cuda" and state["random"]["cuda"]:
                torch.cuda.set_rng_state_all(state["random"]["cuda"])
            return progress
        if (self.folder / "progress.json").exists():
            # The optimisers begin anew, with their warm-up.
            progress = read_progress(self.folder, self.options.name)
            self.twin.load_native(load_weights(self.folder))
            return progress
        return Progress(self.options.name)

    def _profile(self) -> None:
        """Record the steps that --profile asks for and write their table."""
        done = self.progress.step - self._first
        if self.options.profile and done == _PROFILE_AFTER:
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self.device.type == "cuda")
            self._profiler = profile(activities=activities, record_shapes=True)
            self._profiler.start()
        if self._profiler is not None and done == _PROFILE_AFTER + self.options.profile:
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            self._profiler.stop()
            order = "self_cuda_time_total" if self.device.type == "cuda" else "self_cpu_time_total"
            tables = [
                self._profiler.key_averages(group_by_input_shape=shapes).table(
                    sort_by=order, row_limit=60, max_name_column_width=60, max_shapes_column_width=70
                )
                for shapes in (False, True)
            ]
            (self.folder / "profile.txt").write_text(f"{self.options.profile} steps\n" + "\n\n".join(tables) + "\n")
            self._profiler = None

    def _circumstances(self) -> dict[str, object]:
        cuda = self.device.type == "cuda"
        return {
            "options": {name: str(v) if isinstance(v, Path) else v for name, v in asdict(self.options).items()},
            "parameters": sum(p.numel() for p in self.twin.parameters()),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": torch.cuda.get_device_name() if cuda else "cpu",
        }


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on the device, int32 widened to the int64 that torch indexes by; pinned memory is not waited for."""

    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            there = value.to(device, non_blocking=True)
            return there.long() if there.dtype == torch.int32 else there
        return type(value)(*(move(part) for part in value))

    moved: Batch = move(batch)
    return moved


def leaves(batch: Batch) -> list[Tensor]:
    """The tensors of a batch in order."""
    return [batch.ids, *batch.answers, batch.spans, *batch.document, batch.queries]


def from_leaves(tensors: Sequence[Tensor]) -> Batch:
    """Inverse of ``leaves``."""
    ids, *rest = tensors
    return Batch(ids, Targets(*rest[:3]), rest[3], Targets(*rest[4:7]), rest[7])
