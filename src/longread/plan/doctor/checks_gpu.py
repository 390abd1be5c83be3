"""Is each GPU healthy and allowed to run at full speed: clocks, heat, power, memory errors, modes.

Pure: facts in, findings out. A field that is None is never judged.
"""

from collections.abc import Iterator

from longread.plan.doctor.facts import THIS_MACHINE, Facts, GpuFacts
from longread.plan.doctor.finding import Finding, Severity
from longread.plan.doctor.merging import over_gpus
from longread.plan.doctor.nvml import HANGS

BUSY = 20  # percent of the time with a kernel running: from here on clocks and links count as under load
SMALL_MARGIN = 5  # degrees to the slowdown temperature
SMALL_MARGIN_IDLE = 15
SLOW_CLOCK = 0.9  # of the maximum
LONG_VIOLATION = 60e9  # nanoseconds
NVML_H = "nvml.h, nvmlClocksEventReasons"
MEMORY_ERRORS = "NVIDIA GPU Memory Error Management"

# What holds a clock down: severity, what it means, what to do. GpuIdle is no reason to worry and is not here.
REASONS: dict[str, tuple[Severity, str, str]] = {
    "HwThermalSlowdown": (
        "error",
        "too hot: the hardware has cut the clocks by half or more",
        "check fans, air flow and liquid cooling; watch `nvidia-smi -i {gpus} -q -d TEMPERATURE,PERFORMANCE`",
    ),
    "HwPowerBrakeSlowdown": (
        "error",
        "an external power brake signal has cut the clocks by half or more",
        "check the power supplies and the rack's power limit (BMC event log)",
    ),
    "HwSlowdown": (
        "error",
        "the hardware has cut the clocks by half or more",
        "check cooling and power: `nvidia-smi -i {gpus} -q -d PERFORMANCE,TEMPERATURE,POWER` says which",
    ),
    "SwThermalSlowdown": (
        "warning",
        "warm: the driver lowers the clocks to stay below the temperature limit",
        "check cooling; watch `nvidia-smi -i {gpus} -q -d TEMPERATURE,PERFORMANCE` under load",
    ),
    "SyncBoost": (
        "warning",
        "the clocks are tied to those of the slowest GPU in a sync boost group",
        "remove the group with dcgmi, unless it is meant",
    ),
    "ApplicationsClocksSetting": (
        "warning",
        "somebody has set or locked the clocks below the maximum",
        "`sudo nvidia-smi -i {gpus} -rac` and `sudo nvidia-smi -i {gpus} -rgc` undo it",
    ),
}


def check_gpus(facts: Facts) -> Iterator[Finding]:
    yield from _presence(facts)
    gpus = facts.gpus or ()
    reachable = [gpu for gpu in gpus if "device" not in gpu.unread]
    yield from over_gpus(gpus, _reachable)
    for check in (_clocks, _heat, _power, _errors, _modes):
        yield from over_gpus(reachable, check)
    yield from _alike(reachable)


def _presence(facts: Facts) -> Iterator[Finding]:
    built_for = facts.versions.torch_cuda if facts.versions else None
    if facts.gpus is None and facts.unread.get("gpus", "").startswith(HANGS):
        yield Finding(
            "error",
            "NVIDIA driver",
            "the driver hangs: programs that use a GPU will wait for ever",
            facts.unread["gpus"],
            "`sudo dmesg | grep -iE 'xid|nvrm'`; a GPU is lost or its system processor is stuck: drain and reboot",
        )
    elif facts.gpus is None and facts.origin != THIS_MACHINE and "gpus" not in facts.unread:
        if facts.live is not None and facts.origin == facts.live.url:  # nobody asked for more than the server
            return
        yield Finding(
            "note",
            "GPUs",
            "nothing here tells about GPUs, so they are not judged",
            remedy="on that machine: `nvidia-smi -q -x > gpus.xml`, then add it to --from",
        )
    elif facts.gpus is None:
        yield Finding(
            "warning" if built_for else "note",
            "NVIDIA driver",
            "torch is built for CUDA and no driver answers: models would run on the CPU"
            if built_for
            else "no NVIDIA driver answers here: GPU facts are not available",
            facts.unread.get("gpus", ""),
            "on a GPU machine: `nvidia-smi`; in a container start it with `--gpus all` (NVIDIA Container Toolkit)",
        )
    elif not facts.gpus:
        yield Finding(
            "warning",
            "GPUs",
            "the driver answers and shows no GPU",
            "0 devices",
            "`lspci | grep -i nvidia`; in a container: NVIDIA_VISIBLE_DEVICES and `--gpus all`",
        )
    else:
        names = sorted({gpu.name or "unknown" for gpu in facts.gpus})
        yield Finding("ok", "GPUs", f"{len(facts.gpus)} found: {', '.join(names)}")


