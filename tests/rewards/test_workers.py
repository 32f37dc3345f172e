import copy
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest

from grpo_lit.errors import ConfigError, RewardError
from grpo_lit.rewards import workers
from grpo_lit.rewards.workers import Outcome, WorkerPool

FUNCTIONS = """
import os, signal, time

def double(x): return 2 * x
def spin():
    while True: pass
def tower(): return 9 ** 9 ** 9 ** 9 > 1   # one operation of C: no handler in Python would ever run
def sleep(): time.sleep(1000)
def eat(): return len(bytearray(1 << 40))
def abort(): os.abort()
def end(code): os._exit(code)
def fail(): raise ValueError("secret")
def shout(): os.write(1, b"secret"); os.write(2, b"secret"); print("secret"); return 1
def pid(): return os.getpid()
def parent(): return os.getppid()
def kill_once(flag):
    if not os.path.exists(flag):
        open(flag, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return "second try"
def kill(): os.kill(os.getpid(), signal.SIGKILL)
def modules():
    import sys
    return [name for name in ("torch", "lightning", "grpo_lit") if name in sys.modules]
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("functions") / "functions.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture
def pool(file):
    pool = WorkerPool(file, workers=2, cpu_seconds=0.2, wall_seconds=60.0)
    yield pool
    pool.close()


def children(pid: int) -> list[psutil.Process]:
    return [p for p in psutil.Process(pid).children(recursive=True) if "worker_process.py" in " ".join(p.cmdline())]


def wait_until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_values_come_in_order_and_nothing_starts_before_it_is_needed(pool):
    assert children(os.getpid()) == []
    assert pool.map("double", []) == []
    assert children(os.getpid()) == []
    assert [o.value for o in pool.map("double", [[i] for i in range(50)])] == [2 * i for i in range(50)]
    assert pool.map("double", [["ü\n"]]) == [Outcome("ü\nü\n")]
    # Far more than a pipe holds.
    assert pool.map("double", [["x" * 300_000]])[0].value == "x" * 600_000
    assert pool.failures == {}


@pytest.mark.parametrize(
    ("function", "arguments", "reason"),
    [
        ("spin", [], "time"),
        ("tower", [], "time"),
        ("eat", [], "memory"),
        ("abort", [], "memory"),
        ("end", [3], "crashed"),
        ("fail", [], "crashed"),
        ("no_such_function", [], "crashed"),
    ],
)
def test_a_bad_call_fails_alone(pool, function, arguments, reason):
    before = pool.map("parent", [[]])[0].value
    answers = [pool.map("double", [[i]])[0].value for i in range(3)]
    assert pool.map(function, [arguments] * 3) == [Outcome(failure=reason)] * 3
    assert answers + [o.value for o in pool.map("double", [[3], [4]])] == [0, 2, 4, 6, 8]
    assert pool.failures == {reason: 3}
    # The process that loaded the module is still there: only its child was replaced.
    assert before in {o.value for o in pool.map("parent", [[]] * 20)}


def test_wall_time_is_limited_too(file):
    pool = WorkerPool(file, workers=1, cpu_seconds=10.0, wall_seconds=0.5)
    assert pool.map("sleep", [[]]) == [Outcome(failure="time")]
    pool.close()


def test_a_worker_that_does_not_even_end_itself_is_killed(pool, monkeypatch):
    assert pool.map("double", [[1]]) == [Outcome(2)]
    monkeypatch.setattr(pool._crew, "_seconds", 1.0)
    for process in children(os.getpid()):
        process.suspend()
    assert pool.map("double", [[2]]) == [Outcome(failure="time")]
    pool.close()
    assert children(os.getpid()) == []


def test_a_call_whose_worker_was_killed_from_outside_is_made_once_more(pool, tmp_path):
    assert pool.map("kill_once", [[str(tmp_path / "flag")]]) == [Outcome("second try")]
    assert pool.failures == {}
    assert pool.map("kill", [[]]) == [Outcome(failure="killed")]
    assert pool.map("double", [[1]]) == [Outcome(2)]


@pytest.mark.parametrize("which", ["parent", "pid", "both"])
def test_a_worker_killed_between_calls_is_replaced(pool, which):
    pids = [pool.map(name, [[]])[0].value for name in (("parent", "pid") if which == "both" else (which,))]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert [o.value for o in pool.map("double", [[i] for i in range(20)])] == [2 * i for i in range(20)]
    assert pool.failures == {}


def test_what_a_function_prints_is_seen_by_nobody(pool, capfd):
    assert pool.map("shout", [[], []]) == [Outcome(1)] * 2
    assert pool.map("fail", [[]]) == [Outcome(failure="crashed")]
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_workers_import_nothing_of_ours(pool):
    assert pool.map("modules", [[]]) == [Outcome([])]


def test_any_thread_may_call(pool):
    results = {}

    def work(n):
        results[n] = [o.value for o in pool.map("double", [[n * 100 + i] for i in range(10)])]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: [2 * (n * 100 + i) for i in range(10)] for n in range(6)}
    assert len(children(os.getpid())) <= 4  # two workers, each with a child


def test_a_fork_of_the_process_and_a_copy_of_the_pool_work(pool):
    assert pool.map("double", [[1]]) == [Outcome(2)]
    pid = os.fork()
    if pid == 0:  # as a worker of a DataLoader is
        right = pool.map("double", [[4]]) == [Outcome(8)]
        pool.close()
        os._exit(0 if right else 1)
    assert os.waitpid(pid, 0)[1] == 0
    for copied in (copy.deepcopy(pool), pickle.loads(pickle.dumps(pool))):
        assert copied.map("double", [[3]]) == [Outcome(6)]
        copied.close()
    assert pool.map("double", [[5]]) == [Outcome(10)]


def test_close_and_the_end_of_the_pool_end_the_workers(file):
    pool = WorkerPool(file)
    for _ in range(2):
        assert pool.map("double", [[1]]) == [Outcome(2)]
        assert children(os.getpid())
        pool.close()
        assert children(os.getpid()) == []
    pool.close()
    pool.map("double", [[1]])
    del pool
    assert children(os.getpid()) == []


@pytest.mark.parametrize("how", ["end", "kill"])
def test_no_worker_outlives_its_run(file, how):
    text = f"""
        import importlib.util, sys, threading, time
        from pathlib import Path
        spec = importlib.util.spec_from_file_location("workers", {workers.__file__!r})  # the package would load torch
        sys.modules["workers"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        WorkerPool = module.WorkerPool
        pool = WorkerPool(Path({str(file)!r}), cpu_seconds=1.0)
        pool.map("double", [[1]] * 4)
        threading.Thread(target=pool.map, args=("spin", [[]]), daemon=True).start()
        time.sleep(0.3)
        print("ready", flush=True)
        if {how!r} == "kill":
            time.sleep(1000)
    """
    run = subprocess.Popen([sys.executable, "-c", textwrap.dedent(text)], stdout=subprocess.PIPE, text=True)
    assert run.stdout.readline() == "ready\n"
    left = children(run.pid)
    if how == "kill":
        assert left
        run.send_signal(signal.SIGKILL)
    assert run.wait(60) == (-signal.SIGKILL if how == "kill" else 0)
    run.stdout.close()
    wait_until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in left))


def test_a_worker_that_cannot_start_says_why(tmp_path):
    missing, broken = tmp_path / "missing.py", tmp_path / "broken.py"
    missing.write_text("import no_such_package")
    broken.write_text("import sys; sys.exit(9)")
    for file, reason in ((missing, "No module named 'no_such_package'"), (broken, "exit status 9")):
        pool = WorkerPool(file)
        with pytest.raises(RewardError, match=f"worker process could not start: {reason}"):
            pool.map("double", [[1], [2], [3]])
        pool.close()


def test_signals_that_the_run_blocks_still_end_a_call(file):
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGPROF, signal.SIGALRM))
    try:
        pool = WorkerPool(file, cpu_seconds=0.2)
        assert pool.map("spin", [[]]) == [Outcome(failure="time")]
        pool.close()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.mark.parametrize("setting", ["workers", "cpu_seconds", "wall_seconds", "memory_mib"])
def test_a_limit_must_be_positive(file, setting):
    with pytest.raises(ConfigError, match=f"`{setting}` expected to be > 0, but got 0"):
        WorkerPool(file, **{setting: 0 if setting in ("workers", "memory_mib") else 0.0})
