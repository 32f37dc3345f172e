"""A run says which code it was made with."""

import subprocess
from pathlib import Path

import pytest

from grpo_lit.versions import commit, versions


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=somebody", "-c", "user.email=some@body"]
    done = subprocess.run(["git", "-C", str(folder), *identity, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_checkout_is_told_by_its_commit_and_whether_it_was_changed(tmp_path: Path) -> None:
    assert commit(tmp_path) is None
    git(tmp_path, "init", "--quiet")
    assert commit(tmp_path) is None  # no commit yet
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    git(tmp_path, "tag", "-a", "v1", "-m", "a release")
    assert commit(tmp_path) == git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "file").write_text("two")
    assert commit(tmp_path) == git(tmp_path, "rev-parse", "HEAD") + "-dirty"


def test_without_git_nothing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".git").touch()
    monkeypatch.setenv("PATH", "")
    assert commit(tmp_path) is None
    assert {"python", "system", "torch"} <= versions().keys()
