import json
import math
import os
import socket
import textwrap
import time
import warnings
from pathlib import Path

import pytest

from grpo_lit.errors import ConfigError, RewardError
from grpo_lit.rewards.code import CodeTests, last_fenced, unit_tests
from grpo_lit.rollout import Completion, Prompt
from grpo_lit.sandbox.limits import Limits

DOUBLE = [{"input": "3\n", "output": "6\n"}, {"input": "4\n", "output": "8\n"}]
#: Wall time that a good program has even on a machine that does ten other things.
SHORT = Limits(cpu_seconds=1.0, seconds=30.0, memory_mib=256, output_kib=64)


def fenced(program):
    return f"Here it is:\n```python\n{textwrap.dedent(program).strip()}\n```\nDone."


def scores(programs, tests=DOUBLE, limits=SHORT, metadata=None, **arguments):
    prompt = Prompt(id="code/0", question="", metadata={"tests": tests} | (metadata or {}))
    completions = [Completion((), (), fenced(program), "stop", 0) for program in programs]
    return CodeTests(limits, **arguments)(prompt, completions)


def score(program, *args, **arguments):
    return scores([program], *args, **arguments)[0]


# ---------------------------------------------------------------- standard input and output


def test_share_of_tests_or_all_of_them():
    programs = ["print(2 * int(input()))", "print(6)", "print(7)", "print(2 *"]
    assert scores(programs, partial=True) == [1.0, 0.5, 0.0, 0.0]
    assert scores(programs) == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("program", "output", "expected"),
    [
        ("print('1  2'); print(3, end='')", "1 2 3\n", 1.0),
        ("print('1 2\\n\\n3 ')", "1\n2\n3", 1.0),
        ("print('12 3')", "1 2 3", 0.0),
        ("print('1 2')", "1 2 3", 0.0),
        ("print('1 2 3 4')", "1 2 3", 0.0),
        ("print(1.0)", "1", 0.0),
        ("print('é')", "é", 1.0),
        ("import sys; sys.stdout.write('1 2 3'); sys.exit()", "1 2 3", 1.0),
        ("import sys; print('1 2 3'); sys.exit(3)", "1 2 3", 0.0),
        ("print('1 2 3'); 1 / 0", "1 2 3", 0.0),
        ("import os; os.write(1, b'1 2 3')", "1 2 3", 1.0),
        ("import atexit; atexit.register(print, '1 2 3')", "1 2 3", 1.0),
        ("import threading\nthreading.Thread(target=print, args=['1 2 3']).start()", "1 2 3", 1.0),
        ("if __name__ == '__main__':\n    print('1 2 3')", "1 2 3", 1.0),
        ("import sys\nfor line in sys.stdin: print(line)\nprint(open(0).read())", "3", 1.0),
    ],
)
def test_output_is_compared_word_by_word(program, output, expected):
    assert score(program, [{"input": "3\n", "output": output}]) == expected


def test_inputs_and_outputs_may_come_as_two_lists():
    tests = {"inputs": ["3", "4"], "outputs": ["6", "8"]}
    assert score("print(2 * int(input()))", tests) == 1.0


def test_equal_programs_run_once(monkeypatch):
    reward, ran = CodeTests(SHORT), []
    monkeypatch.setattr(reward, "_score", lambda program, tests: ran.append(program) or 1.0)
    prompt = Prompt(id="code/0", question="", metadata={"tests": DOUBLE})
    assert reward(prompt, [Completion((), (), fenced(p), "stop", 0) for p in ("a", "b", "a")]) == [1.0] * 3
    assert sorted(ran) == ["a\n", "b\n"]


# ---------------------------------------------------------------- test code

