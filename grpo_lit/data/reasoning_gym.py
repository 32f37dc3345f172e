"""Endless verifiable problems from reasoning-gym, cut into splits that share no question."""

import contextlib
import difflib
import enum
import math
import os
import random
from collections.abc import Iterable, Iterator
from dataclasses import fields
from functools import cached_property
from typing import Any, Literal

import numpy as np
from lightning.fabric.utilities.rank_zero import rank_zero_warn

from grpo_lit.data.source import PromptSource, is_heldout
from grpo_lit.errors import ConfigError
from grpo_lit.rollout import Prompt

#: Tasks of reasoning-gym 0.1.25 whose items differ between two processes, since they walk a ``set`` of strings.
HASH_ORDERED_TASKS = frozenset({"isomorphic_strings", "polynomial_multiplication", "ransom_note", "word_ladder"})

#: Tasks of reasoning-gym 0.1.25 that seed numpy's global generator.
NUMPY_TASKS = frozenset({"pool_matrix"})

#: A split is given up after ``PATIENCE + PATIENCE_PER_QUESTION * found`` draws of it in a row without a new question.
#: Of M equally likely questions the last one is then missed with probability exp(-3), any earlier one far less, and a
#: split that has a question at all is given up with probability exp(-30).
PATIENCE = 30
PATIENCE_PER_QUESTION = 3

#: What a task raises for parameters it cannot work with (its own checks are asserts).
TASK_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)


class ReasoningGym(PromptSource):
    """One task of reasoning-gym: https://arxiv.org/abs/2505.24760.

    The train split keeps the task's own distribution, in which a small task repeats itself (each repeat has an id of
    its own); removing repeats would quietly make a task harder. Held-out questions are distinct, so that an accuracy
    over n of them is one over n problems. Each train prompt is made when it is asked for, the held-out ones all
    at the first access.

    Args:
        task: Name of a reasoning-gym data set, such as ``chain_sum``.
        size: How many prompts this source has.
        seed: Chooses the prompts; another seed draws others of the same split.
        split: ``train`` or ``heldout``: no question is in both.
        heldout_fraction: Share of all questions that is held out. Must be the same for both splits.
        parameters: The task's own settings, such as ``{min_terms: 2, max_terms: 2}``.
        domain: Name for per-domain KL and metrics (``reward/correct/<domain>``); the task's name by default.

    Raises:
        ConfigError: For an unknown task or parameter, or a task with fewer distinct questions than asked for.
    """

    def __init__(
        self,
        task: str,
        size: int,
        seed: int = 0,
        split: Literal["train", "heldout"] = "train",
        heldout_fraction: float = 0.1,
        parameters: dict[str, Any] | None = None,
        domain: str | None = None,
    ) -> None:
        self.task = task
        self.size = size
        self.seed = seed
        self.split = split
        self.heldout_fraction = heldout_fraction
        self.parameters = dict(parameters or {})
        self.domain = domain or task
        self.domains = (self.domain,)
        self._check_numbers()
        check_task(task, self.parameters)
        self._share = heldout_fraction if split == "heldout" else 1 - heldout_fraction
        #: Items per round: about one round holds ``size`` questions of this split.
        self._round_size = math.ceil(size / self._share)
        self._rounds: dict[int, Any] = {}
        with own_random_state(self.task):
            try:
                self._draw(0, 0)
            except TASK_ERRORS as error:
                raise ConfigError(
                    f"`parameters` expected settings that {task} can work with, but got {self.parameters}: {error!r}"
                ) from error

    def __len__(self) -> int:
        """Return ``size``."""
        return self.size

    def __getitem__(self, index: int) -> Prompt:
        """Return prompt ``index``, the same in every process."""
        if not 0 <= index < self.size:
            raise IndexError(f"`index` expected 0 to {self.size - 1}, but got {index}")
        entry = self._heldout[index] if self.split == "heldout" else self._train(index)
        return Prompt(
            id=self.prompt_id(index),
            question=entry["question"],
            answer=None if entry["answer"] is None else str(entry["answer"]),
            domain=self.domain,
            metadata={
                "task": self.task,
                "parameters": plain(self.parameters),
                "entry": plain(entry["metadata"]),
            },
        )

    def prompt_id(self, index: int) -> str:
        """Return the id of prompt ``index``, without making it."""
        return f"{self.task}/{self.split}/{index}"

    def _check_numbers(self) -> None:
        if self.size < 1:
            raise ConfigError(f"`size` expected at least 1, but got {self.size}")
        # Below a thousandth, the search for one question of the smaller split takes minutes.
        nothing_held_out = self.heldout_fraction == 0 and self.split == "train"
        if not 0.001 <= self.heldout_fraction <= 0.999 and not nothing_held_out:
            raise ConfigError(
                f"`heldout_fraction` expected 0.001 to 0.999 (or 0 where nothing is held out), but got "
                f"{self.heldout_fraction} for split {self.split}: give both splits the same fraction, such as 0.1"
            )
        for key in ("seed", "size"):
            if key in self.parameters:
                raise ConfigError(
                    f"`parameters.{key}` expected to be absent, but got {self.parameters[key]}: set `{key}` itself"
                )

    def _draw(self, round_: int, index: int) -> dict[str, Any]:
        """Return an item of the endless sequence that (task, parameters, seed, size) define.

        A round is a data set of its own because some tasks prepare exactly ``config.size`` items when built. Item i
        of a task is made from seed + i, so rounds lie ``_round_size`` seeds apart.
        """
        seed = self.seed + round_ * self._round_size
        if round_ not in self._rounds:
            self._rounds[round_] = build_task(self.task, self.parameters, seed=seed, size=self._round_size)
        # Some tasks (list_functions) draw from the process's generator instead of their own.
        random.seed(seed + index)
        return self._rounds[round_][index]

    def _train(self, index: int) -> dict[str, Any]:
        """Return the first item of slot ``index``, over the rounds, that is not held out.

        Slots share no item, so each is made alone, in any order.
        """
        rounds = math.ceil(PATIENCE / self._share)
        with own_random_state(self.task):
            for round_ in range(rounds):
                entry = self._draw(round_, index)
                if not is_heldout(entry["question"], self.heldout_fraction):
                    return entry
        raise ConfigError(
            f"`task` expected one with enough distinct questions, but {rounds} draws of {self.task} with parameters "
            f"{self.parameters} gave none that is not held out: widen `parameters` or lower `heldout_fraction`"
        )

    @cached_property
    def _heldout(self) -> list[dict[str, Any]]:
        """The first ``size`` distinct held-out questions of the sequence."""
        found: dict[str, dict[str, Any]] = {}
        draws = since_new = 0
        with own_random_state(self.task):
            while len(found) < self.size:
                entry = self._draw(*divmod(draws, self._round_size))
                draws += 1
                since_new += 1
                if is_heldout(entry["question"], self.heldout_fraction) and entry["question"] not in found:
                    found[entry["question"]] = entry
                    since_new = 0
                if since_new * self._share > PATIENCE + PATIENCE_PER_QUESTION * len(found):
                    raise ConfigError(
                        f"`size` expected at most the number of distinct held-out questions of {self.task}, but got "
                        f"{self.size}: {draws} draws with parameters {self.parameters} gave only {len(found)}. Lower "
                        "`size`, widen `parameters`, or raise `heldout_fraction` of both splits"
                    )
        return list(found.values())