def _reachable(gpu: GpuFacts) -> Iterator[Finding]:
    if "device" in gpu.unread:
        yield Finding(
            "error",
            "access",
            "the driver knows this GPU and cannot reach it",
            gpu.unread["device"],
            "`sudo dmesg | grep -i xid`; drain the node, then reset the GPU or reboot",
            "nvml.h, NVML_ERROR_GPU_IS_LOST",
        )
    elif gpu.recovery_action not in (None, "none"):
        yield Finding(
            "error",
            "recovery",
            f"the driver asks for this before the GPU is used again: {gpu.recovery_action}",
            f"recovery action: {gpu.recovery_action}",
            "drain the node first; `nvidia-smi -i {gpus} -q` shows the action, `sudo nvidia-smi -i {gpus} -r` resets",
            "Xid 154, NVIDIA Xid catalogue",
        )


def busy(gpu: GpuFacts) -> bool:
    return gpu.utilization is not None and gpu.utilization >= BUSY


def _clocks(gpu: GpuFacts) -> Iterator[Finding]:
    found = [*_held_down(gpu), *_slow_memory(gpu), *_violations(gpu)]
    yield from found
    if not found and gpu.event_reasons is not None:
        fine = "nothing holds the clocks down"
        yield Finding("ok", "clocks", fine if busy(gpu) else f"{fine}; idle, so look under load too", _sm_clock(gpu))


def _sm_clock(gpu: GpuFacts) -> str:
    return f"SM clock {gpu.sm_clock} of {gpu.sm_clock_max} MHz" if gpu.sm_clock and gpu.sm_clock_max else ""


def _held_down(gpu: GpuFacts) -> Iterator[Finding]:
    reasons, clock = gpu.event_reasons or frozenset(), _sm_clock(gpu)
    specific = reasons & {"HwThermalSlowdown", "HwPowerBrakeSlowdown"}
    for name, (severity, statement, remedy) in REASONS.items():
        if name in reasons and not (name == "HwSlowdown" and specific):  # the general bit comes with the specific ones
            yield Finding(severity, "clocks", statement, f"{name}; {clock}".rstrip("; "), remedy, NVML_H)
    set_to, default = gpu.sm_clock_application, gpu.sm_clock_application_default
    if set_to is not None and default is not None and set_to < default and "ApplicationsClocksSetting" not in reasons:
        yield Finding(
            "warning",
            "clocks",
            "the application clock is set below its default",
            f"{set_to} MHz, default {default} MHz",
            "`sudo nvidia-smi -i {gpus} -rac`",
            "TensorRT-LLM#3486 (clocks explain missed H200 numbers)",
        )
    unexplained = not reasons & {*REASONS, "SwPowerCap", "GpuIdle"}
    if gpu.sm_clock and gpu.sm_clock_max and busy(gpu) and unexplained and gpu.sm_clock < SLOW_CLOCK * gpu.sm_clock_max:
        yield Finding(
            "warning",
            "clocks",
            "under load the SM clock is below 90 % of the maximum and the driver names no reason",
            f"{clock}, {gpu.utilization} % busy",
            "`nvidia-smi -i {gpus} -q -d CLOCK,PERFORMANCE` while it serves",
        )


def _slow_memory(gpu: GpuFacts) -> Iterator[Finding]:
    if gpu.memory_clock and gpu.memory_clock_max and busy(gpu) and gpu.memory_clock < SLOW_CLOCK * gpu.memory_clock_max:
        yield Finding(
            "warning",
            "memory clock",
            "under load the memory clock is below its maximum: decoding is bound by memory bandwidth",
            f"{gpu.memory_clock} of {gpu.memory_clock_max} MHz, {gpu.utilization} % busy",
            "`sudo nvidia-smi -i {gpus} -rmc` undoes a lock",
        )


