"""The scorers that reasoning-gym's tasks bring along."""

import json
from collections.abc import Sequence
from typing import Any, Literal

from grpo_lit.data.reasoning_gym import TASK_ERRORS, build_task
from grpo_lit.errors import ConfigError
from grpo_lit.rewards.extract import answer_text, last_line, last_tagged
from grpo_lit.rewards.reward import Reward
from grpo_lit.rollout import Completion, Prompt

#: Tasks whose scorer hands the model's text to ``eval`` or sympy (it may run code, or never return), or expands a
#: number without bound (coin_flip: ``1e999999999``). Read and tried in reasoning-gym 0.1.25.
UNSAFE_TASKS = frozenset(
    {
        "binary_matrix",
        "coin_flip",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)


class ReasoningGymScore(Reward):
    """What the prompt's own reasoning-gym task says of the answer, 0 to 1: https://arxiv.org/abs/2505.24760.

    Many tasks give partial credit, so only a score of 1 is correct. Abstains on prompts of other sources. An answer
    that the task's scorer stumbles over is a wrong one: 0.

    Args:
        extract: Where the answer stands: ``answer_tag``, the last complete ``<answer>...</answer>``; ``last_line`` that
            is not blank; ``text``, all of the completion. Without it the score is 0.

    Raises:
        ConfigError: When called on a task whose scorer runs the model's text as code.
    """

    def __init__(self, extract: Literal["answer_tag", "last_line", "text"] = "answer_tag") -> None:
        self.extract = extract
        self._tasks: dict[str, Any] = {}

    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float | None]:
        """Return the task's score of each completion."""
        if self.problem(prompt):
            return [None] * len(completions)
        task = self._task(prompt.metadata["task"], prompt.metadata["parameters"])
        entry = {"question": prompt.question, "answer": prompt.answer, "metadata": prompt.metadata["entry"]}
        return [self._score(task, self._answer(answer_text(prompt, c), c.text), entry) for c in completions]

    def problem(self, prompt: Prompt) -> str | None:
        """Return what the prompt lacks of a reasoning-gym task.

        Raises:
            ConfigError: The task's scorer runs the model's text as code.
        """
        if not {"task", "parameters", "entry"} <= prompt.metadata.keys():
            return "no reasoning-gym task"
        self._task(prompt.metadata["task"], prompt.metadata["parameters"])
        return None

    def answer(self, prompt: Prompt, completion: Completion) -> str | None:
        """Return the text that the task's scorer is given."""
        found = self._answer(answer_text(prompt, completion), completion.text)
        return None if found is None else found.strip() or None

    def _answer(self, text: str, completion: str) -> str | None:
        if self.extract == "answer_tag":
            answer = last_tagged(text)
            return None if answer is None else answer.strip()
        return last_line(completion) if self.extract == "last_line" else completion

    def _score(self, task: Any, answer: str | None, entry: dict[str, Any]) -> float:
        if answer is None:
            return 0.0
        try:
            return float(task.score_answer(answer, entry))
        except TASK_ERRORS:  # prime_factorization, for one, raises on anything but numbers
            return 0.0

    def _task(self, name: str, parameters: dict[str, Any]) -> Any:
        if name in UNSAFE_TASKS:
            raise ConfigError(
                f"`ReasoningGymScore` expected a task whose scorer only reads the answer, but got {name}: its scorer "
                "evaluates the model's text, which may run code or never return. Use another reward or task"
            )
        key = json.dumps([name, parameters], sort_keys=True, default=str)
        if key not in self._tasks:
            self._tasks[key] = build_task(name, parameters, seed=0, size=1)
        return self._tasks[key]
