"""Rules on the optimizer's steps, and on the gap between who samples and who learns."""

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_lit.health.history import History, median, upper_quartile
from grpo_lit.health.rule import Finding, Rule


@dataclass
class ClipSaturation(Rule):
    """The clip bounds stop a large part of the gradient.

    Args:
        share: Sick above this upper quartile of ``optimization/clip_low`` plus ``clip_high``. Token clipping cuts about
            one in a thousand, sequence clipping 15 % (both in GSPO, https://arxiv.org/abs/2507.18071): twice that is no
            guard any more but the rule.
        window: Steps the quartile is over; the upper one, because the first update on a rollout clips nothing.
    """

    share: float = 0.3
    window: int = 10

    name = "clip_saturation"
    reads = ("optimization/clip_low", "optimization/clip_high")
    causes = (
        "a step moves the policy too far: the learning rate is high",
        "a rollout is used for too many updates",
        "the bounds are made for another surrogate: GSPO's 3e-4 is none for tokens or short answers",
    )
    checks = (
        "lower `model.optimizer` `lr`, or `data.num_updates` and `data.num_epochs`",
        "widen the surrogate's `low` and `high`",
        "look at optimization/ratio_max and system/staleness_mean",
    )

    def find(self, history: History) -> Sequence[Finding]:
        """Compare the share of cut tokens with the bound."""
        low, high = (history.newest(f"optimization/clip_{side}", self.window) for side in ("low", "high"))
        share = upper_quartile([round(a + b, 6) for a, b in zip(low, high, strict=False)])
        if not share > self.share:
            return []
        symptom = f"the clip bounds cut {share:.0%} of the tokens (upper quartile of {self.window} steps)"
        return [Finding("optimization/clip_high", share, self.share, f"{symptom}, above {self.share:.0%}")]


@dataclass
class KLBlowUp(Rule):
    """The policy has run away from its reference, or from the policy that sampled.

    Args:
        reference: Sick above this median of ``optimization/kl_reference`` [nats per token]: trained policies have .1 to
            1 nat of entropy, so half a nat is another distribution at most tokens.
        old: Sick above this upper quartile of ``optimization/kl_old`` [nats per token]. A token at DAPO's upper bound,
            a ratio of 1.28, has .033: three times that in the mean is far outside any clip range.
        window: Steps they are over.
    """

    reference: float = 0.5
    old: float = 0.1
    window: int = 10

    name = "kl_blow_up"
    reads = ("optimization/kl_reference", "optimization/kl_old")
    causes = (
        "the learning rate is too high",
        "`beta` is too low for a reference that shall hold the policy",
        "a few tokens that the reference holds for impossible: k3 grows exponentially with them",
    )
    checks = (
        "lower `model.optimizer` `lr`, or `data.num_updates` and `data.num_epochs`",
        "raise `model.objective.divergence` `beta`, or move the reference with callbacks.ReferenceRefresh",
        "see whether held-out accuracy fell with it; if it rose, the distance may be wanted",
    )

    def find(self, history: History) -> Sequence[Finding]:
        """Compare both divergences with their bounds."""
        seen = (
            ("optimization/kl_reference", median, self.reference),
            ("optimization/kl_old", upper_quartile, self.old),
        )
        values = [(name, statistic(history.newest(name, self.window)), bound) for name, statistic, bound in seen]
        return [
            Finding(name, value, bound, f"{name} is {value:.3g} nats per token, above {bound:g}")
            for name, value, bound in values
            if value > bound
        ]


