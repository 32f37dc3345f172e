"""How much a rank may take, and who says so."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from grpo_lit.dry_run import room
from grpo_lit.dry_run.room import GIB, control_group_limit, room_of_a_rank


def groups(folder: Path, lines: str, limits: dict[str, str]) -> tuple[Path, Path]:
    """Write control groups as Linux shows them."""
    (own := folder / "cgroup").write_text(lines)
    for name, text in limits.items():
        (folder / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "fs" / name).write_text(f"{text}\n")
    return folder / "fs", own


@pytest.mark.parametrize(
    ("lines", "limits", "expected"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "4000", "memory.max": "9000"}, 4000),
        ("0::/\n", {"memory.max": "max"}, None),
        # Version 1, in a container that is not shown its own path; "no limit" is a huge number there.
        ("4:memory:/docker/x\n0::/\n", {"memory/memory.limit_in_bytes": "3000"}, 3000),
        ("4:memory:/\n3:cpuset:/\n", {"memory/memory.limit_in_bytes": str(2**63 - 4096)}, 2**63 - 4096),
        ("3:cpuset:/\n", {"memory.max": "1"}, None),
    ],
)
def test_the_least_limit_of_the_groups_above_binds(
    lines: str, limits: dict[str, str], expected: float | None, tmp_path: Path
) -> None:
    assert control_group_limit(*groups(tmp_path, lines, limits)) == expected
    assert control_group_limit(tmp_path / "nowhere", tmp_path / "nothing") is None


def test_who_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=8 * GIB))
    monkeypatch.setattr(room, "control_group_limit", lambda: 2.0**63)
    assert room_of_a_rank(3.0, 2) == room.Room(3 * GIB, "--memory-gib", on_device=False)
    assert room_of_a_rank(None, 1) == room.Room(8 * GIB, "this machine's 8.00 GiB", on_device=False)
    monkeypatch.setattr(room, "control_group_limit", lambda: 2 * GIB)
    said = "its control group's 2.00 GiB shared by the 4 ranks of a machine"
    assert room_of_a_rank(None, 4) == room.Room(GIB / 2, said, on_device=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    card = SimpleNamespace(total_memory=80 * 2**30, name="H100")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    assert room_of_a_rank(None, 4) == room.Room(80 * GIB, "all of a H100", on_device=True)
