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


@triton.jit
def begin(PDL: tl.constexpr):
    """The next kernel may be scheduled from now on, where there is room for it."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def ready(PDL: tl.constexpr):
    """Everything launched before this kernel is finished, and its results are there."""
    if PDL:
        gdc_wait()


def overlap() -> dict[str, bool]:
    """Launch arguments of such a kernel, which has a constexpr ``PDL``."""
    on = OVERLAP["on"] and not INTERPRETED
    return {"PDL": True, "launch_pdl": True} if on else {"PDL": False}
