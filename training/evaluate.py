"""``python -m training.evaluate reader-v4 --state DIR --output results.json``: accuracy of a twin, teacher-forced.

An answer counts as right if and only if each of its tokens and the end of the turn behind it is the model's first
choice, given the right tokens before: then greedy decoding writes exactly this answer and stops. With thinking on the
thought in front of the answer counts as part of it, which is stricter than asking for the answer alone.

By default many questions follow one document, each behind the right answers to those before; ``--single-turn`` asks
one question a document, which is the real use. Nothing waits for the device within a length.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from training.cells import Asked, Cell, document_figures, summary, tables, write_result
from training.configs import CONFIGS
from training.rows import Batch, Exam, batches
from training.state import Twin, load_weights, twin_for
from training.twin_v4 import TwinV4

KL_ROWS = 4096  # logits compared at a time: 64 MB each in float32


def score(twin: Twin, batch: Batch, device: torch.device) -> Tensor:
    """bool [questions of the batch] on the device: whether every target is the first choice. Does not wait."""
    return _right(twin, batch, hidden_of(twin, batch, device))


def hidden_of(twin: Twin, batch: Batch, device: torch.device) -> Tensor:
    """[B, T, D] of a batch, in bfloat16 products on a GPU and in float32 on a CPU."""
    with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):
        return twin.hidden(batch.ids.to(device, non_blocking=True))


def _right(twin: Twin, batch: Batch, hidden: Tensor) -> Tensor:
    device = hidden.device
    row, position, question = (part.to(device) for part in (batch.row, batch.position, batch.question))
    choice = twin.logits(hidden[row, position - 1]).argmax(-1)
    wrong = (choice != batch.ids.to(device)[row, position]).int()
    count = torch.zeros(len(batch.asked), dtype=torch.int32, device=device).index_add_(0, question, wrong)
    return count == 0


@dataclass(slots=True)
class Settings:
    """What is asked: ``questions`` a length in all, ``turns`` of them behind one document."""

    lengths: Sequence[int]
    questions: int
    turns: int
    thinking: Sequence[bool]
    seed0: int
    workers: int

    def exams(self) -> Iterator[Exam]:
        """One exam a length and mode."""
        for length in self.lengths:
            for thinking in self.thinking:
                turns = turns_for(length, self.turns)
                yield Exam(length, -(-self.questions // turns), turns, thinking, self.seed0)


def turns_for(length: int, most: int) -> int:
    """Questions behind one document: in short rows fewer, so that the document stays most of the row."""
    return max(1, min(most, length // 256))


@torch.inference_mode()
def evaluate(twin: Twin, settings: Settings, device: torch.device) -> dict[str, object]:
    """Result tables and the documents' figures; prints a line a length."""
    answers: list[tuple[Asked, bool]] = []
    documents: list[tuple[int, int, int]] = []
    for exam in settings.exams():
        started = time.perf_counter()
        asked: list[Asked] = []
        flags: list[Tensor] = []
        for batch in batches(exam, settings.workers):
            flags.append(score(twin, batch, device))
            asked += batch.asked
            documents += [(exam.length, row.document[1] - row.document[0], row.facts) for row in batch.rows]
        right: list[bool] = torch.cat(flags).tolist()
        part = list(zip(asked, right, strict=True))
        answers += part
        mode = f"thinking {'on' if exam.thinking else 'off'}, {exam.turns} turns"
        print(f"{summary(part)}  ({mode}, {time.perf_counter() - started:.1f} s)", flush=True)
    return {"tables": tables(answers), "documents": document_figures(documents)}


