"""How torch's threads wait for one another."""

import os


def wait_patiently() -> None:
    """Let OpenMP's threads sleep at a barrier instead of spinning; to be called before torch is loaded.

    Spinning burns the core that the awaited thread needs as soon as anything else runs on the machine: on two busy
    cores a tiny model read 2K tokens in 2 to 30 s instead of 0.3. Child processes inherit it, so both sides of a
    benchmark have it. Whoever has the cores alone may set OMP_WAIT_POLICY=ACTIVE.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
