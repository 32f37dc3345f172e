"""Answers to held-out prompts."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from grpo_lit.errors import ConfigError
from grpo_lit.metrics.evaluation import prompt_figures
from grpo_lit.rollout import Group, Prompt, Sampling
from grpo_lit.rollouts.sampler import Sampler


@dataclass(frozen=True)
class Evaluation:
    """How held-out prompts are answered.

    Args:
        completions: k of avg@k, pass@j and maj@k, sampled at ``temperature``; 0 leaves only the greedy answer.
        temperature: Of the sampled answers.
        prompts_per_batch: Prompts handed to the engine at a time; the progress bar moves once for each.
        predictions: File that ``predict`` writes, one JSON object per prompt (``.jsonl``); what is there is replaced
            when all prompts are answered. ``null``: ``predictions.jsonl`` where the run is logged.

    Raises:
        ConfigError: For a temperature that samples nothing, or a file that would not be read as JSON lines.
    """

    completions: int = 0
    temperature: float = 1.0
    prompts_per_batch: int = 100
    predictions: str | None = None

    def __post_init__(self) -> None:
        """Refuse what would only show when everything is answered."""
        if self.completions and not self.temperature > 0:
            raise ConfigError(
                f"`data.evaluation.temperature` expected to be > 0, but got {self.temperature}: samples would all be "
                "the greedy answer, which is always measured; set `data.evaluation.completions` to 0 for it alone"
            )
        if self.predictions is not None and not self.predictions.endswith((".jsonl", ".ndjson")):
            raise ConfigError(
                f"`data.evaluation.predictions` expected a file that ends in .jsonl, but got {self.predictions!r}: it "
                "holds one JSON object per line"
            )


class EvaluationBatch:
    """Answers to some held-out prompts of one data set.

    No dataclass: Lightning copies those, and its ``bf16-true`` refuses frozen ones.

    Args:
        name: The data set's key under ``data.val``.
        places: Of the prompts in their set, over all ranks.
        greedy: One-answer groups at temperature 0.
        sampled: Groups of k answers; empty for k = 0.
        answers: What each of the k answers says, for the vote; empty for k = 0.
        correct: Name of the reward that says which are correct.
        domains: Domains that get an accuracy of their own.
    """

    def __init__(
        self,
        name: str,
        places: list[int],
        greedy: list[Group],
        sampled: list[Group],
        answers: list[list[Hashable | None]],
        correct: str,
        domains: Sequence[str] = (),
    ) -> None:
        self.name, self.places, self.greedy, self.sampled = name, places, greedy, sampled
        self.answers, self.correct, self.domains = answers, correct, domains

    def figures(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield each prompt's place and what is logged of it."""
        for i, place in enumerate(self.places):
            sampled, answers = (self.sampled[i], self.answers[i]) if self.sampled else (None, [])
            figures = prompt_figures(self.greedy[i], sampled, answers, self.correct)
            domain = self.greedy[i].prompt.domain
            yield place, figures | ({f"greedy/{domain}": figures["greedy"]} if domain in self.domains else {})


def answered(
    name: str,
    numbered: Sequence[tuple[int, Prompt]],
    sampler: Sampler,
    how: Evaluation,
    max_tokens: int,
    domains: Sequence[str] = (),
) -> EvaluationBatch:
    """Return the greedy and the sampled answers to some prompts of one held-out set.

    Args:
        name: The set's key under ``data.val``.
        numbered: The prompts with their places in the set.
        sampler: Draws and scores.
        how: How many answers, at what temperature.
        max_tokens: Most tokens of one answer.
        domains: Domains that get an accuracy of their own.
    """
    asked = [(prompt, 0) for _, prompt in numbered]
    greedy = sampler.whole_groups(asked, Sampling(0.0, max_tokens, 1))
    drawn = Sampling(how.temperature, max_tokens, how.completions)
    sampled = sampler.whole_groups(asked, drawn) if how.completions else []
    answers = [sampler.rewards.answers(group) for group in sampled]
    sampler.take_seconds()  # evaluation is no part of a step's time
    places, correct = [place for place, _ in numbered], sampler.rewards.correct
    return EvaluationBatch(name, places, greedy, sampled, answers, correct, domains)
