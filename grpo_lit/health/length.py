"""Rules on how long completions are."""

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_lit.health.history import History, median
from grpo_lit.health.rule import Finding, Rule


@dataclass
class LengthInflation(Rule):
    """Wrong answers grow faster than right ones (Dr. GRPO, https://arxiv.org/abs/2503.20783).

    A policy that learns to think longer grows on both sides; one that is punished less per token for longer wrong
    answers grows on one.

    Args:
        growth: Sick above this many times the median of ``length/incorrect`` at the start: less is within what formats
            and a change of the prompts' mixture do.
        excess: Sick only if wrong answers grew by this factor more than right ones.
        window: Steps a median is over.
    """

    growth: float = 1.5
    excess: float = 1.3
    window: int = 10

    name = "length_inflation"
    reads = ("length/incorrect", "length/correct")
    causes = (
        "the reduction punishes a token of a long wrong answer less than one of a short one (SequenceMean)",
        "hopeless prompts: the policy goes on until the limit",
        "the verifier misses answers that stand far back",
    )
    checks = (
        "use ConstantLength or TokenMean (recipes dr_grpo, dapo)",
        "look at length/truncated; filter or punish overlong answers",
        "read long wrong samples",
    )

    def find(self, history: History) -> Sequence[Finding]:
        """Compare the growth of both sides."""
        grown = {}
        for side in ("incorrect", "correct"):
            name = f"length/{side}"
            start, now = history.oldest(name, self.window), history.newest(name, self.window)
            grown[side] = median(now) / max(median(start), 1.0)
        wrong, right = grown["incorrect"], grown["correct"]
        if not (wrong > self.growth and wrong > self.excess * right):
            return []
        symptom = f"wrong answers are {wrong:.2f} times as long as at the start, right ones {right:.2f} times"
        return [Finding("length/incorrect", wrong, self.growth, symptom)]


@dataclass
class Truncation(Rule):
    """Most completions are cut before they end, and are scored by what they had not said.

    Args:
        share: Sick above this median of ``length/truncated``: where most are cut, the reward is about length.
        window: Steps the median is over.
    """

    share: float = 0.5
    window: int = 10

    name = "truncation"
    reads = ("length/truncated",)
    causes = (
        "`data.sampling.max_tokens` is too low for the task",
        "the policy no longer ends its answers",
        "the template lacks the end token that the model was trained with",
    )
    checks = (
        "read samples: are they cut in mid-thought, or do they repeat themselves?",
        "raise `data.sampling.max_tokens`",
        "leave cut answers out (OverlongFilter) or punish them softly (recipe dapo)",
    )

    def find(self, history: History) -> Sequence[Finding]:
        """Compare the share of cut completions with the bound."""
        share = median(history.newest("length/truncated", self.window))
        if not share > self.share:
            return []
        symptom = f"length/truncated is {share:.0%} (median of {self.window} steps), above {self.share:.0%}"
        return [Finding("length/truncated", share, self.share, symptom)]
