"""The surroundings of vLLM's processes: environment, devices, and an end for every one of them."""

import os
import select
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

import psutil

from grpo_lit.errors import ConfigError, EngineError

T = TypeVar("T")
#: Variables of a launcher (torchrun, Lightning) that would make vLLM's workers join the learner's process group.
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
_LAUNCHER_PREFIX = "TORCHELASTIC_"
#: Environment variable with the id of the process that vLLM's workers must not outlive.
LEARNER_PID = "GRPO_LIT_LEARNER_PID"
#: How long a process may take to end by itself before it is killed [s].
_GRACE = 10.0
#: How often a waiting call looks whether vLLM's processes live [s].
_LOOK = 1.0


def child_environment(changes: dict[str, str]) -> dict[str, str]:
    """Return this process's environment for a child that runs vLLM: without the launcher's variables, and changed."""
    kept = {n: v for n, v in os.environ.items() if n not in _LAUNCHER and not n.startswith(_LAUNCHER_PREFIX)}
    return kept | changes


@contextmanager
def environment(changes: dict[str, str]) -> Iterator[None]:
    """Change environment variables for processes that start within, and put every variable back.

    vLLM sets variables of its own while it starts (``LD_PRELOAD``, ``LOCAL_WORLD_SIZE``, thread counts); its processes
    get them, the learner and whatever else it starts later must not.
    """
    before, within = dict(os.environ), child_environment(changes)
    for name in before.keys() - within.keys():
        del os.environ[name]
    os.environ.update(within)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class _Interrupt(BaseException):
    """Ctrl-C under another name."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Make Ctrl-C end what runs within, though it catches ``KeyboardInterrupt``.

    vLLM swallows it while its engine starts; the engine's process ends all the same, and vLLM then waits 10 minutes for
    it. In another than the main thread, and where Ctrl-C has another meaning than Python's, nothing is changed.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _Interrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except _Interrupt:
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGINT, before)


def own_device(tensor_parallel_size: int) -> dict[str, str]:
    """Return the variable that keeps an engine on this rank's CUDA device; nothing where there is no CUDA.

    Raises:
        ConfigError: Several ranks want engines of several devices each.
    """
    import torch  # takes a second, which the help of scripts/serve need not wait for

    if not torch.cuda.is_available():
        return {}
    if tensor_parallel_size > 1:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError(
                f"`tensor_parallel_size` expected 1 where several ranks train, each with an engine on its own device, "
                f"but got {tensor_parallel_size}: set it to 1, or train in one process"
            )
        return {}
    index = torch.cuda.current_device()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {"CUDA_VISIBLE_DEVICES": visible.split(",")[index] if visible else str(index)}


def engine_processes() -> list[psutil.Process]:
    """Return this process's vLLM processes, by the titles vLLM gives them.

    A rank may be another rank's child; its engine is not this one's, so the search ends at a process without the title.
    """
    return _titled_children(psutil.Process())


def _titled_children(parent: psutil.Process) -> list[psutil.Process]:
    found = []
    for child in parent.children():
        try:
            if any(word.startswith("VLLM::") for word in child.cmdline()):
                found += [child, *_titled_children(child)]
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


@contextmanager
def as_engine_error(doing: str) -> Iterator[None]:
    """Name what vLLM could not do in the error of whatever fails within."""
    try:
        yield
    except EngineError:
        raise
    except Exception as error:  # what fails in vLLM's processes arrives as a bare Exception
        raise EngineError(f"vLLM could not {doing}: {error}") from error


def call_while_alive(processes: Sequence[psutil.Process], function: Callable[[], T]) -> T:
    """Call a function of vLLM, and give up when one of its processes is gone.

    vLLM waits for ever for the answer of a process that was killed, as the system does when memory runs out.

    Raises:
        EngineError: A process is gone.
    """
    import torch  # as above

    answer: Future[T] = Future()
    # A new thread begins on the first device; weights that are handed over in it lie on the caller's.
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            answer.set_result(function())
        except BaseException as error:  # noqa: BLE001 (raised in the caller's thread)
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True, name="grpo-lit-vllm").start()
    while True:
        try:
            return answer.result(timeout=_LOOK)
        except TimeoutError:
            if answer.done():  # just now, or the error is the function's own
                return answer.result()
            dead = [process.pid for process in processes if not _lives(process)]
            if dead:
                raise EngineError(
                    f"vLLM's process {dead[0]} is gone; the system kills processes when memory runs out: lower the "
                    "engine's `cpu_kv_cache_gib` or `gpu_memory_utilization`, or the model's micro-batches"
                ) from None


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for_end(pid: int) -> None:
    """Return when a process has ended, which may be at once."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    select.select([descriptor], [], [])


def end_processes(processes: Sequence[psutil.Process]) -> None:
    """Wait for processes that are ending, and kill those that do not."""
    _, alive = psutil.wait_procs(processes, timeout=_GRACE)
    for process in alive:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(alive, timeout=_GRACE)
