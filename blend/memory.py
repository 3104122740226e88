"""How much memory a device has to spare."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import torch

_V2 = ("memory.max", "memory.current", ("active_file", "inactive_file"))
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))
"""Files of a control group that hold its limit and what it uses, and the lines of ``memory.stat`` for what of that the
kernel takes back when it is wanted (Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst)."""


def available(
    device: torch.device, *, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Return the bytes that can be allocated on ``device`` now; ``None`` where that is not known.

    On CUDA what is free and what torch holds in reserve; on a CPU with Linux what the kernel takes for available,
    within the limits of this process's control groups. ``proc`` and ``cgroups`` are where Linux tells of itself.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    known = [room for room in (_of_machine(proc / "meminfo"), *_of_groups(proc, cgroups)) if room is not None]
    return min(known, default=None)


def _of_machine(meminfo: Path) -> int | None:
    kibibytes = _line(meminfo, "MemAvailable:")
    return None if kibibytes is None else kibibytes * 1024


def _of_groups(proc: Path, cgroups: Path) -> list[int | None]:
    """The room in this process's memory group and in each that holds it."""
    found = []
    for line in (_read(proc / "self" / "cgroup") or "").splitlines():
        controllers, path = line.split(":", 2)[1:]
        if not controllers:
            root, files = cgroups, _V2
        elif "memory" in controllers.split(","):
            root, files = cgroups / "memory", _V1
        else:
            continue
        inside = PurePosixPath(path.lstrip("/"))
        # In a container a group's path may be that of the host, and only the root is to be seen.
        found += [_of_group(root / group, files) for group in (inside, *inside.parents)]
    return found


def _of_group(group: Path, files: tuple[str, str, tuple[str, ...]]) -> int | None:
    """The room in one group; ``None`` if it is not there or has no limit."""
    limit, used, reclaimable = files
    most, now = _number(group / limit), _number(group / used)
    if most is None or now is None:
        return None
    return max(0, most - now + sum(_line(group / "memory.stat", name) or 0 for name in reclaimable))


def _number(file: Path) -> int | None:
    text = (_read(file) or "").strip()
    return int(text) if text.isdecimal() else None


def _line(file: Path, name: str) -> int | None:
    """The number behind ``name`` at the beginning of a line."""
    for line in (_read(file) or "").splitlines():
        words = line.split()
        if words[:1] == [name] and words[1].isdecimal():
            return int(words[1])
    return None


def _read(file: Path) -> str | None:
    try:
        return file.read_text()
    except OSError:
        return None
