# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Programmatic dependent launch: a decode kernel may start while those before it end.

A kernel that is launched with ``overlap()`` calls ``begin`` first, may then ask for what never changes (weights), and
calls ``ready`` before it touches anything that another kernel writes or reads, its own outputs included: only then is
everything before it finished and visible. Several kernels may be waiting behind one that runs, so what is read before
``ready`` must be constant for the whole step, or be finished by then for certain: the experts' second product reads
their choice, since the first one lets it start behind its own wait only. Every program calls ``ready`` before it
returns: a kernel whose programs had all left without it would be finished before the one ahead of it. A kernel without
``ready`` must not be launched so.

Which kernels do it was measured by whole layers, kernel by kernel; chains of a few said otherwise. Those that gain are
the products (kernels/fp8), the ends of hyper-connections and of attention, the choice of experts, and the experts. With
them a CSA layer of V4 takes 137 us instead of 150 for one token, 305 instead of 316 for eight (H200). The others lost
or gained nothing: a hyper-connection's beginning alone cost 9 us where it came early. Source: CUDA C++ Programming
Guide, "Programmatic Dependent Launch and Synchronization".
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED: bool = triton.knobs.runtime.interpret
# Tokens up to which starting early pays. More make kernels of many programs, whose last still need the room that the
# next kernel's first would wait in: the products of a V4 layer took 92 us instead of 95 for 16 tokens, but 105 instead
# of 98 for 32 (H200).
MOST = 16
WAVE = 132  # programs that all start at once, one on each SM of an H200
# When the next kernel may be scheduled, the ``PDL`` of a kernel: from its start, from behind its wait, or as it ends.
FIRST, WAITED, LAST = 1, 2, 3


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


def overlap(tokens: int = 1, programs: int = 1, late: bool = False) -> dict[str, int]:
    """Launch arguments of such a kernel, which has a constexpr ``PDL``.

    programs: of this kernel. Few let the next kernel in at once, so that its programs settle and ask for their weights
    meanwhile (products of a V4 layer with the small kernels between them: 61 us for a token, 65 from behind the waits);
    of many, the last would find their room taken.
    late: the next one starts as this one ends, where programs run for long or the next one's would slow them down.
    """
    if INTERPRETED or tokens > MOST:
        return {"PDL": 0}
    return {"PDL": LAST if late else FIRST if programs <= WAVE else WAITED, "launch_pdl": True}
