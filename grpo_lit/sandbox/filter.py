"""A seccomp filter: a program may start threads, but no process, no connection, and no signal to anybody.

Limits on the number of processes do not hold for root, and a process of the same user could kill the training run.
"""

import ctypes
import errno
import platform
from dataclasses import dataclass

_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_CLONE_THREAD = 0x10000
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
#: Instructions of classic BPF: load a word from k; jump where it is k, at least k, or has a bit of k; return k.
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
#: Offsets in ``struct seccomp_data``: system call, architecture, low half of the first argument.
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
#: x86-64 has a second table of the same calls from here on.
_X32 = 0x40000000


@dataclass(frozen=True)
class _Calls:
    """Numbers of system calls on one architecture.

    Attributes:
        architecture: What the kernel calls it.
        clone: Starts a thread or a process, by its flags.
        prlimit: Changes limits, of other processes too.
        refused: fork, vfork, socket, ptrace, kill and its kin, process_vm_readv and -writev, bpf.
    """

    architecture: int
    clone: int
    prlimit: int
    refused: tuple[int, ...]


#: The same number everywhere: clone3; pidfd_send_signal, io_uring_setup, pidfd_getfd.
_CLONE3 = 435
_REFUSED_EVERYWHERE = (424, 425, 438)
_CALLS = {
    "x86_64": _Calls(0xC000003E, 56, 302, (57, 58, 41, 101, 62, 200, 234, 129, 297, 310, 311, 321)),
    "aarch64": _Calls(0xC00000B7, 220, 261, (198, 117, 129, 130, 131, 138, 240, 270, 271, 280)),
}


class _Instruction(ctypes.Structure):
    """``struct sock_filter``."""

    _fields_ = (("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    """``struct sock_fprog``."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(_Instruction)))


def refuse_system_calls(libc: ctypes.CDLL) -> bool:
    """Install the filter in this process and all that it becomes; return whether the system could."""
    calls = _CALLS.get(platform.machine())
    if calls is None:
        return False
    code = _filter(calls)
    instructions = (_Instruction * len(code))(*(_Instruction(*line) for line in code))
    program = _Program(len(code), instructions)
    return libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0) == 0


def _filter(calls: _Calls) -> list[tuple[int, int, int, int]]:
    """Return instructions as (code, lines to skip if true, lines to skip if false, constant)."""
    refuse = (_RETURN, 0, 0, _ERRNO | errno.EPERM)
    allow = (_RETURN, 0, 0, _ALLOW)
    code = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, calls.architecture),
        refuse,
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        refuse,
        # Its flags lie in memory, where a filter cannot look; glibc then falls back to clone.
        (_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
        (_EQUAL, 0, 4, calls.clone),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_ANY_BIT, 0, 1, _CLONE_THREAD),
        allow,
        refuse,
        # Its own limits it may read, and lower.
        (_EQUAL, 0, 4, calls.prlimit),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_EQUAL, 0, 1, 0),
        allow,
        refuse,
    ]
    for number in (*calls.refused, *_REFUSED_EVERYWHERE):
        code += [(_EQUAL, 0, 1, number), refuse]
    return [*code, allow]