def _violations(gpu: GpuFacts) -> Iterator[Finding]:
    for name in ("thermal", "board limit", "reliability"):
        spent = (gpu.violations or {}).get(name, 0)
        if spent > LONG_VIOLATION:
            yield Finding(
                "warning",
                "clocks",
                f"has been slowed for long since the driver was loaded ({name})",
                f"{spent / 1e9:,.0f} s",
                "look at cooling and power under load: `nvidia-smi -i {gpus} -q -d PERFORMANCE`",
                "nvml.h, nvmlDeviceGetViolationStatus",
            )


def _heat(gpu: GpuFacts) -> Iterator[Finding]:
    margin = gpu.margin
    if margin is None and gpu.temperature is not None and gpu.temperature_slowdown is not None:
        margin = gpu.temperature_slowdown - gpu.temperature
    if margin is not None:
        least = SMALL_MARGIN if busy(gpu) else SMALL_MARGIN_IDLE
        evidence = f"{margin} degrees to slowdown" + (
            f", now {gpu.temperature} C" if gpu.temperature is not None else ""
        )
        if margin < least:
            yield Finding(
                "warning",
                "temperature",
                "close to the temperature at which the clocks go down" + ("" if busy(gpu) else ", without load"),
                f"{evidence}; at least {least} wanted",
                "check cooling and the room's temperature; watch `nvidia-smi dmon -i {gpus} -s pct`",
                "nvml.h, nvmlDeviceGetMarginTemperature",
            )
        else:
            yield Finding("ok", "temperature", "far enough from slowdown", evidence)
    memory, limit = gpu.temperature_memory, gpu.temperature_memory_max
    if memory is not None and limit is not None and limit - memory < SMALL_MARGIN:
        yield Finding(
            "warning",
            "memory temperature",
            "the memory is close to its limit",
            f"{memory} of {limit} C",
            "check cooling; watch `nvidia-smi -i {gpus} -q -d TEMPERATURE`",
        )


def _power(gpu: GpuFacts) -> Iterator[Finding]:
    limit, default = gpu.power_limit, gpu.power_limit_default
    if limit is None or default is None:
        return
    if limit < default - 0.5:
        yield Finding(
            "warning",
            "power cap",
            "the power limit is below the card's default: prefill, which is bound by compute, is slower",
            f"{limit:.0f} W, default {default:.0f} W",
            f"`sudo nvidia-smi -i {{gpus}} -pl {default:.0f}`, if power and cooling allow it",
            "TensorRT-LLM#3486 (power cap explains missed H200 numbers)",
        )
    elif "SwPowerCap" in (gpu.event_reasons or ()):
        yield Finding(
            "note",
            "power cap",
            "at its power limit, which is the default: usual under full load, and the clock is what the power allows",
            f"{gpu.power or 0:.0f} of {limit:.0f} W, SM clock {gpu.sm_clock} of {gpu.sm_clock_max} MHz",
            source=NVML_H,
        )
    else:
        yield Finding("ok", "power cap", "not below the card's default", f"{limit:.0f} W")


def _errors(gpu: GpuFacts) -> Iterator[Finding]:
    found = [*_ecc(gpu), *_rows(gpu)]
    yield from found
    if not found and gpu.ecc and gpu.ecc_uncorrected == 0:
        yield Finding("ok", "memory errors", "ECC is on, no uncorrected error since the driver was loaded")


def _ecc(gpu: GpuFacts) -> Iterator[Finding]:
    if gpu.ecc is False:
        yield Finding(
            "warning",
            "ECC",
            "ECC is off: a flipped bit in weights or cache changes answers silently",
            "current mode: disabled",
            "`sudo nvidia-smi -i {gpus} -e 1`, then reset the GPU",
            MEMORY_ERRORS,
        )
    if gpu.ecc is not None and gpu.ecc_pending is not None and gpu.ecc != gpu.ecc_pending:
        yield Finding(
            "note",
            "ECC",
            "the ECC mode changes at the next reset",
            f"now {'on' if gpu.ecc else 'off'}, then {'on' if gpu.ecc_pending else 'off'}",
        )
    if gpu.ecc_uncorrected:
        yield Finding(
            "error",
            "ECC",
            "uncorrectable memory errors since the driver was loaded: a program that used the memory was stopped",
            f"{gpu.ecc_uncorrected} uncorrected errors",
            "drain, `sudo nvidia-smi -i {gpus} -r`, then `dcgmi diag -r 3`; if it comes back, have the card replaced",
            MEMORY_ERRORS,
        )
    elif gpu.ecc_uncorrected_ever:
        yield Finding(
            "note",
            "ECC",
            "had uncorrectable memory errors in its life, none since the driver was loaded",
            f"{gpu.ecc_uncorrected_ever} in all",
            "watch it: `nvidia-smi -i {gpus} -q -d ECC,ROW_REMAPPER`",
            MEMORY_ERRORS,
        )


