"""What a program may use, and what it is cut off from."""

import contextlib
import ctypes
import os
import resource
from dataclasses import dataclass

from grpo_lit.sandbox.filter import refuse_system_calls

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS, _PR_SET_CHILD_SUBREAPER = 4, 38, 36
_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_LANDLOCK_VERSION_FLAG, _LANDLOCK_PATH_BENEATH = 1, 1
_WRITE_FILE = 1 << 1
#: Every way to change files in Landlock's first version: write, remove and make files of all kinds.
_CHANGE_FILES = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))
_TRUNCATE, _TRUNCATE_SINCE = 1 << 14, 3

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Limits:
    """What one run of a program may use.

    Args:
        cpu_seconds: CPU time of one test [s], rounded up to whole seconds.
        seconds: Wall time of one test [s].
        memory_mib: Address space [MiB].
        file_mib: Size of one file that it writes [MiB].
        disk_mib: What lies in its folder [MiB], looked at ten times a second; files that it removes while it has them
            open are not seen, of which there can be ``open_files``, of ``file_mib`` each.
        output_kib: What it may print [KiB]; one that prints more is ended.
        processes: Processes and threads. The system does not count those of root, and it need not where a program can
            be kept from starting processes at all.
        open_files: Files open at the same time.
    """

    cpu_seconds: float = 5.0
    seconds: float = 10.0
    memory_mib: int = 1024
    file_mib: int = 16
    disk_mib: int = 64
    output_kib: int = 1024
    processes: int = 32
    open_files: int = 64


def protect() -> None:
    """Keep other processes of the same user out of this one's memory, and inherit whoever its children leave behind."""
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def confine(limits: Limits) -> list[str]:
    """Limit this process for good.

    Returns:
        What the system could cut it off from, of ``network``; ``processes``: it can start none and signal none;
        ``files``: it can change none outside of the working directory.
    """
    cut = ["network"] if _libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) == 0 else []
    cpu = max(-int(-limits.cpu_seconds // 1), 1)
    for kind, most in (
        # The hard limit kills; a soft one below it could be ignored by the program.
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_AS, limits.memory_mib * 2**20),
        (resource.RLIMIT_FSIZE, limits.file_mib * 2**20),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_CORE, 0),
    ):
        _lower(kind, most)
    # A user namespace has a count of its own; elsewhere all that the user runs counts.
    _lower(resource.RLIMIT_NPROC, limits.processes + (0 if cut else _running()))
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if _keep_files(os.getcwd()):
        cut.append("files")
    if refuse_system_calls(_libc):
        cut += ["processes"] if "network" in cut else ["network", "processes"]
    return cut


def _running() -> int:
    """Return how many processes and threads this user runs."""
    count = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # ended meanwhile
            count += len(os.listdir(f"/proc/{pid}/task")) if os.stat(f"/proc/{pid}").st_uid == os.getuid() else 0
    return count


def _lower(kind: int, most: int) -> None:
    _, hard = resource.getrlimit(kind)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


def _keep_files(folder: str) -> bool:
    """Let this process change files in one folder only, by Landlock; return whether the system can."""
    version = _libc.syscall(_LANDLOCK_CREATE_RULESET, None, 0, _LANDLOCK_VERSION_FLAG)
    if version < 1:
        return False
    handled = _CHANGE_FILES | (_TRUNCATE if version >= _TRUNCATE_SINCE else 0)
    rules = _libc.syscall(_LANDLOCK_CREATE_RULESET, ctypes.byref(ctypes.c_uint64(handled)), ctypes.c_size_t(8), 0)
    if rules < 0:
        return False
    for path, allowed in ((folder, handled), (os.devnull, handled & (_WRITE_FILE | _TRUNCATE))):
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = _PathBeneath(allowed, opened)
        added = _libc.syscall(_LANDLOCK_ADD_RULE, rules, _LANDLOCK_PATH_BENEATH, ctypes.byref(rule), 0)
        os.close(opened)
        if added:
            os.close(rules)
            return False
    kept = _libc.syscall(_LANDLOCK_RESTRICT_SELF, rules, 0) == 0
    os.close(rules)
    return kept


class _PathBeneath(ctypes.Structure):
    """``struct landlock_path_beneath_attr``."""

    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))
