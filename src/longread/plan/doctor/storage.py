"""Which file system and which kind of device a folder lies on, and what is free there.

Knows: mountinfo and sysfs. Must not know: what it is for. Nothing is written to the disk.
"""

import os
from pathlib import Path

from longread.plan.doctor.facts import Storage, StorageKind

NETWORK = {"nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "beegfs", "9p", "glusterfs", "virtiofs", "afs"}
MEMORY = {"tmpfs", "ramfs", "rootfs"}
OVERLAY = {"overlay", "aufs"}


def read_storage(
    path: Path, mounts: Path = Path("/proc/self/mountinfo"), blocks: Path = Path("/sys/dev/block")
) -> Storage:
    """Of the nearest folder above ``path`` that exists: a store need not be there yet."""
    place = path.expanduser().absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        place = place.resolve()
        room = os.statvfs(place)
    except OSError:
        return Storage(path=str(path))
    device, filesystem, numbers = _mount_of(place, mounts)
    return Storage(
        path=str(path),
        free=room.f_bavail * room.f_frsize,
        total=room.f_blocks * room.f_frsize,
        free_inodes=room.f_favail if room.f_files else None,  # file systems that make inodes as needed say 0
        kind=_kind(filesystem, device, numbers, blocks),
        device=device,
        filesystem=filesystem,
        read_only=bool(room.f_flag & os.ST_RDONLY),
    )


def _mount_of(place: Path, mounts: Path) -> tuple[str | None, str | None, str | None]:
    """Device, file system type and "major:minor" of the deepest mount above ``place``; the last one mounted there."""
    best: tuple[int, str, str, str] | None = None
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None, None, None
    for line in lines:
        left, separator, right = line.partition(" - ")
        fields, after = left.split(), right.split()
        if not separator or len(fields) < 5 or len(after) < 2:
            continue
        point = fields[4].replace("\\040", " ")
        depth = len(Path(point).parts)
        if place.is_relative_to(point) and (best is None or depth >= best[0]):
            best = (depth, after[1], after[0], fields[2])
    return (None, None, None) if best is None else (best[1], best[2], best[3])


def _kind(filesystem: str | None, device: str | None, numbers: str | None, blocks: Path) -> StorageKind:
    if filesystem is None:
        return "unknown"
    if filesystem in MEMORY:
        return "memory"
    if filesystem in OVERLAY:
        return "overlay"
    if filesystem in NETWORK or (filesystem.startswith("fuse.") and not (device or "").startswith("/dev/")):
        return "network"
    try:
        block = (blocks / (numbers or "none")).resolve(strict=True)
    except OSError:
        return "unknown"
    # A partition has no queue of its own; its disk, one folder up, has. A mapped volume shows what lies below it.
    for folder in (block, block.parent):
        rotational = folder / "queue" / "rotational"
        if rotational.exists():
            return _device_kind(folder, rotational)
    return "unknown"


def _device_kind(disk: Path, rotational: Path) -> StorageKind:
    slaves = disk / "slaves"
    below = sorted(entry.name for entry in slaves.iterdir()) if slaves.is_dir() else []
    if all(name.startswith("nvme") for name in below or [disk.name]):
        return "nvme"
    try:
        spins = rotational.read_text(encoding="ascii").strip() == "1"
    except OSError:
        return "unknown"
    if disk.name.startswith("vd") and spins:  # virtio says "rotational" of any host disk: that tells nothing
        return "unknown"
    return "hdd" if spins else "ssd"
