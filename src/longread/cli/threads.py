"""How torch's threads wait for one another."""

import os


def bound_spinning() -> None:
    """Let OpenMP's threads spin only briefly at a barrier before they sleep; to be called before torch is loaded.

    GNU OpenMP spins 300,000 times by default: on two cores that something else uses too, the spinning thread burns the
    core that the awaited one needs, and a step takes ten times as long. Not spinning at all (OMP_WAIT_POLICY=PASSIVE)
    costs a system call at every barrier and makes a tiny model's step three times slower on an idle machine. 10,000
    is within noise of the default on an idle machine and near PASSIVE on a busy one (figures in LOG.md). Whoever sets
    either variable keeps it.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