def _rows(gpu: GpuFacts) -> Iterator[Finding]:
    rows = gpu.rows
    if rows is None:
        return
    counts = f"{rows.correctable or 0} correctable and {rows.uncorrectable or 0} uncorrectable rows remapped"
    look = "`nvidia-smi -i {gpus} -q -d ROW_REMAPPER`"
    if rows.failed:
        yield Finding(
            "error",
            "row remapping",
            "a bad row could not be remapped: the card qualifies for replacement",
            f"remapping failure; {counts}",
            f"take it out of service; {look} for the supplier",
            MEMORY_ERRORS,
        )
    if rows.pending:
        yield Finding(
            "warning",
            "row remapping",
            "a bad row waits for a reset to be remapped",
            f"pending; {counts}",
            "drain, then `sudo nvidia-smi -i {gpus} -r` (or reboot)",
            MEMORY_ERRORS,
        )
    if rows.banks_without_spares:
        yield Finding(
            "warning",
            "row remapping",
            "banks have used up their spare rows: the next bad row there cannot be remapped",
            f"{rows.banks_without_spares} banks; {counts}",
            f"plan for a replacement; {look}",
            MEMORY_ERRORS,
        )
    elif rows.uncorrectable and not rows.failed and not rows.pending:
        yield Finding("note", "row remapping", "rows have been remapped after uncorrectable errors", counts, look)


def _modes(gpu: GpuFacts) -> Iterator[Finding]:
    if gpu.mig:
        yield Finding(
            "warning",
            "MIG",
            "MIG is on: an instance sees a part of the card, and instances have no peer-to-peer for tensor parallelism",
            "MIG mode: enabled",
            "`sudo nvidia-smi -i {gpus} -mig 0` when nothing uses the card, unless it is meant",
            "NVIDIA MIG user guide",
        )
    if gpu.compute_mode == "prohibited":
        yield Finding(
            "error",
            "compute mode",
            "no program may use this GPU",
            "compute mode: prohibited",
            "`sudo nvidia-smi -i {gpus} -c 0`",
        )
    if gpu.persistence is False:
        yield Finding(
            "note",
            "persistence",
            "persistence mode is off: without clients the driver unloads its state, and the next start waits for it",
            "persistence mode: disabled",
            "`sudo systemctl enable --now nvidia-persistenced`",
            "NVIDIA driver persistence guide",
        )
    if gpu.memory_used is not None and gpu.memory_total and gpu.processes == 0:
        share = gpu.memory_used / gpu.memory_total
        if share > 0.05:
            yield Finding(
                "warning",
                "memory",
                "memory is taken and no process shows: another container's, or left by a program that died",
                f"{gpu.memory_used / 2**30:.1f} of {gpu.memory_total / 2**30:.1f} GiB",
                "`nvidia-smi -i {gpus}` on the host; `sudo fuser -v /dev/nvidia*`",
            )
    elif gpu.processes and gpu.memory_used is not None:
        yield Finding(
            "note",
            "memory",
            "in use now: what a new server can have is less",
            f"{gpu.processes} processes, {gpu.memory_used / 2**30:.1f} GiB",
        )


def _alike(gpus: list[GpuFacts]) -> Iterator[Finding]:
    kinds: dict[str, list[int]] = {}
    for gpu in gpus:
        if gpu.name is not None:
            size = f", {gpu.memory_total / 2**30:.0f} GiB" if gpu.memory_total else ""
            kinds.setdefault(f"{gpu.name}{size}", []).append(gpu.index)
    if len(kinds) > 1:
        yield Finding(
            "warning",
            "GPUs",
            "the cards differ: tensor parallelism goes at the pace of the slowest and with the memory of the smallest",
            "; ".join(f"GPU {', '.join(map(str, indices))}: {kind}" for kind, indices in kinds.items()),
            "keep one server on equal cards: CUDA_VISIBLE_DEVICES",
        )