@dataclass
class DeadOptimizer(Rule):
    """Steps are counted, and nothing moves.

    The learning rate is 0; the gradient is; minibatches are skipped; or the ratio to the old policy stays 1 although
    the weights have had steps since the rollout.

    Args:
        gradient: Sick up to this median of ``optimization/grad_norm``: Adam adds 1e-8 to its denominator, so that a
            smaller gradient moves less and less.
        skipped: Sick above this share of minibatches that ``optimization/skipped`` counts, of all drawn.
        ratio: Sick where ``optimization/ratio_max`` is no further than this from 1 at updates on older rollouts: two
            float32 forwards differ by 1e-6, a step at a learning rate of 1e-6 moves some token by 1e-3.
        window: Steps looked at: warm-up starts at 0 too, but not for five.
        drawn: Minibatches that must have been drawn before the share of skipped ones says anything.
    """

    gradient: float = 1e-8
    skipped: float = 0.5
    ratio: float = 1e-5
    window: int = 5
    drawn: int = 10

    name = "dead_optimizer"
    reads = (
        "optimization/lr",
        "optimization/skipped",
        "optimization/grad_norm",
        "optimization/ratio_max",
        "system/staleness_mean",
    )
    causes = (
        "the schedule has ended at 0",
        "no group has signal, or the gradient is not finite: the minibatches are skipped",
        "the learning rate was far too high: the policy answers nothing right any more",
        "updates are lost in rounding: bf16 weights do not move at 1e-6",
    )
    checks = (
        "look at optimization/lr and at the scheduler's `total_iters`",
        "look at exploration/zero_signal, solve_none and solve_all, and at `data.rewards`",
        "keep float32 master weights (`trainer.precision: 32-true` or `bf16-mixed`, or an optimizer of "
        "grpo_lit.optimizers)",
    )

    def find(self, history: History) -> Sequence[Finding]:
        """Return the first sign of standing still."""
        rates = history.newest("optimization/lr", self.window)
        if rates and max(rates) == 0:
            return [Finding("optimization/lr", 0.0, 0.0, f"optimization/lr has been 0 for {self.window} steps")]
        idle = history.newest("optimization/skipped", self.window) or list(history.points("optimization/skipped")[1])
        drawn = len(idle) + sum(idle)
        if drawn >= self.drawn and sum(idle) / drawn > self.skipped:
            symptom = f"{sum(idle):.0f} of the newest {drawn:.0f} minibatches could not move the weights"
            return [Finding("optimization/skipped", sum(idle) / drawn, self.skipped, symptom)]
        norm = median(history.newest("optimization/grad_norm", self.window))
        if norm <= self.gradient:
            symptom = f"optimization/grad_norm is {norm:.1g} (median of {self.window} steps)"
            return [Finding("optimization/grad_norm", norm, self.gradient, symptom)]
        return self._unmoved(history)

    def _unmoved(self, history: History) -> list[Finding]:
        ratios = dict(zip(*history.points("optimization/ratio_max"), strict=True))
        newest = zip(*(part[-4 * self.window :] for part in history.points("system/staleness_mean")), strict=True)
        later = [ratios[step] for step, age in newest if age > 0 and step in ratios][-self.window :]
        if len(later) < self.window or max(abs(ratio - 1) for ratio in later) > self.ratio:
            return []
        symptom = f"optimization/ratio_max has stayed 1 for {self.window} updates on older rollouts: no weight moves"
        return [Finding("optimization/ratio_max", max(later), 1 + self.ratio, symptom)]


@dataclass
class OffPolicyGap(Rule):
    """Engine and learner disagree on what was sampled (https://arxiv.org/abs/2510.26788).

    Args:
        kl: Sick above this median of ``system/mismatch_kl`` [nats per token]. k3 is half the squared log-prob gap: .01
            is a gap of .14, three times what bf16 engines differ by (.02 to .05).
        ess: Sick below this median of ``system/ess``: half of the sampled tokens are wasted on the correction.
        window: Steps a median is over.
    """

    kl: float = 0.01
    ess: float = 0.5
    window: int = 10

    name = "off_policy_gap"
    reads = ("system/mismatch_kl", "system/ess")
    causes = (
        "the engine samples with other weights: a sync that failed, or rollouts that are too old",
        "the engine's precision or kernels: quantised, bf16, another attention",
        "sampling settings that the learner does not know: temperature, top-k, top-p",
    )
    checks = (
        "look at system/staleness_mean and for the warning `engine and learner disagree after the weight sync`",
        "sample in a higher precision, or correct for it: `model.objective.corrections` with TruncatedIS",
        "lower `data.num_updates`, or the maximum age of replayed and carried groups",
    )

    def find(self, history: History) -> Sequence[Finding]:
        """Compare divergence and effective sample size with their bounds."""
        kl = median(history.newest("system/mismatch_kl", self.window))
        ess = median(history.newest("system/ess", self.window))
        found = []
        if kl > self.kl:
            symptom = f"system/mismatch_kl is {kl:.3g} nats per token, above {self.kl:g}"
            found.append(Finding("system/mismatch_kl", kl, self.kl, symptom))
        if ess < self.ess:
            symptom = f"system/ess is {ess:.2f}, below {self.ess:g}"
            found.append(Finding("system/ess", ess, self.ess, symptom))
        return found
