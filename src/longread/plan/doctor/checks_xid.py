"""What the driver's error codes in the kernel log mean for serving.

Codes, meanings and actions: NVIDIA, "Analyzing Xid Errors with the Xid Catalog" and the Xid descriptions; in words of
our own. Pure: facts in, findings out.
"""

from collections.abc import Iterator

from longread.plan.doctor.facts import Facts, Xid
from longread.plan.doctor.finding import Finding, Severity

SOURCE = "NVIDIA Xid catalogue"
RESTART = "restart the server; if it comes back, run it under compute-sanitizer or with CUDA_LAUNCH_BLOCKING=1"
RESET = (
    "unless that was done since: drain the node, reset the GPU (`sudo nvidia-smi -i N -r`) or reboot, then "
    "`dcgmi diag -r 3`"
)
CODES: dict[int, tuple[Severity, str, str]] = {
    13: ("warning", "a kernel made an illegal access or instruction (graphics engine exception)", RESTART),
    31: ("warning", "a kernel accessed memory that is not mapped (GPU memory page fault)", RESTART),
    32: ("warning", "the command stream was corrupted (often PCIe quality)", RESET),
    38: ("warning", "a driver firmware error", "update the driver; reset the GPU"),
    43: ("warning", "the GPU stopped one program's work after a fault of that program", RESTART),
    45: ("note", "a program's work was ended from outside; look for the error before it", ""),
    48: ("error", "a double-bit memory error that cannot be corrected", RESET),
    61: ("error", "an internal micro-controller stopped", RESET),
    62: ("error", "an internal micro-controller halted", RESET),
    63: ("warning", "a row of memory was marked for remapping; a reset makes it effective", RESET),
    64: ("error", "a row of memory could not be remapped", RESET + "; the card may qualify for replacement"),
    74: (
        "error",
        "an NVLink error",
        "`nvidia-smi nvlink -s` and `-e`; reset the GPUs together, then check the baseboard",
    ),
    79: (
        "error",
        "the GPU has fallen off the bus",
        "reboot (power cycle); check power, PCIe seating and the BMC's log",
    ),
    92: ("note", "a high rate of single-bit errors that were corrected", "watch `nvidia-smi -q -d ECC,ROW_REMAPPER`"),
    94: ("warning", "a contained memory error: only the program that used the memory was stopped", RESTART),
    95: ("error", "an uncontained memory error: every program on the GPU may be affected", RESET),
    109: ("warning", "a context switch timed out", RESTART),
    119: ("error", "the GPU's system processor (GSP) does not answer the driver", RESET + "; update the driver"),
    120: ("error", "the GPU's system processor (GSP) failed", RESET + "; update the driver"),
    137: (
        "warning",
        "an NVLink fault in a peer's access, usually after another error",
        "look for the first Xid of that time",
    ),
    140: ("error", "an unrecovered memory error", RESET),
    143: ("error", "the GPU could not be initialised", RESET),
    154: ("error", "the driver asks for a recovery action, which the line names", RESET),
}
NVLINK_5 = range(144, 151)  # of Blackwell: each a unit of the link


def check_xids(facts: Facts) -> Iterator[Finding]:
    """One finding a code and device, with how often and when last."""
    if facts.xids is None:
        return
    gpus = {gpu.bus.rpartition(".")[0]: gpu.index for gpu in facts.gpus or () if gpu.bus}
    groups: dict[tuple[bool, int, str], list[Xid]] = {}
    for xid in facts.xids:
        groups.setdefault((xid.switch, xid.code, xid.bus), []).append(xid)
    for (switch, code, bus), found in groups.items():
        times = f"{len(found)} times, last" if len(found) > 1 else "once,"
        evidence = f"{times} {found[-1].when or 'without a time'}: {found[-1].text or 'no text'} (PCI {bus})"
        if switch:
            fatal = "severity 1" in found[-1].text.lower() or " fatal" in f" {found[-1].text.lower()}"
            severity: Severity = "error" if fatal else "warning"
            statement, remedy = (
                "an NVSwitch reported an error",
                "journalctl -u nvidia-fabricmanager; Fabric Manager guide",
            )
            yield Finding(severity, f"SXid {code}", statement, evidence, remedy, "NVIDIA Fabric Manager user guide")
            continue
        severity, meaning, remedy = CODES.get(
            code,
            ("error", "an NVLink 5 error", CODES[74][2])
            if code in NVLINK_5
            else ("note", "a driver error that this version does not know", "look the code up in the Xid catalogue"),
        )
        index = gpus.get(bus)
        where = f"GPU {index} " if index is not None else ""
        yield Finding(severity, f"{where}Xid {code}", meaning, evidence, remedy, SOURCE)
    if facts.gpus and not facts.xids:
        yield Finding("ok", "Xid", "the kernel log holds no driver error")
