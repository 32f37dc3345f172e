"""A checkpoint is there whole or not at all; tests/runs/test_killed.py kills real runs."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy

from grpo_lit.errors import ConfigError
from grpo_lit.strategies.saving import (
    METADATA,
    AtomicCheckpointIO,
    begin,
    finish,
    is_sharded,
    link,
    put_in_place,
    save_atomically,
    unfinished,
)


def folder(path: Path, content: str) -> None:
    path.mkdir()
    (path / METADATA).write_text(content)


def entries(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def test_a_write_that_ends_early_leaves_the_previous_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    io, target, write = AtomicCheckpointIO(), tmp_path / "deep" / "x.ckpt", torch.save
    io.save_checkpoint({"step": 1}, target)

    def half(content: Any, file: Any) -> None:
        file.write(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match="no space"):
        io.save_checkpoint({"step": 2}, target)
    assert io.load_checkpoint(target) == {"step": 1}
    monkeypatch.setattr(torch, "save", write)
    io.save_checkpoint({"step": 3}, target)
    assert io.load_checkpoint(target) == {"step": 3}
    assert entries(target.parent) == ["x.ckpt"]


@pytest.mark.parametrize("before", ["nothing", "file", "folder", "link"])
def test_a_folder_replaces_whatever_had_its_name(tmp_path: Path, before: str) -> None:
    target = tmp_path / "x.ckpt"
    if before == "file":
        target.write_text("old")
    elif before == "folder":
        folder(target, "old")
    elif before == "link":
        link(tmp_path / "elsewhere", target)
    folder(begin(target), "new")
    put_in_place(target)
    assert (target / METADATA).read_text() == "new"
    assert entries(tmp_path) == ["x.ckpt"]


def test_a_folder_is_put_in_place_though_the_process_ended_between_the_moves(tmp_path: Path) -> None:
    target = tmp_path / "x.ckpt"
    folder(target, "old")
    folder(begin(target), "new")
    target.rename(target.with_name(".x.ckpt.replaced"))  # killed here
    assert not is_sharded(target)
    finish(target)
    finish(target)  # another rank, later
    assert (target / METADATA).read_text() == "new"
    begin(target)
    assert entries(tmp_path) == ["x.ckpt"]


def test_half_a_folder_is_never_taken_for_one(tmp_path: Path) -> None:
    target = tmp_path / "x.ckpt"
    folder(begin(target), "half")
    finish(target)
    assert not target.exists()
    with pytest.raises(FileNotFoundError):
        AtomicCheckpointIO().load_checkpoint(target)
    # Nor what is left of one that was being removed.
    folder(target, "whole")
    AtomicCheckpointIO().remove_checkpoint(target)
    assert entries(tmp_path) == []


def test_a_link_moves_from_one_checkpoint_to_the_next(tmp_path: Path) -> None:
    last = tmp_path / "last.ckpt"
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
        link(tmp_path / name, last)
        assert last.is_symlink()
        assert last.read_text() == name
    folder(tmp_path / "c", "c")
    link(tmp_path / "c", last)
    assert is_sharded(last)
    assert str(last.readlink()) == "c"  # the folder may be moved
    assert not unfinished(last).exists()


def test_what_the_user_chose_stays() -> None:
    plain, chosen = SingleDeviceStrategy("cpu"), SingleDeviceStrategy("cpu", checkpoint_io=Mock(spec=AsyncCheckpointIO))
    save_atomically(plain)
    save_atomically(chosen)
    assert isinstance(plain.checkpoint_io, AtomicCheckpointIO)
    assert not isinstance(chosen.checkpoint_io, TorchCheckpointIO)


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.ckpt").mkdir()
    with pytest.raises(ConfigError, match=r"ckpt_path.*folder of shards.*DeepSpeed"):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "x.ckpt")
