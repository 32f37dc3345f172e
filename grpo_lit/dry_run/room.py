"""The memory that a rank may take, and who says so."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

GIB = 2.0**30


@dataclass(frozen=True)
class Room:
    """Memory of a rank.

    Attributes:
        bytes: How much.
        said_by: Where the number comes from.
        on_device: Whether it is a device's, beside which the machine has its own.
    """

    bytes: float
    said_by: str
    on_device: bool


def room_of_a_rank(asked_gib: float | None, ranks_here: int) -> Room:
    """Return what each rank of a machine may take.

    Args:
        asked_gib: The user's own number.
        ranks_here: Ranks that share the machine's memory.
    """
    if asked_gib is not None:
        return Room(asked_gib * GIB, "--memory-gib", on_device=torch.cuda.is_available())
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        return Room(float(device.total_memory), f"all of a {device.name}", on_device=True)
    physical, limit = float(psutil.virtual_memory().total), control_group_limit()
    total, owner = physical, "this machine's"
    if limit is not None and limit < physical:
        total, owner = limit, "its control group's"
    share = "" if ranks_here == 1 else f" shared by the {ranks_here} ranks of a machine"
    return Room(total / ranks_here, f"{owner} {total / GIB:.2f} GiB{share}", on_device=False)


def control_group_limit(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float | None:
    """Return the least memory limit of the control groups that this process is in, ``None`` where there is none.

    A container's limit is such a one: the machine's memory, which it also sees, is not what it may take. Linux ends a
    process that goes beyond.

    Args:
        root: Where control groups are mounted, version 2 at once or version 1 by controller.
        own: The file that names this process's groups.
    """
    limits = [float(text) for text in _limits(root, own) if text.isdigit()]  # version 2 writes "max" for none
    return min(limits, default=None)


def _limits(root: Path, own: Path) -> Iterator[str]:
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        base, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        group = base / path.lstrip("/")
        # A group is bound by those above it too. Inside a container the path may be one of the machine's.
        for folder in (group, *group.parents):
            if (file := folder / name).is_file():
                yield file.read_text().strip()
            if folder == base:
                break
