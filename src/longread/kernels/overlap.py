# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Programmatic dependent launch: a decode kernel may start while the one before it ends.

A kernel that is launched with ``overlap()`` calls ``begin`` first, may then ask for what never changes (weights), and
calls ``ready`` before it touches anything that another kernel writes or reads, its own outputs included: only then is
everything before it finished and visible. A kernel without ``ready`` must not be launched so. Source: CUDA C++
Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED: bool = triton.knobs.runtime.interpret
OVERLAP: dict[str, bool] = {"on": not INTERPRETED}
# Tokens up to which starting early pays. More make kernels of many programs, whose last still need the room that the
# next kernel's first would wait in: the products of a V4 layer took 105 us instead of 98 for 32 tokens (H200).
MOST = 8
# When the next kernel may be scheduled, the ``PDL`` of a kernel: from its start, from behind its wait, or as it ends.
FIRST, WAITED, LAST = 1, 2, 3
PLACE = WAITED


@triton.jit
def begin(PDL: tl.constexpr):
    """The kernel has started."""
    if PDL == 1:
        gdc_launch_dependents()


@triton.jit
def ready(PDL: tl.constexpr):
    """Everything launched before this kernel is finished, and its results are there."""
    if PDL:
        gdc_wait()
    if PDL == 2:
        gdc_launch_dependents()


def overlap(tokens: int = 1, early: bool = True) -> dict[str, int]:
    """Launch arguments of such a kernel, which has a constexpr ``PDL``.

    early: whether the next one may start before this one ends; not where all its programs do not fit on the card at
    once, or where they run for long: what starts early would hold room that they need.
    """
    if not OVERLAP["on"] or INTERPRETED or tokens > MOST:
        return {"PDL": 0}
    return {"PDL": PLACE if early else LAST, "launch_pdl": True}
