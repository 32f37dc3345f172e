"""vLLM's processes see the environment made for them; the learner's is as before; none of them outlives its engine."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch

from grpo_lit.errors import ConfigError, EngineError
from grpo_lit.rollouts import vllm_process
from grpo_lit.rollouts.vllm_process import (
    call_while_alive,
    end_processes,
    engine_processes,
    environment,
    interruptible,
    own_device,
    wait_for_end,
)

LAUNCHER = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True"}


def test_the_environment_is_changed_within_and_put_back_whole(monkeypatch):
    for name, value in LAUNCHER.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    before = dict(os.environ)
    with environment({"OMP_NUM_THREADS": "2", "NEW": "1"}):
        assert os.environ["OMP_NUM_THREADS"] == "2"
        assert os.environ["NEW"] == "1"
        assert not LAUNCHER.keys() & os.environ.keys()
        os.environ["LD_PRELOAD"] = "/some/library.so"  # as vLLM does
        del os.environ["PATH"]
    assert dict(os.environ) == before


def test_the_environment_is_put_back_after_a_failure():
    before = dict(os.environ)
    with pytest.raises(KeyError), environment({"NEW": "1"}):
        raise KeyError
    assert dict(os.environ) == before


def swallow_ctrl_c(seconds: float) -> str:
    """As vLLM does while its engine starts."""
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(seconds)
    except KeyboardInterrupt:
        pass
    return "on it goes"


def test_ctrl_c_is_not_swallowed():
    assert swallow_ctrl_c(5) == "on it goes"
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interruptible():
        swallow_ctrl_c(5)
    assert signal.getsignal(signal.SIGINT) is before


def test_another_meaning_of_ctrl_c_is_kept(monkeypatch):
    meant = []
    before = signal.signal(signal.SIGINT, lambda *_: meant.append("mine"))
    with interruptible():
        swallow_ctrl_c(0.01)
    assert meant == ["mine"]
    signal.signal(signal.SIGINT, before)
    with ThreadPoolExecutor(1) as pool:  # a thread may not set handlers
        pool.submit(interruptible().__enter__).result()


@pytest.mark.parametrize(
    ("visible", "index", "expected"), [(None, 1, "1"), ("4,6", 1, "6"), ("GPU-a,GPU-b", 0, "GPU-a")]
)
def test_an_engine_lives_on_its_ranks_device(monkeypatch, visible, index, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: index)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert own_device(1) == {"CUDA_VISIBLE_DEVICES": expected}


def test_several_devices_are_for_a_single_rank(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert own_device(2) == {}
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"`tensor_parallel_size` expected 1 .* but got 2"):
        own_device(2)


def test_without_cuda_there_is_no_device_to_keep(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert own_device(2) == {}


def test_a_process_that_does_not_end_is_killed(monkeypatch):
    monkeypatch.setattr(vllm_process, "_GRACE", 0.2)
    code = "import time; print('up', flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code, "VLLM::EngineCore"], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    found = engine_processes()
    assert [process.pid for process in found] == [child.pid]
    end_processes(found)
    assert not psutil.pid_exists(child.pid) or psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE
    child.wait()
    assert engine_processes() == []
    end_processes(found)  # already gone


# A rank that starts an engine of its own, as Lightning's launcher makes it a child of rank 0.
OTHER_RANK = """
import subprocess, sys
engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "VLLM::EngineCore"])
print(engine.pid, flush=True)
engine.wait()
"""


def test_the_engine_of_another_rank_is_not_ours():
    rank = subprocess.Popen([sys.executable, "-c", OTHER_RANK], stdout=subprocess.PIPE)
    assert rank.stdout is not None
    engine = psutil.Process(int(rank.stdout.readline()))
    try:
        assert engine in psutil.Process().children(recursive=True)
        assert engine_processes() == []
    finally:
        engine.kill()
        rank.wait()


def test_the_end_of_a_process_is_waited_for_and_may_be_long_past():
    child = subprocess.Popen(["sleep", "0.2"])
    wait_for_end(child.pid)
    assert child.wait(0.5) == 0
    wait_for_end(child.pid)


@pytest.fixture
def child():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield psutil.Process(child.pid)
    child.kill()
    child.wait()


def test_a_call_gives_the_functions_own_result_or_error(child):
    assert call_while_alive([child], lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        call_while_alive([child], lambda: 1 // 0)

    def late() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        call_while_alive([child], late)


def test_a_call_is_made_on_the_callers_device(child, monkeypatch):
    seen = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: seen.append((device, threading.current_thread())))
    thread = call_while_alive([child], threading.current_thread)
    assert seen == [(3, thread)] != [(3, threading.current_thread())]


def test_a_call_does_not_wait_for_a_process_that_is_gone(child, monkeypatch):
    monkeypatch.setattr(vllm_process, "_LOOK", 0.05)
    child.kill()
    with pytest.raises(EngineError, match=f"process {child.pid} is gone"):
        call_while_alive([child], threading.Event().wait)  # an answer that never comes
