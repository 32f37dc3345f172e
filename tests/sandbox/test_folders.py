import os
import time

import pytest

from grpo_lit.sandbox import folders


@pytest.fixture
def deep(tmp_path):
    """A folder with 3,000 folders in each other, a file in the lowest: its path is longer than the system takes."""
    top = tmp_path / "top"
    top.mkdir()
    at = os.open(top, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("aa", dir_fd=at)
        inner = os.open("aa", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = inner
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=at))
    os.close(at)
    yield str(top)
    folders.remove(str(top))


def test_depth_is_no_matter(deep):
    assert folders.exceeds(deep, 2**40)
    folders.remove(deep)
    assert not os.path.exists(deep)


def test_what_a_program_locked_is_counted_and_removed_but_links_are_not_followed(tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "weights").write_bytes(bytes(2**20))
    precious.chmod(0o750)
    top = tmp_path / "top"
    (top / "a" / "b").mkdir(parents=True)
    (top / "a" / "b" / "file").write_bytes(bytes(2**16))
    (top / "link").symlink_to(precious)
    (top / "a" / "link").symlink_to(precious / "weights")
    (top / "a" / "loop").symlink_to(top)
    for path in (top / "a" / "b" / "file", top / "a" / "b", top / "a", top):
        path.chmod(0)
    # 64 KiB of content and 6 entries of 4 KiB at most 8 KiB each; a megabyte behind the link.
    assert folders.exceeds(str(top), 2**16)
    assert not folders.exceeds(str(top), 2**17)
    folders.remove(str(top))
    assert os.listdir(tmp_path) == ["precious"]
    assert (precious.stat().st_mode & 0o777, (precious / "weights").stat().st_size) == (0o750, 2**20)


def test_empty_files_count(tmp_path):
    for i in range(100):
        (tmp_path / str(i)).touch()
    # 4 KiB each, and no content
    assert not folders.exceeds(str(tmp_path), 100 * 4096)
    assert folders.exceeds(str(tmp_path), 100 * 4096 - 1)


def test_what_cannot_be_removed_is_said_and_no_error(tmp_path, caplog):
    folders.remove(str(tmp_path / "absent"))
    assert "absent is left behind" in caplog.text


def test_what_killed_processes_left_is_removed_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    stale, held = folders.make()
    other, still_held = folders.make()
    fresh, free = folders.make()
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    link = tmp_path / "grpo_lit_link"
    link.symlink_to(foreign)
    (tmp_path / "foreign" / "file").touch()
    os.mkdir(f"{stale}/test0")
    os.close(held)  # as the system does at the end of a process
    os.close(free)
    long_ago = time.time() - 2 * 3600
    for path in (stale, other, foreign):
        os.utime(path, (long_ago, long_ago))
    os.utime(link, (long_ago, long_ago), follow_symlinks=False)
    folders.remove_stale()
    assert {str(path) for path in tmp_path.iterdir()} == {other, fresh, str(foreign), str(link)}
    assert (foreign / "file").exists()
    os.close(still_held)
