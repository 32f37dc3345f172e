"""Programs, judged by unit tests."""

import ast
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from lightning.fabric.utilities.rank_zero import rank_zero_warn

from grpo_lit.errors import ConfigError, RewardError
from grpo_lit.rewards.reward import Reward
from grpo_lit.rollout import Completion, Prompt
from grpo_lit.sandbox.host import SandboxError, run_script, run_tests
from grpo_lit.sandbox.limits import Limits

_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([^\n`]*)$", re.MULTILINE)
#: Anything that a program may be cut off from, and what is left open where the system cannot.
_CUTS = {
    "network": "programs reach the network",
    "processes": "programs may start processes and signal those of this user",
    "files": "programs may change files outside of their folder",
}


@dataclass(frozen=True)
class UnitTests:
    """The unit tests of one prompt.

    Attributes:
        cases: (standard input, expected standard output) of each run.
        codes: Test code that calls the program's functions; each piece is a test of its own.
        entry_point: Name of the function that ``codes`` call; ``None`` where nothing was said.
    """

    cases: tuple[tuple[str, str], ...] = ()
    codes: tuple[str, ...] = ()
    entry_point: str | None = None

    def __len__(self) -> int:
        return len(self.cases) + len(self.codes)


#: What handling one hostile program may raise here, of whatever kind its messages and files bring about.
_BROUGHT_ABOUT = (
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


class CodeTests(Reward):
    """Share of the prompt's unit tests that the program in the last fenced code block passes.

    ``metadata["tests"]`` holds the tests, in one of these forms (a prompt without any that can be run, or with another
    form, makes the reward abstain, with one warning, and is counted in ``unreadable``):

    - ``[{"input": "3", "output": "6"}, ...]``, or ``{"inputs": [...], "outputs": [...]}``, or a JSON text of either:
      what a run reads and prints. Printed text is compared word by word, as text; the exit status must be 0;
    - ``["assert f(3) == 6", ...]``, or one such text: test code that calls the program's functions. It runs in another
      process than the program and sees its values only: :mod:`grpo_lit.sandbox.judge` says what that keeps out, and
      what tests cannot do there. ``metadata["entry_point"]`` is the function's name, needed where a builtin has it too.

    Every run is a process of its own in an empty folder, killed with all that it started when a limit is reached. Where
    Linux allows it, it is cut off from the network, from other processes, and from changing files outside of its folder
    (it can read what this user can); one warning says what this system does not allow.

    Args:
        limits: Of each run.
        partial: Give the share of tests passed; false gives 1 for all of them, else 0, and stops at the first failure.
        total_seconds: Wall time of all runs of one program [s]; tests beyond it are failed.
        unfenced: What a completion without a fenced block is: ``nothing``, worth 0; ``program``, all of it is run.
        workers: Programs that run at the same time; 0: one per processor.

    Raises:
        ConfigError: For a limit that is not above 0.
    """

    def __init__(
        self,
        limits: Limits = Limits(),  # noqa: B008 (frozen)
        partial: bool = False,
        total_seconds: float = 60.0,
        unfenced: Literal["nothing", "program"] = "nothing",
        workers: int = 0,
    ) -> None:
        for name, value in {**vars(limits), "total_seconds": total_seconds}.items():
            if not value > 0:
                raise ConfigError(f"`{name}` of CodeTests expected to be > 0, but got {value}")
        if workers < 0:
            raise ConfigError(f"`workers` of CodeTests expected 0 or more, but got {workers}")
        self.limits, self.partial, self.total_seconds = limits, partial, total_seconds
        self.unfenced = unfenced
        self.workers = workers or len(os.sched_getaffinity(0))
        self.unreadable = 0
        #: Programs that got 0 because running them failed in a way that is not foreseen.
        self.broken = 0
        #: What programs are not cut off from here; ``None`` until one has run.
        self.open_to: frozenset[str] | None = None

    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float | None]:
        """Return 0 to 1 for each completion, or ``None`` for all where the prompt has no tests."""
        if reason := self.problem(prompt):
            if not self.unreadable:
                found = prompt.metadata.get("tests")
                rank_zero_warn(
                    f"CodeTests abstains on prompt {prompt.id}, and on all like it, which has {reason}: {found!r:.200}"
                )
            self.unreadable += 1
            return [None] * len(completions)
        tests = unit_tests(prompt)
        programs = [self._program(completion.text) for completion in completions]
        different = list(dict.fromkeys(program for program in programs if program))
        with ThreadPoolExecutor(self.workers) as pool:
            scores = dict(zip(different, pool.map(lambda program: self._score(program, tests), different), strict=True))
        return [scores.get(program, 0.0) for program in programs]

    def problem(self, prompt: Prompt) -> str | None:
        """Return what is wrong with the prompt's tests."""
        try:
            return None if unit_tests(prompt) else "no tests that can be run"
        except ConfigError:
            return "tests of a form that is not known"

    def counters(self) -> dict[str, int]:
        """Return how many prompts could not be judged, and how many programs broke their run."""
        return {"unreadable": self.unreadable, "broken": self.broken}

    def _program(self, text: str) -> str:
        program = last_fenced(text)
        return (text if self.unfenced == "program" else "") if program is None else program

    def _score(self, program: str, tests: UnitTests) -> float:
        try:
            passed = self._passed(program, tests)
        except SandboxError as error:
            raise RewardError(f"CodeTests cannot run programs here: {error}") from error
        except _BROUGHT_ABOUT as error:  # by a program, and must not end the training run
            self.broken += 1
            rank_zero_warn(f"CodeTests gives 0 to a program that broke its run: {type(error).__name__}: {error!s:.200}")
            return 0.0
        return passed / len(tests) if self.partial else float(passed == len(tests))

    def _passed(self, program: str, tests: UnitTests) -> int:
        """Return how many tests the program passes, all or nothing where only that counts."""
        deadline, passed = time.monotonic() + self.total_seconds, 0
        inputs = [text for text, _ in tests.cases]
        for run, (_, expected) in zip(run_script(program, inputs, self.limits, deadline), tests.cases, strict=False):
            self._note(run.cut)
            right = run.end == "exit" and run.code == 0 and run.stdout.split() == expected.split()
            passed += right
            if not right and not self.partial:
                return 0
        if tests.codes:
            flags, cut = run_tests(program, tests.codes, self.limits, deadline, tests.entry_point)
            passed += sum(flags)
            if cut is not None:
                self._note(cut)
        return passed

    def _note(self, cut: Sequence[str]) -> None:
        """Say once what programs are not cut off from."""
        if self.open_to is None:
            self.open_to = frozenset(_CUTS) - frozenset(cut)
            if self.open_to:
                said = ", ".join(_CUTS[name] for name in sorted(self.open_to))
                rank_zero_warn(f"CodeTests: this system does not let programs be cut off from everything: {said}")


def last_fenced(text: str) -> str | None:
    """Return what the last complete fenced code block holds; ``None`` without one.

    A block ends at a fence of the same marks, at least as many, with nothing behind them.
    """
    content, opened = None, None
    for fence in _FENCE.finditer(text):
        marks, info = fence.groups()
        if opened is None:
            opened = fence
        elif marks[0] == opened[1][0] and len(marks) >= len(opened[1]) and not info.strip():
            content, opened = text[opened.end() + 1 : fence.start()], None
    return content


def unit_tests(prompt: Prompt) -> UnitTests:
    """Return the unit tests of a prompt; of length 0 where it has none.

    Raises:
        ConfigError: Where they have a form that is not known; see :class:`CodeTests`.
    """
    found: Any = prompt.metadata.get("tests")
    entry_point = prompt.metadata.get("entry_point")
    if not found:
        return UnitTests()
    if isinstance(found, str):
        # Tables often hold such lists as JSON. Run as test code, a list of cases would assert nothing.
        found = _from_json(found) if found.lstrip().startswith(("[", "{")) else [found]
    if isinstance(found, Mapping) and {"inputs", "outputs"} <= found.keys():
        if len(found["inputs"]) != len(found["outputs"]):
            raise _unknown(prompt, f"{len(found['inputs'])} inputs and {len(found['outputs'])} outputs")
        found = [{"input": i, "output": o} for i, o in zip(found["inputs"], found["outputs"], strict=True)]
    if not isinstance(found, Sequence):
        raise _unknown(prompt, found)
    if all(isinstance(test, str) for test in found):
        # Code that is no Python is a bad row, which says nothing about programs; not a mistake in the configuration.
        return UnitTests(codes=tuple(found), entry_point=entry_point) if all(map(_compiles, found)) else UnitTests()
    if not all(isinstance(test, Mapping) and {"input", "output"} <= test.keys() for test in found):
        raise _unknown(prompt, found)
    return UnitTests(cases=tuple((str(test["input"]), str(test["output"])) for test in found))


def _unknown(prompt: Prompt, found: Any) -> ConfigError:
    return ConfigError(
        f"`metadata['tests']` of prompt {prompt.id} expected inputs with outputs, or test code in Python, but got "
        f"{found!r:.200}"
    )


def _from_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return [text]  # test code that begins with a list


def _compiles(code: str) -> bool:
    """Return whether test code is Python. Programs are never parsed here: hostile text may crash the parser."""
    try:
        ast.parse(code)
    except (SyntaxError, ValueError):  # ValueError: a null byte
        return False
    return True