FUNCTIONS = """
class Missing(KeyError):
    pass

class Stack:
    def __init__(self, items=()):
        self.items = list(items)
    def push(self, item):
        self.items.append(item)
    def __len__(self):
        return len(self.items)
    def __eq__(self, other):
        return self.items == other.items
    def __hash__(self):
        return 7
    def __iter__(self):
        return iter(self.items)
    def __str__(self):
        return "<" + ",".join(map(str, self.items)) + ">"

import math
LIMIT = 10

def double(x):
    return 2 * x

def find(key):
    raise Missing(key)

def sort(items):
    items.sort()

def same(x, *, y=None):
    return x if y is None else y

def count():
    n = 0
    while True:
        yield n
        n += 1
"""


@pytest.mark.parametrize(
    "test",
    [
        "assert double(3) == 6 and double('ab') == 'abab'",
        "assert math.isclose(double(0.15), 0.3) and LIMIT == 10",
        "x = {1: [2.5, (None, True)], 'a': {3, frozenset([4])}, b'b': 1j}\nassert same(x) == x and same(1, y=x) == x",
        "items = [3, 1, 2]\nsort(items)\nassert items == [1, 2, 3]",
        "s = Stack([1])\ns.push(2)\nassert len(s) == 2 and list(s) == s.items == [1, 2] and str(s) == '<1,2>'",
        "assert Stack([1]) == Stack([1]) and Stack([1]) != Stack([2]) and isinstance(Stack(), Stack)",
        "try:\n    find('k')\n    assert 0\nexcept Missing as e:\n    assert isinstance(e, KeyError) and 'k' in str(e)",
        "from itertools import islice\nassert list(islice(count(), 3)) == [0, 1, 2]",
        "from fractions import Fraction\nassert double(Fraction(1, 3)) == Fraction(2, 3)",
        "from collections import Counter, deque\nx = Counter('aab'), deque([1])\nassert same(x) == x",
        "def check(candidate):\n    assert candidate(2) == 4\n\ncheck(double)",
        "assert same(10**1000) == 10**1000 and same(float('inf')) == float('inf') and same(True) is True",
    ],
)
def test_code_that_calls_the_program(test):
    assert score(FUNCTIONS, test) == 1.0


@pytest.mark.parametrize(
    "test", ["assert double(3) == 7", "assert triple(3) == 9", "1 / 0", "import sys; sys.exit(0)", "find(1)"]
)
def test_code_that_fails(test):
    assert score(FUNCTIONS, test) == 0.0


def test_each_piece_of_code_is_a_test_with_a_fresh_program():
    program = "n = 0\ndef count():\n    global n\n    n += 1\n    return n"
    tests = [
        "assert count() == 1",
        "assert count() == 1",
        "assert count() == 2",
        "assert count() == 1 and count() == 2",
    ]
    assert score(program, tests, partial=True) == 0.75


def test_a_builtin_is_only_replaced_where_it_is_what_is_tested():
    program = "def sum(a, b):\n    return a + b\ndef len(x):\n    return 3\ndef f():\n    return [1]"
    assert score(program, ["assert sum(1, 2) == 3"]) == 0.0
    assert score(program, ["assert sum(1, 2) == 3"], metadata={"entry_point": "sum"}) == 1.0
    assert score(program, ["assert len(f()) == 3"]) == 0.0


# ---------------------------------------------------------------- hostile programs

