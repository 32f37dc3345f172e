"""Rules on what the policy still tries."""

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_lit.health.history import History, median
from grpo_lit.health.rule import Finding, Rule


@dataclass
class EntropyCollapse(Rule):
    """The policy has nearly stopped to try anything (https://arxiv.org/abs/2505.22617).

    Args:
        low: Sick below this median of ``exploration/entropy`` [nats]. A token with two choices has .1 nats where the
            likelier one has 98 %: the samples of a group differ in few places, and soon in none.
        window: Steps the median is over. A collapse is fast: five steps are enough to tell it from noise.
    """

    low: float = 0.1
    window: int = 5

    name = "entropy_collapse"
    reads = ("exploration/entropy",)
    causes = (
        "the learning rate is high, or a rollout is used for too many updates",
        "the upper clip bound keeps rare tokens down",
        "the task is nearly solved, and there is little left to try",
    )
    checks = (
        "lower `model.optimizer` `lr`",
        "raise the surrogate's `high` (recipe dapo)",
        "add callbacks.EntropyTarget",
        "see whether exploration/group_diversity fell with it",
    )

    def find(self, history: History) -> Sequence[Finding]:
        """Compare the newest entropies with the bound."""
        entropy = median(history.newest("exploration/entropy", self.window))
        if not entropy < self.low:
            return []
        symptom = f"exploration/entropy is {entropy:.3g} nats (median of {self.window} steps), below {self.low:g}"
        return [Finding("exploration/entropy", entropy, self.low, symptom)]


@dataclass
class EntropyExplosion(Rule):
    """The policy has turned to noise.

    Args:
        high: Sick above this median of ``exploration/entropy`` [nats], and
        factor: sick only above so many times its median at the start: from a language model at temperature 1 more than
            three nats per token (20 equally likely ones) are no text, unless the run began so.
        window: Steps a median is over; short, since weights that are destroyed stay so.
    """

    high: float = 3.0
    factor: float = 1.5
    window: int = 3

    name = "entropy_explosion"
    reads = ("exploration/entropy",)
    causes = (
        "the learning rate is far too high and has destroyed the weights",
        "the entropy bonus outweighs the reward",
        "the gradient is dominated by a few tokens of nearly no probability",
    )
    checks = (
        "lower `model.optimizer` `lr`",
        "read samples: are they still text?",
        "lower `model.objective.entropy_coefficient` or the `maximum` of callbacks.EntropyTarget",
        "go on from a checkpoint before this step",
    )

    def find(self, history: History) -> Sequence[Finding]:
        """Compare the newest entropies with the bound and with the first ones."""
        entropy = median(history.newest("exploration/entropy", self.window))
        start = history.oldest("exploration/entropy", 1)
        if not (entropy > self.high and entropy > self.factor * start[0]):
            return []
        symptom = (
            f"exploration/entropy is {entropy:.3g} nats (median of {self.window} steps), above {self.high:g}; "
            f"it began at {start[0]:.3g}"
        )
        return [Finding("exploration/entropy", entropy, self.high, symptom)]


@dataclass
class Starvation(Rule):
    """Nearly no group has a signal: all its rewards are equal, and nothing is learnt from it (DAPO, 2503.14476).

    Args:
        share: Sick where a smaller share of the groups has signal, in the median: ``exploration/accepted`` (by samples)
            under dynamic sampling, else one minus ``exploration/zero_signal``. At one in five a rollout costs five
            times what it teaches, and a gradient of 32 prompts has the noise of six.
        window: Steps the median is over: single rollouts vary by their prompts.
    """

    share: float = 0.2
    window: int = 10

    name = "zero_signal_starvation"
    reads = ("exploration/accepted", "exploration/zero_signal", "exploration/solve_all", "exploration/solve_none")
    causes = (
        "where most groups are solved by no sample: the task is too hard, or the verifier does not find the answer",
        "where most are solved by all: the task is too easy by now",
        "where neither: the policy repeats itself, or shaped rewards are all alike",
    )
    checks = (
        "look at exploration/solve_none and solve_all",
        "run scripts/audit_verifier on completions",
        "mix in easier or harder prompts, or use configs/rollout/curriculum.yaml",
        "use configs/rollout/dynamic.yaml and raise `data.sampling.completions`",
    )

    def find(self, history: History) -> Sequence[Finding]:
        """Compare the share of groups with signal with the bound."""
        metric = "exploration/accepted" if history.names("exploration/accepted") else "exploration/zero_signal"
        value = median(history.newest(metric, self.window))
        idle = metric == "exploration/zero_signal"
        share = round(1 - value, 6) if idle else value
        if not share < self.share:
            return []
        sides = {
            side: median(history.newest(f"exploration/{side}", self.window)) for side in ("solve_none", "solve_all")
        }
        seen = ", ".join(f"{side} {share:.0%}" for side, share in sides.items() if share == share)
        symptom = f"{share:.0%} of the groups have signal (median of {self.window} steps), below {self.share:.0%}"
        threshold = round(1 - self.share, 6) if idle else self.share
        return [Finding(metric, value, threshold, f"{symptom}; {seen}" if seen else symptom)]