@torch.inference_mode()
def compare(master: Twin, other: Twin, settings: Settings, device: torch.device) -> list[Cell]:
    """Per length, over answer and over document positions: mean KL(master || other) in nats, and the share of
    positions where the first choice differs. Both read the same rows.
    """
    cells: list[Cell] = []
    for exam in settings.exams():
        if exam.thinking:
            continue
        totals = {name: torch.zeros(3, dtype=torch.float64, device=device) for name in ("answer", "document")}
        for batch in batches(exam, settings.workers):
            ours, theirs = (hidden_of(twin, batch, device) for twin in (master, other))
            for name, (row, position) in _positions(batch).items():
                for lo in range(0, len(row), KL_ROWS):
                    r, p = row[lo : lo + KL_ROWS].to(device), position[lo : lo + KL_ROWS].to(device) - 1
                    totals[name] += _divergence(master.logits(ours[r, p]), other.logits(theirs[r, p]))
        for name, total in totals.items():
            count, divergence, flips = total.tolist()
            where: Cell = {"length": exam.length, "positions": name, "count": int(count)}
            cells.append(where | {"kl_mean": divergence / count, "flips": flips / count})
            print(
                f"{exam.length:>6} {name}: KL {divergence / count:.2e}, flips {100 * flips / count:.2f} %", flush=True
            )
    return cells


def _positions(batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
    """(row, index) of the tokens that are predicted, answers' and documents'."""
    rows = [torch.full((stop - start,), r) for r, (start, stop) in enumerate(row.document for row in batch.rows)]
    inside = [torch.arange(*row.document) for row in batch.rows]
    return {"answer": (batch.row, batch.position), "document": (torch.cat(rows), torch.cat(inside))}


def _divergence(master: Tensor, other: Tensor) -> Tensor:
    """float64 [3]: positions, the sum of KL(master || other), and how many first choices differ."""
    log_p, log_q = master.float().log_softmax(-1), other.float().log_softmax(-1)
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1).double().sum()
    flips = (master.argmax(-1) != other.argmax(-1)).sum().double()
    return torch.stack((torch.full_like(flips, len(master)), divergence, flips))


@torch.inference_mode()
def index_quality(twin: TwinV4, settings: Settings, device: torch.device) -> list[Cell]:
    """Per length and CSA layer: how often the indexer's top-k at the answer's first token holds the value's windows.

    ``any``: at least one of the entries that pool a token of the value; ``all``: the share of its own windows that are
    selected. ``coverage``: top-k over the closed entries, what a blind choice would reach. Only questions with one
    value count.
    """
    cells: list[Cell] = []
    twin.keep_selection = True
    for exam in settings.exams():
        if exam.thinking:
            continue
        total: Tensor | None = None
        for batch in batches(replace(exam, values=True), settings.workers):
            hidden_of(twin, batch, device)
            selections = twin.selections
            if not selections:  # no more entries than top-k: everything is selected
                break
            found = torch.stack([_recall(selected, batch) for selected in selections])
            total = found if total is None else total + found
        for layer, (count, some, share, coverage) in enumerate([] if total is None else total.tolist()):
            where: Cell = {"length": exam.length, "csa_layer": layer, "count": int(count)}
            cells.append(where | {"any": some / count, "all": share / count, "coverage": coverage / count})
            print(f"{exam.length:>6} CSA {layer}: {cells[-1]}", flush=True)
    twin.keep_selection = False
    return cells