EQUAL_TO_ALL = """
class Any(int):
    def __eq__(self, other): return True
    __ne__ = lambda self, other: False
    __lt__ = __le__ = __gt__ = __ge__ = __eq__
    __sub__ = __add__ = __abs__ = lambda self, *other: self
def double(x):
    return Any()
"""
FRAMES = """
import gc, os, sys
def double(x):
    frame = sys._getframe()
    while frame:
        for value in list(frame.f_locals.values()):
            if hasattr(value, "sendall"):
                value.sendall(b'\\x00\\x00\\x00\\x04true')
        frame = frame.f_back
    return None
"""
#: Takes the channel and answers everything itself: what it was not asked for is true, and a set is its own.
SPEAK = """
import json, struct, sys
channel = sys._getframe(1).f_locals["channel"]
def send(message):
    data = json.dumps(message).encode()
    channel.sendall(struct.pack("!I", len(data)) + data)
mine = {"value": ["other", 0]}
stand_ins = ["dict", [[name, ["other", 1]] for name in ("set", "abs", "len", "sorted", "AssertionError")]]
send({"double": mine, "abs": mine, "set": mine, "__builtins__": {"value": stand_ins}, "__name__": mine})
while True:
    (size,) = struct.unpack("!I", channel.recv(4))
    operation, target, arguments, named = json.loads(channel.recv(size))
    value = True if operation in ("bool", "eq", "lt", "le", "contains", "isinstance") else ["other", 2]
    send(["gave", value, arguments])
"""
STOP = "def double(x):\n    raise StopIteration"
FORGE = """
import os
def double(x):
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for fd in range(3, 12):
            try:
                open(f"/proc/{pid}/fd/{fd}", "wb").write(b'\\x00\\x00\\x00\\x10{"passed": true}')
            except OSError:
                pass
    return None
"""


@pytest.mark.parametrize(
    "program",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "raise SystemExit",
        "quit()",
        "def double(x):\n    import os; os._exit(0)",
        "def double(x):\n    raise SystemExit(0)",
        "def double(x):\n    import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
        "print('passed'); double = None",
        "def double(x): return None\nimport builtins\nbuiltins.AssertionError = SystemExit",
        "import unittest, sys\ndouble = lambda x: sys.modules",
        EQUAL_TO_ALL,
        FRAMES,
        FORGE,
        SPEAK,
        STOP,
    ],
)
def test_a_program_that_cheats_the_test_code_earns_nothing(program):
    tests = ["assert double(3) == 6", "assert abs(double(0.5) - 1.0) < 1e-6", "assert not double(0) != 0"]
    tests += [
        "assert set(double((3,))) == set((3, 3))",
        "assert len(double([])) == 0 and sorted(double([2])) == [2, 2]",
    ]
    tests += ["assert all(got == right for got, right in zip(map(double, [1, 2]), [2, 4]))"]
    assert score(program, tests, partial=True) == 0.0


@pytest.mark.parametrize(
    "program",
    [
        "while True: print('6 ' * 1000)",
        "while True: pass",
        "import time; time.sleep(60)",
        "import time, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)",
        "x = bytearray(2**31); print(6)",
        "x = []\nwhile True: x.append(bytearray(10**7))",
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
        "import os\nwhile True:\n    if os.fork() == 0:\n        os.setsid()",
        "open('big', 'wb').write(bytes(10**8)); print(6)",
        "f = [open('x%d' % i, 'w') for i in range(1000)]; print(6)",
        "import os\nfor i in range(1500): os.mkdir('a'); os.chdir('a')\nprint(6)",
        "for i in range(200): open(str(i), 'wb').write(bytes(2**20))\nprint(6)",
        "for i in range(10**6): open(str(i), 'wb').close()\nprint(6)",
        "def f(): f()\nf()",
        "import ctypes; ctypes.string_at(0)",
        "import os; os.abort()",
        "import sys; sys.setrecursionlimit(10**9)\ndef f(n): return f(n + 1)\nf(0)",
    ],
)
def test_a_program_without_measure_earns_nothing_and_is_ended(program):
    started = time.monotonic()
    limits = Limits(cpu_seconds=1.0, seconds=1.5, memory_mib=512, output_kib=64, file_mib=1, disk_mib=4)
    assert score(program, DOUBLE[:1], limits) == 0.0
    assert time.monotonic() - started < 60


def test_all_runs_of_one_program_end_together():
    started = time.monotonic()
    assert score("import time; time.sleep(60)", DOUBLE * 50, partial=True, total_seconds=1.0) == 0.0
    assert score("def double(x):\n    while True: pass", ["double(1)"] * 50, partial=True, total_seconds=1.0) == 0.0
    assert time.monotonic() - started < 60


