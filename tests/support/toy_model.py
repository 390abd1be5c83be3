"""A tiny exact model under the real model's interface: every logit depends on every row and ring entry before it.

All arithmetic is on small integers, so its outputs are the same bit for bit however tokens are cut into chunks, batched
or moved between pages; a wrong page, a stale slot or a lost snapshot changes them.
"""

import random
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from longread.engine.core import Core
from longread.engine.device_runner import DeviceRunner, Limits
from longread.engine.engine import LocalEngine
from longread.engine.runner import Runner
from longread.engine.scheduler import Scheduler
from longread.kernels.places import Chunk, Rows
from longread.kv.cache import KVCache
from longread.kv.host import HostArena
from longread.kv.tensors import StateTensors
from longread.kv.tiers import Tiers
from longread.kv.transfer import Disk
from longread.models.inputs import StepInputs
from longread.spec.batch import Segment
from longread.spec.config import Slo
from longread.spec.engine import EngineInfo
from longread.spec.state import PAGE_TOKENS, StateGroup

VOCAB = 97
EOS = 1
PRIME = 9973

MLA_GROUPS = (StateGroup("latent", "rows", (0,), 2, dtype="float32"),)
RING_GROUPS = (
    StateGroup("latent", "rows", (0,), 2, dtype="float32"),
    StateGroup("pairs", "rows", (0,), 1, tokens_per_row=4, dtype="float32"),
    StateGroup("recent", "ring", (0,), 1, ring_rows=8, fill=-1.0, dtype="float32"),
    StateGroup("hash", "ring", (0,), 1, ring_rows=1, fill=5.0, dtype="float32"),
)