def check_task(task: str, parameters: Iterable[str]) -> None:
    """Refuse an unknown task or parameter by naming the nearest valid ones, and warn of one that no seed can fix.

    Args:
        task: Name of a reasoning-gym data set.
        parameters: Names of the settings it is to be given.

    Raises:
        ConfigError: For an unknown name.
    """
    from reasoning_gym.factory import DATASETS

    # `composite` wants objects, which YAML cannot give it: a mixture is several sources.
    tasks = sorted(set(DATASETS) - {"composite"})
    if task not in tasks:
        raise ConfigError(f"`task` expected a reasoning-gym data set, but got {task!r}: {_nearest(task, tasks)}")
    names = [field.name for field in fields(DATASETS[task][1]) if field.name not in ("seed", "size")]
    for name in parameters:
        if name not in names:
            raise ConfigError(f"`parameters` expected settings of {task}, but got {name!r}: {_nearest(name, names)}")
    if task in HASH_ORDERED_TASKS and os.environ.get("PYTHONHASHSEED", "random") == "random":
        rank_zero_warn(
            f"reasoning-gym's {task} depends on the order of a set of strings, so that two processes make different "
            "prompts of one seed: set the environment variable PYTHONHASHSEED=0 for runs that resume exactly"
        )


def build_task(task: str, parameters: dict[str, Any], seed: int, size: int) -> Any:
    """Return reasoning-gym's data set, whose items are made on access.

    Args:
        task: A name that :func:`check_task` accepts.
        parameters: The task's own settings.
        seed: Of item 0.
        size: Items that may be asked for.
    """
    from reasoning_gym.factory import create_dataset

    return create_dataset(task, **parameters, seed=seed, size=size)


@contextlib.contextmanager
def own_random_state(task: str) -> Iterator[None]:
    """Leave the process's random generators as they were: some tasks seed or draw from them."""
    python_state = random.getstate()
    # Ten times as slow as the rest of an easy prompt, so only where needed.
    numpy_state = np.random.get_state() if task in NUMPY_TASKS else None
    try:
        yield
    finally:
        random.setstate(python_state)
        if numpy_state is not None:
            np.random.set_state(numpy_state)


def plain(value: Any) -> Any:
    """Return ``value`` made of plain types only, which any checkpoint can hold.

    Tuples stay tuples and integer keys stay integers, because some scorers compare with ``==``.
    """
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item) for item in value), key=repr)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, np.generic | np.ndarray):
        return plain(value.tolist())
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return str(value)


def _nearest(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"choose from {', '.join(names)}"