def everything_under(folder):
    return set(Path(folder).rglob("*"))


def test_a_run_is_alone_in_an_empty_folder_with_a_bare_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    program = """
        import os, sys
        print(os.listdir("."), "SECRET_TOKEN" in os.environ, any("hunter2" in v for v in os.environ.values()))
        print(sys.flags.isolated, sys.argv)
        os.mkdir("locked"); open("locked/file", "w").close(); os.chmod("locked", 0)
    """
    expected = "[] False False 1 ['program.py']"
    # Twice: the second run finds nothing of the first.
    assert score(program, [{"input": "", "output": expected}] * 2) == 1.0
    assert everything_under(tmp_path) == set()


def is_cut_off_from(name):
    reward = CodeTests(SHORT)
    prompt = Prompt(id="code/0", question="", metadata={"tests": DOUBLE})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reward(prompt, [Completion((), (), fenced("print(6)"), "stop", 0)])
    # What is open is said; whatever else is closed, as the next tests try.
    assert bool(reward.open_to) == any("be cut off from everything" in str(w.message) for w in caught)
    return name not in reward.open_to


def test_no_network():
    if not is_cut_off_from("network"):
        return
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = f"""
            import socket
            try:
                socket.create_connection(("127.0.0.1", {server.getsockname()[1]}), timeout=1)
                print("reached")
            except OSError:
                print("not reached")
        """
        assert score(program, [{"input": "", "output": "not reached"}]) == 1.0


def test_no_file_outside_of_its_folder_changes(tmp_path):
    if not is_cut_off_from("files"):
        return
    precious = tmp_path / "checkpoint"
    precious.write_text("weights")
    program = f"""
        import os
        for harm in (
            lambda: os.remove({str(precious)!r}),
            lambda: open({str(precious)!r}, "w"),
            lambda: open({str(tmp_path / "new")!r}, "w"),
            lambda: os.rename({str(precious)!r}, "mine"),
        ):
            try:
                harm()
                print("harm")
            except OSError:
                pass
        open("own", "w").write("x")
        open("/dev/null", "w").write("x")
        print("end")
    """
    assert score(program, [{"input": "", "output": "end"}]) == 1.0
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"checkpoint": "weights"}


def test_no_process_is_started_and_none_is_signalled():
    if not is_cut_off_from("processes"):
        return
    program = f"""
        import os, subprocess, threading
        signals = (lambda: os.kill({os.getpid()}, 0), lambda: os.kill(-1, 0))
        for harm in (os.fork, lambda: subprocess.run(["true"]), *signals):
            try:
                harm()
                print("harm")
            except OSError:
                pass
        thread = threading.Thread(target=print, args=["end"])
        thread.start()
    """
    assert score(program, [{"input": "", "output": "end"}]) == 1.0


def test_an_error_that_nobody_foresaw_costs_one_program_and_not_the_run(monkeypatch):
    def breaks(program, *_):
        if "boom" in program:
            raise RecursionError("deep")
        return 1

    reward = CodeTests(SHORT)
    monkeypatch.setattr(reward, "_passed", breaks)
    prompt = Prompt(id="code/0", question="", metadata={"tests": DOUBLE[:1]})
    with pytest.warns(UserWarning, match="gives 0 to a program that broke its run: RecursionError: deep"):
        assert reward(prompt, [Completion((), (), fenced(p), "stop", 0) for p in ("boom", "a")]) == [0.0, 1.0]
    assert reward.broken == 1


def test_an_interpreter_that_does_not_start_is_an_error_and_no_score(monkeypatch):
    monkeypatch.setattr("grpo_lit.sandbox.host._START", "raise SystemExit(1)  # {root}{module}{fd}")
    for tests in (DOUBLE, "assert True"):
        with pytest.raises(
            RewardError, match=r"CodeTests cannot run programs here: .* did not start grpo_lit\.sandbox"
        ):
            score("print(6)", tests)


