"""What is no checkpoint, or no longer a whole one, is refused in a line that names the key and what is wrong."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from grpo_lit.errors import ConfigError
from grpo_lit.strategies.checkpoint_io import AtomicCheckpointIO
from grpo_lit.strategies.reading import inspect, read_whole
from grpo_lit.strategies.saving import METADATA

OURS = {"grpo_lit": {"format": 1}, "pytorch-lightning_version": "2.6.6", "global_step": 3}
WEIGHT = torch.arange(6.0).reshape(2, 3)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A checkpoint in one file."""
    torch.save({**OURS, "state_dict": {"w": WEIGHT}}, tmp_path / "x.ckpt")
    return tmp_path / "x.ckpt"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint in shards, as FSDP2 writes it."""
    path = tmp_path / "shards.ckpt"
    dcp.save({"state_dict": {"w": WEIGHT}}, checkpoint_id=path, no_dist=True)
    torch.save(dict(OURS), path / METADATA)
    return path


def cut(path: Path, share: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])


def foreign(path: Path, **more: Any) -> None:
    torch.save({"state_dict": {"w": WEIGHT}, **more}, path)


def _remove(path: Path) -> None:
    for shard in path.glob("*.distcp"):
        shard.unlink()


def _empty(path: Path) -> None:
    for part in [*path.iterdir()]:
        part.unlink()


def _link(path: Path) -> None:
    path.unlink()
    path.symlink_to("step=9.ckpt")


FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "random bytes": (lambda path: path.write_bytes(bytes(range(256)) * 40), "cannot be read"),
    "an empty file": (lambda path: path.write_bytes(b""), "cannot be read"),
    "the first half": (lambda path: cut(path, 0.5), "cannot be read: PytorchStreamReader failed"),
    "without its end": (lambda path: cut(path, 0.99), "cannot be read: PytorchStreamReader failed"),
    "another module": (lambda path: foreign(path, **{"pytorch-lightning_version": "2"}), "another module of Lightning"),
    "something else": (foreign, "a file of something else"),
    "a tensor": (lambda path: torch.save(WEIGHT, path), "a file of something else"),
    "an own class": (lambda path: torch.save({**OURS, "callbacks": Path("x")}, path), "Unsupported global"),
    "nothing": (lambda path: path.unlink(), "where nothing is"),
    "a link to nothing": (_link, r"a link to step=9\.ckpt, which is gone"),
}
FOLDERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "an empty folder": (_empty, f"a folder without {METADATA}"),
    "shards without the rest": (lambda path: (path / METADATA).unlink(), "a checkpoint that is not complete"),
    "half of the rest": (lambda path: cut(path / METADATA, 0.5), "cannot be read: PytorchStreamReader failed"),
    "no table": (lambda path: (path / ".metadata").unlink(), r"cannot be read: .*\.metadata"),
    "half a table": (lambda path: cut(path / ".metadata", 0.5), "cannot be read"),
    "a shard missing": (_remove, r"__0_0\.distcp is missing"),
    "half a shard": (lambda path: cut(next(path.glob("*.distcp")), 0.5), r"__0_0\.distcp ends after \d+ of \d+ bytes"),
    "DeepSpeed's": (lambda path: (_empty(path), (path / "checkpoint").mkdir()), "DeepSpeed"),
}


@pytest.mark.parametrize(
    ("kind", "damage"), [*(("file", name) for name in FILES), *(("folder", name) for name in FOLDERS)]
)
def test_what_is_broken_is_told_in_a_line(kind: str, damage: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(kind)
    change, said = {**FILES, **FOLDERS}[damage]
    change(path)
    for read in (inspect, AtomicCheckpointIO().load_checkpoint):
        with pytest.raises(ConfigError, match=rf"^`ckpt_path` expected[^\n]*{said}[^\n]*$") as refused:
            read(path)
        assert path.name in str(refused.value)
    with pytest.raises(ConfigError, match=r"^`checkpoint` expected"):
        inspect(path, "checkpoint")


def test_a_whole_one_is_looked_at_without_reading_it(file: Path, folder: Path) -> None:
    assert inspect(file)["global_step"] == inspect(folder)["global_step"] == 3
    assert torch.equal(inspect(file)["state_dict"]["w"], WEIGHT)
    (name, shard), = inspect(folder)["state_dict"].items()  # fmt: skip
    assert (name, shard.shape, shard.device.type) == ("w", WEIGHT.shape, "meta")
    assert torch.equal(read_whole(folder)["state_dict"]["w"], WEIGHT)


def test_what_lies_beside_a_wrong_name_is_named(file: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"where nothing is\. There are: shards\.ckpt, x\.ckpt"):
        inspect(file.with_name("y.ckpt"))
    with pytest.raises(ConfigError, match=rf"a folder without {METADATA}\. There are: shards\.ckpt, x\.ckpt"):
        inspect(file.parent)


def test_classes_are_unpickled_where_the_user_asks_for_it(file: Path) -> None:
    torch.save({**OURS, "callbacks": Path("x")}, file)
    assert inspect(file, weights_only=False)["callbacks"] == Path("x")