class ToyModel:
    """``groups`` says which state it keeps: MLA_GROUPS or RING_GROUPS. ``fail_on``: a token id whose step raises."""

    def __init__(self, groups: Sequence[StateGroup], fail_on: int | None = None):
        self.rings = any(g.kind == "ring" for g in groups)
        self.fail_on = fail_on
        self.tokens_run = 0
        numbers = torch.arange(VOCAB, dtype=torch.int64)
        self.mix = (numbers * 7919 + 13) % PRIME

    def forward(self, inputs: StepInputs, state: Mapping[str, Tensor]) -> Tensor:
        ids = inputs.token_ids.tolist()
        self.tokens_run += len(ids)
        wanted = set(inputs.logit_rows.tolist())
        logits: dict[int, Tensor] = {}
        for segment in inputs.segments:
            tokens = ids[segment.offset : segment.offset + segment.length]
            if inputs.positions[segment.offset].item() != segment.start:
                raise AssertionError("positions disagree with the segment")
            self._write(tokens, segment, state)
            last = segment.offset + segment.length - 1
            if last in wanted:
                logits[last] = self._logits(segment.end, segment.slot, segment.pages, state)
        if self.fail_on is not None and self.fail_on in ids:
            raise RuntimeError("the toy model was told to fail")
        rows = [logits[i] for i in inputs.logit_rows.tolist()]
        return torch.stack(rows) if rows else torch.empty(0, VOCAB)

    def _write(self, tokens: list[int], segment: Segment, state: Mapping[str, Tensor]) -> None:
        start, slot, pages, saves = segment.start, segment.slot, segment.pages, dict(segment.saves)
        positions = torch.arange(start, start + len(tokens))
        where = torch.tensor(pages)[positions // PAGE_TOKENS]
        values = torch.tensor(tokens, dtype=torch.float32)
        state["latent"][0, where, positions % PAGE_TOKENS] = torch.stack([values, values * 3 + 1], dim=1)
        if not self.rings:
            return
        rolling = int(state["hash"][0, slot, 0, 0])
        recent = [int(value) for value in state["recent"][0, slot, :, 0].tolist()]  # as tensors: slow
        for position, token in enumerate(tokens, start):
            recent[position % 8] = token
            rolling = (rolling * 31 + token + 1) % PRIME
            if position % 4 == 3:  # a closed window: the last four tokens, which only the ring knows
                window = sum(recent[(position - i) % 8] * (i + 1) for i in range(4))
                state["pairs"][0, pages[position // PAGE_TOKENS], position % PAGE_TOKENS // 4, 0] = window
            if position + 1 in saves:
                self._keep(recent, rolling, saves.pop(position + 1), state)
        if saves:
            raise AssertionError(f"{saves} are not inside the segment")
        self._keep(recent, rolling, slot, state)

    def _keep(self, recent: list[int], rolling: int, ring: int, state: Mapping[str, Tensor]) -> None:
        state["recent"][0, ring, :, 0] = torch.tensor(recent, dtype=torch.float32)
        state["hash"][0, ring, 0, 0] = rolling

    def _logits(self, end: int, slot: int, pages: tuple[int, ...], state: Mapping[str, Tensor]) -> Tensor:
        positions = torch.arange(end)
        table = torch.tensor(pages)
        rows = state["latent"][0, table[positions // PAGE_TOKENS], positions % PAGE_TOKENS].double()
        weight = (positions % 13 + 1).double()
        total = int((rows[:, 0] * weight + rows[:, 1]).sum())
        if self.rings:
            closed = torch.arange(end // 4) * 4
            pairs = state["pairs"][0, table[closed // PAGE_TOKENS], closed % PAGE_TOKENS // 4, 0].double()
            total += int((pairs * (closed // 4 % 5 + 1)).sum())
            total += int((state["recent"][0, slot, :, 0].double() * torch.arange(1, 9)).sum())
            total += int(state["hash"][0, slot, 0, 0])
        return ((self.mix * (total % PRIME + 1)) % 1009).float() / 100


class ToyDevice:
    """The same as a device's runner launches it. ``rows_at``: (slot, position) of every row that was launched."""

    def __init__(self, toy: ToyModel):
        self.toy = toy
        self.rows_at: list[tuple[int, int]] = []

    def rows(self, token_ids: Tensor, where: Rows, state: Mapping[str, Tensor]) -> Tensor:
        logits = torch.full((len(token_ids), VOCAB), float("nan"))
        places = zip(token_ids.tolist(), where.positions.tolist(), where.slots.tolist(), strict=True)
        for row, (token, position, slot) in enumerate(places):
            if position >= 0:
                self.rows_at.append((slot, position))
                logits[row] = self._run(
                    [token], Segment(slot, position, 1, 0, tuple(where.tables[row].tolist())), state
                )
        return logits

    def chunk(
        self,
        token_ids: Tensor,
        where: Chunk,
        state: Mapping[str, Tensor],
        last: bool | Tensor,
        saves: Sequence[tuple[int, int, int]] = (),
    ) -> Tensor:
        start, count, slot, _ = where.meta.tolist()
        kept = tuple((position, ring) for position, ring, _ in saves)
        segment = Segment(slot, start, count, 0, tuple(where.table.tolist()), kept)
        return self._run(token_ids[:count].tolist(), segment, state)[None]

    def chunk_layers(self, *given: Any) -> Generator[None, None, Tensor]:
        for _ in range(3):
            yield
        return self.chunk(*given)

    def keep(self, slot: int, ring: int, state: Mapping[str, Tensor]) -> None:
        for name in ("recent", "hash") if self.toy.rings else ():
            state[name][:, ring] = state[name][:, slot]

    def _run(self, tokens: list[int], segment: Segment, state: Mapping[str, Tensor]) -> Tensor:
        self.toy.tokens_run += len(tokens)
        self.toy._write(tokens, segment, state)
        if self.toy.fail_on is not None and self.toy.fail_on in tokens:
            raise RuntimeError("the toy model was told to fail")
        return self.toy._logits(segment.end, segment.slot, segment.pages, state)


def toy_engine(
    groups: tuple[StateGroup, ...] = RING_GROUPS,
    *,
    num_pages: int = 16,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 512,
    max_model_len: int = 4096,
    num_snapshots: int = 8,
    model: ToyModel | None = None,
    root: bytes = b"toy",
    interval: int = 1024,
    host_cache_size: int = 0,
    disk: Disk | None = None,
    slo: Slo | None = None,
    device: bool = False,
) -> LocalEngine:
    """A LocalEngine over the toy model and the real cache; no tokenizer, so no structured output. ``device``: with the
    runner of a device, whose launches are done at once.
    """
    store = StateTensors(groups, num_pages, max_num_seqs, num_snapshots, torch.float32)
    cache = KVCache(groups, root, num_pages, max_num_seqs, num_snapshots, store)
    info = EngineInfo(
        model="toy",
        max_model_len=max_model_len,
        max_request_tokens=min(max_model_len, num_pages * PAGE_TOKENS),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        vocab=VOCAB,
        eos_id=EOS,
        page_tokens=PAGE_TOKENS,
        num_pages=num_pages,
        predicted_bytes=store.nbytes,
        allocated_bytes=store.nbytes,
    )
    tiers = None
    if disk is not None or host_cache_size:
        tiers = Tiers(cache, store, HostArena(store.page_bytes, store.ring_bytes, host_cache_size), disk, interval)
    scheduler = Scheduler(
        cache,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        snapshot_interval=interval,
        tiers=tiers,
        slo=slo,
    )
    toy = model or ToyModel(groups)
    runner: Runner | DeviceRunner = Runner(toy, store.views)
    if device:
        limits = Limits(max_num_seqs, max_num_batched_tokens, info.max_request_tokens, VOCAB)
        place = torch.device("cpu")
        runner = DeviceRunner(ToyDevice(toy), store.views, limits, slots=max_num_seqs, device=place, graphs=False)
    draws = random.Random(0)
    return LocalEngine(Core(info, runner, cache, scheduler, groups, store.views, None, interval, draws, tiers))