# ---------------------------------------------------------------- what is read of a completion and of a prompt


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na\n```", "a\n"),
        ("```\na\n```", "a\n"),
        ("```py\na\n```\nand\n```python\nb\n```", "b\n"),
        ("```python\na\n```\nthen\n```python\nb", "a\n"),
        ("~~~\na\n```\nb\n~~~", "a\n```\nb\n"),
        ("````\na\n```\nb\n````", "a\n```\nb\n"),
        ("<think>```python\na\n```</think>", None),
        ("```python\n```", ""),
        ("  ```python\n  a\n  ```", "  a\n"),
        ("a", None),
        ("", None),
        ("```a```", None),
    ],
)
def test_the_last_complete_fenced_block(text, program):
    assert last_fenced(text) == program


def test_200_kb_of_fences_take_linear_time():
    for piece in ("```\n", "```", "`", "~~~~\n", " ", "```python\n"):
        started = time.process_time()
        last_fenced(piece * (200_000 // len(piece)))
        assert time.process_time() - started < 1


def test_a_completion_without_a_block_is_nothing_or_all_of_it():
    prompt = Prompt(id="code/0", question="", metadata={"tests": DOUBLE})
    completion = Completion((), (), "print(2 * int(input()))", "stop", 0)
    assert CodeTests(SHORT)(prompt, [completion]) == [0.0]
    assert CodeTests(SHORT, unfenced="program")(prompt, [completion]) == [1.0]


@pytest.mark.parametrize("tests", [None, [], "", ["assert f("]])
def test_a_prompt_without_tests_abstains_and_is_counted(tests):
    reward = CodeTests()
    prompts = [Prompt(id=f"code/{i}", question="", metadata={"tests": tests}) for i in range(2)]
    with pytest.warns(UserWarning, match="abstains on prompt code/0") as caught:
        assert [reward(p, [Completion((), (), "", "stop", 0)]) for p in prompts] == [[None]] * 2
    assert len(caught) == 1
    assert reward.unreadable == 2
    assert reward.problem(prompts[0]) == "no tests that can be run"


@pytest.mark.parametrize(
    "tests", [7, [7], [{"in": "3"}], {"inputs": ["3"], "outputs": []}, ["assert True", {"input": "", "output": ""}]]
)
def test_unit_tests_another_form_are_refused(tests):
    prompt = Prompt(id="code/0", question="", metadata={"tests": tests})
    with pytest.raises(ConfigError, match=r"`metadata\['tests'\]` of prompt code/0 expected"):
        unit_tests(prompt)
    reward = CodeTests()  # which may meet one bad row among thousands
    assert reward.problem(prompt) == "tests of a form that is not known"
    with pytest.warns(UserWarning, match="abstains on prompt code/0, .* which has tests of a form that is not known"):
        assert reward(prompt, [Completion((), (), "", "stop", 0)]) == [None]
    assert reward.unreadable == 1


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"limits": Limits(cpu_seconds=0.0)}, "cpu_seconds"),
        ({"limits": Limits(memory_mib=-1)}, "memory_mib"),
        ({"limits": Limits(seconds=math.nan)}, "seconds"),
        ({"total_seconds": 0.0}, "total_seconds"),
        ({"workers": -1}, "workers"),
    ],
)
def test_limits_that_cannot_work_are_refused(arguments, name):
    with pytest.raises(ConfigError, match=f"`{name}` of CodeTests expected"):
        CodeTests(**arguments)


@pytest.mark.parametrize(
    "tests", [[{"input": "3", "output": "6"}], {"inputs": ["3"], "outputs": ["6"]}, ["assert f(3)"]]
)
def test_tests_may_be_written_as_json(tests):
    plain, text = (Prompt(id="p", question="", metadata={"tests": t}) for t in (tests, json.dumps(tests)))
    assert unit_tests(text) == unit_tests(plain)
    assert len(unit_tests(plain)) == 1
