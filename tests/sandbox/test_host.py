import os
import time

import psutil
import pytest

from grpo_lit.sandbox import host
from grpo_lit.sandbox.host import SandboxError, run_script, run_tests
from grpo_lit.sandbox.limits import Limits

LIMITS = Limits(seconds=30.0)


def soon(seconds=60.0):
    return time.monotonic() + seconds


def test_how_a_run_ends():
    programs = {
        "print(input(), 1)": ("exit", 0, "x 1\n"),
        "import sys; print(1); sys.exit(3)": ("exit", 3, "1\n"),
        "import sys; sys.exit(256 + 3)": ("exit", 3, ""),
        "import sys; sys.exit('no')": ("exit", 1, ""),
        "print(1); 1 / 0": ("exit", 1, "1\n"),
        "(": ("exit", 1, ""),
    }
    for program, expected in programs.items():
        (run,) = run_script(program, ["x\n"], LIMITS, soon())
        assert (run.end, run.code, run.stdout) == expected


def test_what_breaks_a_limit_says_so():
    limits = Limits(seconds=1.0, output_kib=1)
    (run,) = run_script("import time; print(1, flush=True); time.sleep(60)", [""], limits, soon())
    assert (run.end, run.code, run.stdout) == ("time", -9, "1\n")
    (run,) = run_script("while True: print('x' * 100)", [""], Limits(output_kib=1), soon())
    assert (run.end, run.code) == ("output", -9)
    limits = Limits(disk_mib=1)
    fills = "import time; [open(str(i), 'wb').write(bytes(2**18)) for i in range(8)]; print(1, flush=True)"
    (run,) = run_script(fills + "; time.sleep(60)", [""], limits, soon())
    assert (run.end, run.code, run.stdout) == ("disk", -9, "1\n")
    (run,) = run_script(fills, [""], limits, soon())
    assert run.end == "disk"


def test_inputs_longer_than_what_a_program_may_send_arrive():
    inputs = ["x" * 2**23] * 3
    program = "import sys; print(len(sys.stdin.read()))"
    assert [run.stdout for run in run_script(program, inputs, LIMITS, soon())] == [f"{2**23}\n"] * 3


def test_each_run_has_the_whole_disk_limit():
    """Three runs of 3 MiB each are within 4 MiB: what one wrote is gone before the next."""
    program = "import os; open('a', 'wb').write(bytes(3 * 2**20)); print(os.listdir('..'))"
    runs = list(run_script(program, [""] * 3, Limits(disk_mib=4), soon()))
    assert [(run.end, run.stdout) for run in runs] == [("exit", f"['test{i}']\n") for i in range(3)]


def test_nothing_is_run_after_the_deadline():
    started = time.monotonic()
    assert list(run_script("import time; time.sleep(60)", ["", ""], LIMITS, soon(0.5))) == []
    assert run_tests("import time; time.sleep(60)", ["pass"], LIMITS, soon(0.5)) == ([False], None)
    assert time.monotonic() - started < 60


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    fds, children = len(os.listdir("/proc/self/fd")), psutil.Process().children()
    list(
        run_script(
            "open('a', 'w'); import os; os.mkdir('d'); os.chmod('d', 0); os.chmod('.', 0)", ["", ""], LIMITS, soon()
        )
    )
    assert run_tests("f = abs", ["assert f(-1) == 1"] * 3, LIMITS, soon())[0] == [True] * 3
    for _ in run_script("print(1)", [""] * 100, LIMITS, soon()):
        break  # whoever asks no further ends the rest
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == fds
    assert psutil.Process().children() == children


def test_no_tests_are_no_error():
    assert run_tests("pass", [], LIMITS, soon()) == ([], None)
    assert list(run_script("pass", [], LIMITS, soon())) == []


def test_a_process_that_was_not_confined_is_an_error_and_no_score():
    with pytest.raises(SandboxError, match="could not be confined"):
        host._run({"confined": False, "end": "exit", "code": 1, "stdout": "", "cut": []})


def test_no_place_for_a_folder_is_an_error_and_no_score(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    with pytest.raises(SandboxError, match=r"no temporary folder could be made: .*absent"):
        list(run_script("print(1)", [""], LIMITS, soon()))


def test_only_the_standard_library_is_imported():
    """A child that imported torch would take seconds to start."""
    program = (
        "import sys; print('torch' in sys.modules, 'numpy' in sys.modules, 'grpo_lit.sandbox.host' in sys.modules)"
    )
    (run,) = run_script(program, [""], LIMITS, soon())
    assert run.stdout == "False False False\n"
