"""Folders that a program wrote into: how much lies there, and their removal, however deep they are nested."""

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import stat
import tempfile
import time

_log = logging.getLogger(__name__)
_PREFIX = "grpo_lit_"
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: What an entry costs besides its content [bytes]: empty files fill a disk too.
_ENTRY_BYTES = 4096
#: Deeper folders are beyond any limit: a path to what lies in them may be longer than the system takes.
_MAX_DEPTH = 64
#: A folder that nobody holds is left alone for so long [s]: its owner may be about to take it.
_STALE_SECONDS = 3600.0


def make() -> tuple[str, int]:
    """Make a temporary folder; return it and a file descriptor that holds it as long as this process lives."""
    folder = tempfile.mkdtemp(prefix=_PREFIX)
    held = os.open(folder, _OPEN)
    with contextlib.suppress(OSError):  # some file systems have no locks; there nobody takes one to be stale either
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return folder, held


def remove_stale() -> None:
    """Remove what processes of this user left behind that were killed before they could."""
    with os.scandir(tempfile.gettempdir()) as entries:
        left = [entry for entry in entries if entry.name.startswith(_PREFIX)]
    for entry in left:
        with contextlib.suppress(OSError):  # held by a process that lives, or gone meanwhile
            status = entry.stat(follow_symlinks=False)
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < _STALE_SECONDS:
                continue
            held = os.open(entry.path, _OPEN)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(entry.path)
            finally:
                os.close(held)


def exceeds(folder: str, most: int) -> bool:
    """Return whether more lies in a folder than ``most`` [bytes], or deeper than anyone may count."""
    total, waiting = 0, [(folder, 0)]
    while waiting:
        path, depth = waiting.pop()
        try:
            _unlock(path)
            with os.scandir(path) as entries:
                for entry in entries:
                    total += _ENTRY_BYTES + entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append((entry.path, depth + 1))
                    if total > most or depth >= _MAX_DEPTH:
                        return True
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return True
            # Else the program removed or locked it meanwhile; the last look comes when nothing of it runs.
    return False


def _unlock(path: str) -> None:
    """Take back the right to look into a folder, but not through a link."""
    if os.access(path, os.R_OK | os.X_OK):
        return
    opened = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        os.chmod(f"/proc/self/fd/{opened}", 0o700)
    finally:
        os.close(opened)


def remove(folder: str) -> None:
    """Remove a folder, whatever rights a program took from itself; what cannot be removed is logged and left.

    Folders in it are emptied into it, one level at a time: neither depth nor the length of a path matters.
    """
    try:
        os.chmod(folder, 0o700)
        top = os.open(folder, _OPEN)
        try:
            while names := os.listdir(top):
                for name in names:
                    _remove_entry(top, name)
        finally:
            os.close(top)
        os.rmdir(folder)
    except OSError as error:
        _log.warning("%s is left behind: %s", folder, error)


def _remove_entry(top: int, name: str) -> None:
    if not _is_folder(top, name):
        os.unlink(name, dir_fd=top)
        return
    os.chmod(name, 0o700, dir_fd=top)
    opened = os.open(name, _OPEN, dir_fd=top)
    try:
        for inner in os.listdir(opened):
            if _is_folder(opened, inner):
                os.chmod(inner, 0o700, dir_fd=opened)  # a folder that cannot be written cannot be moved either
                os.rename(inner, secrets.token_hex(16), src_dir_fd=opened, dst_dir_fd=top)
            else:
                os.unlink(inner, dir_fd=opened)
    finally:
        os.close(opened)
    os.rmdir(name, dir_fd=top)


def _is_folder(parent: int, name: str) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
