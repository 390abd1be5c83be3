"""Driver errors (Xid) and NVSwitch errors (SXid) out of kernel log lines, live or saved.

Knows: how the lines look. Must not know: what a code means.
"""

import os
import re
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

import psutil

from longread.plan.doctor.facts import Xid

# "NVRM: Xid (PCI:0000:3b:00): 79, pid=1896, GPU has fallen off the bus." and, before driver 270, without "PCI:".
LINE = re.compile(r"(?P<kind>S?Xid) \((?:PCI:)?(?P<bus>[0-9a-fA-F:.]+)\): (?P<code>\d+)(?:, ?(?P<text>.*))?")
RECORDS_AT_MOST = 200_000


def parse_xids(lines: Iterable[str]) -> tuple[Xid, ...]:
    """In the order of the lines. What stands before "NVRM" in a line, or before "nvidia-nvswitch", is its time."""
    found = []
    for line in lines:
        match = LINE.search(line)
        if match is not None:
            before = re.split(r"NVRM:|nvidia-nvswitch\d*:", line[: match.start()])[0].strip()
            found.append(
                Xid(
                    code=int(match["code"]),
                    bus=match["bus"].lower(),
                    text=(match["text"] or "").strip(),
                    when=before.removesuffix("kernel:").strip(),
                    switch=match["kind"] == "SXid",
                )
            )
    return tuple(found)


def read_kernel_log(device: Path = Path("/dev/kmsg")) -> tuple[tuple[Xid, ...] | None, str]:
    """What the kernel's ring buffer still holds, or None and why not. Reading it takes nothing out of it."""
    try:
        handle = os.open(device, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        return None, f"{device}: {error.strerror}; try `sudo dmesg | grep -i xid`, or pass the log with --from"
    lines: list[str] = []
    try:
        for _ in range(RECORDS_AT_MOST):
            try:
                record = os.read(handle, 8192)
            except BlockingIOError:
                break  # the newest has been read
            except BrokenPipeError:
                continue  # overwritten while we read; the next read gives the oldest that is left
            if not record:
                break
            if b"Xid" in record:
                lines.append(_readable(record.decode("utf-8", "replace")))
    except OSError as error:
        return None, f"{device}: {error.strerror}; try `sudo dmesg | grep -i xid`, or pass the log with --from"
    finally:
        os.close(handle)
    return parse_xids(lines), ""


def _readable(record: str) -> str:
    """``"4,1201,90000000,-;NVRM: ..."`` with its time since boot (microseconds) as a date."""
    head, _, message = record.partition(";")
    fields = head.split(",")
    if len(fields) < 3 or not fields[2].isdigit():
        return message
    when = datetime.fromtimestamp(psutil.boot_time() + int(fields[2]) / 1e6)
    return f"{when.isoformat(' ', 'seconds')} {message}"
