"""Answers to held-out prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_lit.metrics.evaluation import evaluation_rates
from grpo_lit.metrics.rates import Rates
from grpo_lit.rollout import Group


@dataclass(frozen=True)
class Evaluation:
    """How held-out prompts are answered.

    Args:
        completions: k of avg@k, sampled at ``temperature``; 0 leaves only the greedy answer.
        temperature: Of the sampled answers.
        prompts_per_batch: Prompts handed to the engine at a time; the progress bar moves once for each.
    """

    completions: int = 0
    temperature: float = 1.0
    prompts_per_batch: int = 100


@dataclass(frozen=True)
class EvaluationBatch:
    """Answers to some held-out prompts of one data set.

    Attributes:
        name: The data set's key under ``data.val``.
        greedy: One-answer groups at temperature 0.
        sampled: Groups of k answers; empty for k = 0.
        k: Samples per prompt.
        domains: Domains that get an accuracy of their own.
    """

    name: str
    greedy: list[Group]
    sampled: list[Group]
    k: int
    domains: Sequence[str] = ()

    def rates(self) -> Rates:
        """Return accuracy, length and truncation rates."""
        return evaluation_rates(self.name, self.greedy, self.sampled, self.k, self.domains)
