"""What requests and sessions share: one loaded model with its cache, schedule and limits.

Knows the parts; decides nothing.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from longread.engine.device_runner import DeviceRunner
from longread.engine.runner import Runner
from longread.engine.sampling_state import SamplingState
from longread.engine.scheduler import Scheduler
from longread.kv.cache import KVCache
from longread.kv.disk.store import DiskStore
from longread.kv.tiers import Tiers
from longread.spec.cost import CostModel, StepCost
from longread.spec.engine import EngineInfo, SamplingParams
from longread.spec.errors import InvalidRequestError
from longread.spec.state import StateGroup

if TYPE_CHECKING:
    from longread.engine.grammar import GrammarCompiler, GrammarState


@dataclass(frozen=True, slots=True)
class Core:
    """``state``: the storage of ``groups`` by name (spec/state.py), which ``cache`` keeps the books of and ``runner``'s
    model reads and writes. ``grammars`` None: the checkpoint has no tokenizer.json, so no structured output.
    ``draws`` makes the seeds of requests that bring none. ``tiers``: what lies below the device, None: nothing.
    ``store``: the disk among them. ``costs`` learns what steps take.
    """

    info: EngineInfo
    runner: Runner | DeviceRunner
    cache: KVCache
    scheduler: Scheduler
    groups: tuple[StateGroup, ...]
    state: Mapping[str, Tensor]
    grammars: "GrammarCompiler | None"
    snapshot_interval: int
    draws: random.Random
    tiers: Tiers | None = None
    store: DiskStore | None = None
    costs: CostModel = field(default_factory=lambda: CostModel(StepCost()))

    def sampling(self, params: SamplingParams, prompt: Sequence[int]) -> SamplingState:
        """Fresh sampling state for one output behind ``prompt``. Raises InvalidRequestError (the grammar).

        On the engine's thread: a missing seed is the next one of the engine's own draws.
        """
        grammar: GrammarState | None = None
        if params.grammar is not None:
            grammar = self._compiler().start(params.grammar, params.grammar_after)
        seed = self.draws.getrandbits(64) if params.seed is None else params.seed
        return SamplingState(params, prompt, self.info.eos_id, seed, grammar)

    def prepare_grammar(self, params: SamplingParams) -> None:
        """Compile the grammar unless it is, from any thread. Raises InvalidRequestError."""
        if params.grammar is not None:
            self._compiler().prepare(params.grammar)

    def _compiler(self) -> "GrammarCompiler":
        if self.grammars is None:
            raise InvalidRequestError(
                "structured output needs the checkpoint's tokenizer.json", param="response_format"
            )
        return self.grammars
