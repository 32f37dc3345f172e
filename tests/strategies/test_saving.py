"""A checkpoint is there whole or not at all; tests/runs/test_killed.py kills real runs."""

import errno
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO, CheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.distributed.checkpoint.api import CheckpointException

from grpo_lit.errors import ConfigError, SaveError
from grpo_lit.strategies.checkpoint_io import AtomicCheckpointIO, in_own_format, save_atomically
from grpo_lit.strategies.saving import (
    METADATA,
    begin,
    check_writable,
    finish,
    is_sharded,
    kept_on_failure,
    link,
    put_in_place,
    sweep,
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
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            raise RuntimeError("unexpected pos 64 vs 0")  # as torch's writer does when it closes

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(SaveError, match=rf"could not be written: {os.strerror(errno.ENOSPC)}; .*--ckpt_path {target}"):
        io.save_checkpoint({"step": 2}, target)
    assert torch.load(target) == {"step": 1}
    assert entries(target.parent) == ["x.ckpt"]  # what was half written takes no room
    monkeypatch.setattr(torch, "save", write)
    io.save_checkpoint({"step": 3}, target)
    assert torch.load(target) == {"step": 3}
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
    with pytest.raises(ConfigError, match="where nothing is"):
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
    own = SingleDeviceStrategy("cpu", checkpoint_io=Mock(spec=CheckpointIO))
    assert [in_own_format(strategy) for strategy in (plain, chosen, own)] == [True, True, False]


def test_a_save_that_fails_between_the_moves_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "x.ckpt"
    folder(target, "old")
    folder(begin(target), "new")
    rename = Path.rename

    def fail(path: Path, to: Path) -> None:
        if path == unfinished(target):
            raise OSError(errno.EIO, "broken")
        rename(path, to)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(SaveError, match="broken"), kept_on_failure(target):
        put_in_place(target)
    assert (target / METADATA).read_text() == "old"
    assert entries(tmp_path) == ["x.ckpt"]


def test_a_failure_of_one_ranks_shard_is_told(tmp_path: Path) -> None:
    failed = CheckpointException("write", {1: (OSError(errno.ENOSPC, "disk full"), None)})
    (tmp_path / ".x.ckpt.unfinished").mkdir()
    with pytest.raises(SaveError, match="disk full; none was written"), kept_on_failure(tmp_path / "x.ckpt", False):
        raise failed
    assert entries(tmp_path) == [".x.ckpt.unfinished"]  # the first rank clears it away


@pytest.mark.parametrize("place", ["a file", "below a file", "full", "not writable"])
def test_a_folder_that_takes_no_checkpoint_is_refused(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    target = {"a file": tmp_path / "file", "below a file": tmp_path / "file/x"}.get(place, tmp_path / "new")
    if place == "full":
        monkeypatch.setattr(shutil, "disk_usage", lambda path: Mock(free=2**30))
    if place == "not writable":  # a read-only folder would not stop the superuser
        read_only = OSError(errno.EROFS, os.strerror(errno.EROFS))
        monkeypatch.setattr(tempfile, "TemporaryFile", Mock(side_effect=read_only))
    said = {"full": "2.0 GiB of weights alone, but .* has 1.0 GiB", "not writable": "Read-only"}.get(place, "a folder")
    with pytest.raises(ConfigError, match=f"^`the.key` expected .*{said}"):
        check_writable(target, "the.key", needed=2**31)


def test_what_killed_processes_left_is_swept(tmp_path: Path) -> None:
    folder(tmp_path / "whole.ckpt", "whole")
    folder(unfinished(tmp_path / "x.ckpt"), "half")
    (tmp_path / ".y.ckpt.unfinished").write_text("half")
    folder(tmp_path / ".z.ckpt.replaced", "old")
    folder(unfinished(tmp_path / "z.ckpt"), "new")  # complete, and killed between the moves
    sweep(tmp_path, idle=60.0)
    assert len(entries(tmp_path)) == 5  # another process may be writing
    sweep(tmp_path)
    assert entries(tmp_path) == ["whole.ckpt", "z.ckpt"]
    assert (tmp_path / "z.ckpt" / METADATA).read_text() == "new"