def _recall(selected: Tensor, batch: Batch) -> Tensor:
    """float64 [4]: questions, any, all, coverage summed. ``selected`` bool [B, T, C], an entry for four tokens.

    Entry w pools window w and, as its "previous" series, window w - 1; so the entry behind the value's last window
    holds some of it, too.
    """
    out = torch.zeros(4, dtype=torch.float64, device=selected.device)
    for r, row in enumerate(batch.rows):
        for start, span in zip(row.starts, row.values, strict=True):
            if span is None:
                continue
            query = start - 1
            first, last = span[0] // 4, (span[1] - 1) // 4
            chosen = selected[r, query]
            some = chosen[first : last + 2].any().double()
            share = chosen[first : last + 1].double().mean()
            coverage = chosen.sum().double() / ((query + 1) // 4)
            out += torch.stack((torch.ones_like(some), some, share, coverage))
    return out


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    options = _parser().parse_args(arguments)
    device = torch.device(options.device)
    # A kernel is compiled for each length, layer kind and selection; torch would give up after eight.
    torch._dynamo.config.recompile_limit = 1024
    torch._dynamo.config.accumulated_recompile_limit = 4096
    turns = 1 if options.single_turn else options.turns
    modes = {"off": (False,), "on": (True,), "both": (False, True)}[options.thinking]
    settings = Settings(options.lengths, options.questions, turns, modes, options.seed0, options.workers)
    twin = load_twin(options.reader, options.state or options.checkpoint, device, options.compile)
    selections = _selections(twin, options.selection)
    for selection in selections:
        result: dict[str, object] = {
            "model": options.reader,
            "method": "teacher-forced",
            "turns": turns,
            "selection": selection,
            "quantised": options.quantised or options.checkpoint is not None,
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "seed0": options.seed0,
        }
        result |= _measured(twin, selection, options, settings, device)
        name = f"{options.output.stem}-{selection}" if len(selections) > 1 else options.output.stem
        write_result(options.output.with_stem(name), result)
        print(f"written to {options.output.with_stem(name)}")


def _measured(
    twin: Twin, selection: str | None, options: argparse.Namespace, settings: Settings, device: torch.device
) -> dict[str, object]:
    """What the command line asks for, with one selection."""
    twin.fake_quant = options.quantised
    if selection is not None:
        print(f"selection {selection}")
        _select(twin, selection)
    if options.compare is not None:
        master = load_twin(options.reader, options.compare, device, options.compile)
        if selection is not None:
            _select(master, selection)
        return {"divergence": compare(master, twin, settings, device)}
    if options.index:
        if not isinstance(twin, TwinV4):
            raise SystemExit("reader-v3 has no indexer: leave --index out")
        return {"index": index_quality(twin, settings, device)}
    return evaluate(twin, settings, device)


def _select(twin: Twin, selection: str) -> None:
    assert isinstance(twin, TwinV4)  # _selections gives other twins none
    twin.selection = selection


def _selections(twin: Twin, wanted: str | None) -> list[str | None]:
    """The indexed layers' selections to run; None for a model that has no such layers."""
    if isinstance(twin, TwinV4):
        return list((wanted or "topk").split(","))
    if wanted is not None:
        raise SystemExit("reader-v3 selects nothing: leave --selection out")
    return [None]


def load_twin(reader: str, path: Path, device: torch.device, compiled: bool) -> Twin:
    """A twin with the weights of a training state or a checkpoint, ready to read."""
    twin = twin_for(CONFIGS[reader])
    twin.load_native(load_weights(path))
    twin.eager = device.type != "cuda"
    if compiled:
        twin.compile_layers()
    return twin.to(device).eval()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m training.evaluate", description=__doc__.splitlines()[0])
    parser.add_argument("reader", choices=sorted(CONFIGS))
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--state", type=Path, help="folder of a training state")
    source.add_argument("--checkpoint", type=Path, help="exported checkpoint, dequantised when read")
    parser.add_argument("--lengths", type=_numbers, default=(1024, 4096, 8192), help="tokens, e.g. 1024,4096")
    parser.add_argument("--questions", type=int, default=2000, help="questions a length; 2000 are about 180 a decile")
    parser.add_argument("--turns", type=int, default=32, help="questions behind one document, at most")
    parser.add_argument("--single-turn", action="store_true", help="one question a document, the real use")
    parser.add_argument("--thinking", choices=("off", "on", "both"), default="off")
    parser.add_argument("--selection", help="reader-v4: topk (default), dense or random; several with commas between")
    parser.add_argument("--compile", action="store_true", help="compile what the twin offers to compile")
    parser.add_argument("--quantised", action="store_true", help="round the weights as the checkpoint stores them")
    parser.add_argument("--compare", type=Path, help="master (state or checkpoint): KL and flips instead of accuracy")
    parser.add_argument("--index", action="store_true", help="reader-v4: recall of the indexer instead of accuracy")
    parser.add_argument("--seed0", type=int, default=0, help="another examination")
    parser.add_argument("--workers", type=int, default=0, help="processes that write documents")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, required=True)
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    main()
