"""Rules on what is rewarded, and whether it is what was wanted."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from grpo_lit.health.history import History, median, upper_quartile
from grpo_lit.health.rule import Finding, Rule
from grpo_lit.metrics.names import COUNTERS, TAKEN

_COUNTER = re.compile(rf"reward/.+_({'|'.join(COUNTERS)})")
_REWARD = re.compile(rf"reward/(?!({'|'.join(TAKEN)})$)[^/]+")
_ACCURACY = re.compile(r"val/[^/]+/(greedy|avg@\d+)")


@dataclass
class RewardNoise(Rule):
    """Accuracy jumps from step to step by more than learning could move it.

        noise = 1.4826 median_t |x_t - x_(t-1)| / sqrt(2)        x = reward/correct

    is a robust standard deviation of one step's accuracy that a trend does not change.

    Args:
        noise: Sick above. The accuracy of n independent prompts has a standard deviation of at most .5 / sqrt(n): above
            .2 a step says as much as six prompts, and a gain of ten points needs eight steps before and after to be
            seen.
        window: Differences the median is over.
    """

    noise: float = 0.2
    window: int = 20

    name = "reward_noise"
    reads = ("reward/correct",)
    causes = (
        "a rollout has too few prompts",
        "prompts of very different difficulty take turns",
        "the verifier says different things of equal answers",
    )
    checks = (
        "raise `data.prompts_per_rollout`: more prompts tell more than more completions of each",
        "compare domains: does one of them jump?",
        "run scripts/audit_verifier on completions",
    )

    def find(self, history: History) -> Sequence[Finding]:
        """Compare the noise of the newest steps with the bound."""
        values = history.newest("reward/correct", self.window + 1)
        differences = [abs(after - before) for before, after in pairwise(values)]
        noise = 1.4826 * median(differences) / 2**0.5
        if not noise > self.noise:
            return []
        symptom = f"reward/correct jumps by {noise:.2f} from step to step (robust deviation), above {self.noise:g}"
        return [Finding("reward/correct", noise, self.noise, symptom)]


@dataclass
class RewardCollapse(Rule):
    """What had been learnt is lost.

    Args:
        share: Sick where the newest median of ``reward/correct`` is below this share of the best one before, and
        drop: lower by at least this: half of what was solved and fifteen points are more than rollouts of a few dozen
            prompts differ by.
        window: Steps a median is over.
        reach: How many steps back the best one may lie.
        idle: Minibatches in a row without a single right sample, as ``optimization/skipped`` counts them within a step,
            after which accuracy is lost wherever it came from: the run is about to end, and no window will be filled.
    """

    share: float = 0.5
    drop: float = 0.15
    window: int = 5
    reach: int = 200
    idle: int = 10

    name = "reward_collapse"
    reads = ("reward/correct", "exploration/solve_none", "optimization/skipped")
    causes = (
        "the learning rate is too high and has destroyed what the weights knew",
        "the rollouts are too old, or engine and learner disagree",
        "the data have changed: a curriculum, a mixture, the end of an epoch",
    )
    checks = (
        "read samples: what do the answers look like now?",
        "lower `model.optimizer` `lr`, or `data.num_updates` and `data.num_epochs`",
        "look at system/mismatch_kl and optimization/grad_norm just before",
        "go on from a checkpoint before this step",
    )

    def find(self, history: History) -> Sequence[Finding]:
        """Compare the newest accuracy with the best one."""
        now = median(history.newest("reward/correct", self.window))
        known = min(len(history.points("reward/correct")[1]), self.reach)
        starts = range(self.window, known - self.window + 1, self.window)
        best = max((median(history.newest("reward/correct", self.window, before)) for before in starts), default=0.0)
        if not (now < self.share * best and round(best - now, 6) >= self.drop):
            return self._nothing_left(history)
        symptom = f"reward/correct fell from {best:.1%} to {now:.1%} (medians of {self.window} steps)"
        return [Finding("reward/correct", now, self.share * best, symptom)]

    def _nothing_left(self, history: History) -> list[Finding]:
        skipped = sum(history.newest("optimization/skipped", 1))
        before = max(history.points("reward/correct")[1][-self.reach : -1], default=0.0)
        if history.newest("exploration/solve_none", 1) != [1.0] or skipped < self.idle or before == 0:
            return []
        symptom = f"no sample is right in {skipped:.0f} minibatches in a row; reward/correct had been {before:.1%}"
        return [Finding("reward/correct", 0.0, self.share * before, symptom)]


@dataclass
class RewardHacking(Rule):
    """The reward rises and what it stands for does not (Goodhart's law; https://arxiv.org/abs/2210.10760).

    Either training accuracy rises while no held-out one does, over the newest ``2 * validations`` validations, the
    newer half against the older; or a reward beside the one that says correct rises while ``reward/correct`` stands
    still, over ``span`` steps. A format that is learnt first and then pays is not called sick.

    Args:
        train_gain: Rise of ``reward/correct`` that held-out accuracy should have shared: fifteen points are more than
            three times the noise of two medians over some hundred questions.
        flat: Gain up to which held-out accuracy stands still.
        other_gain: Rise of another reward's mean that ``reward/correct`` should have shared; for rewards from 0 to 1.
        paid: Gain of ``reward/correct`` at any time of the span from which on that rise has paid: more than the noise
            of the best of some medians.
        solved: Accuracy from which on there is no room left to rise, and nothing is called sick.
        validations: Validations of each half; three, so that one unlucky one cannot decide.
        span: Steps, in tens, between the two windows of ten in which other rewards are compared: formats take a few
            dozen steps to be learnt, and pay after that.
    """

    train_gain: float = 0.15
    flat: float = 0.02
    other_gain: float = 0.2
    paid: float = 0.05
    solved: float = 0.9
    validations: int = 3
    span: int = 50

    name = "reward_hacking"
    reads = ("reward/", "val/")
    causes = (
        "the policy has found answers that the reward takes and a person would not",
        "it has learnt the training prompts by heart, or a trait that held-out ones do not share",
        "a reward for form outweighs the one for content",
    )
    checks = (
        "read the best rewarded samples",
        "run scripts/audit_verifier on completions",
        "set `conditional: true` on rewards for form, or lower their `weight`",
        "add prompts, a KL to the reference (recipe grpo), or stop at the best validation",
    )

    def find(self, history: History) -> Sequence[Finding]:
        """Compare training with held-out accuracy, and other rewards with accuracy."""
        return [*self._held_out(history), *self._other_rewards(history)]

    def _held_out(self, history: History) -> list[Finding]:
        k, found = self.validations, list[tuple[float, float, str]]()
        for name in filter(_ACCURACY.fullmatch, history.names("val/")):
            steps, values = history.points(name)
            if len(steps) < 2 * k:
                return []
            before = median(history.between("reward/correct", steps[-2 * k], steps[-k - 1]))
            train_gain = round(median(history.between("reward/correct", steps[-k], steps[-1])) - before, 6)
            now = median(values[-k:])
            gain = round(now - median(values[-2 * k : -k]), 6)
            if not (train_gain > self.train_gain and gain <= self.flat and now < self.solved):
                return []
            found.append((gain, train_gain, name))
        if not found:
            return []
        gain, train_gain, name = max(found)
        symptom = f"over {2 * k} validations reward/correct rose by {train_gain:.1%}, {name} by {gain:.1%}"
        return [Finding(name, gain, self.flat, symptom)]

    def _other_rewards(self, history: History) -> list[Finding]:
        def medians(name: str) -> list[float]:
            return [median(history.newest(name, 10, before)) for before in range(0, self.span + 1, 10)]

        now, *_, start = correct = medians("reward/correct")
        best = round(max(correct) - start, 6)
        if not (now < self.solved and best <= self.paid):
            return []
        names = [n for n in history.names("reward/") if _REWARD.fullmatch(n) and not _COUNTER.fullmatch(n)]
        courses = {name: medians(name) for name in names}
        gains = {name: round(course[0] - course[-1], 6) for name, course in courses.items()}
        told = f"in {self.span} steps, reward/correct by {best:.2f} at best"
        return [
            Finding(name, rise, self.other_gain, f"{name} rose by {rise:.2f} {told}")
            for name, rise in gains.items()
            if rise > self.other_gain
        ]


@dataclass
class VerifierFailures(Rule):
    """A reward cannot judge a part of what it is asked.

    Args:
        share: Sick above this upper quartile of any ``reward/<name>_<counter>``, as a share of the samples. At one in a
            hundred a group of eight meets one in every twelfth case, and an answer given up on counts as wrong.
        window: Steps the quartile is over; the upper one, because failures come in bursts.
    """

    share: float = 0.01
    window: int = 10

    name = "verifier_failures"
    reads = ("reward/",)
    causes = (
        "`_unreadable`: gold answers that the reward cannot read",
        "`_killed`, `_timeouts`: answers that take too long to compare, or a machine that is too slow",
        "`_refused`, `_broken`: answers made to break the verifier; the policy may have learnt to",
    )
    checks = (
        "run scripts/audit_verifier on completions and gold answers",
        "leave out or mend the rows that cannot be judged",
        "raise the reward's time limit, or give its processes more cores",
    )

    def find(self, history: History) -> Sequence[Finding]:
        """Compare every counter with the bound."""
        shares = {
            name: upper_quartile(history.newest(name, self.window))
            for name in filter(_COUNTER.fullmatch, history.names("reward/"))
        }
        return [
            Finding(name, share, self.share, f"{name} is {share:.1%} of the samples, above {self.share:.1%}")
            for name, share in shares.items()
            if share > self.share
        ]
