"""All rules with their thresholds: the block ``rules`` of callbacks.Health, and the options of scripts/diagnose."""

from dataclasses import dataclass, field, fields

from grpo_lit.errors import ConfigError
from grpo_lit.health.exploration import EntropyCollapse, EntropyExplosion, Starvation
from grpo_lit.health.length import LengthInflation, Truncation
from grpo_lit.health.optimization import ClipSaturation, DeadOptimizer, KLBlowUp, OffPolicyGap
from grpo_lit.health.reward import RewardCollapse, RewardHacking, RewardNoise, VerifierFailures
from grpo_lit.health.rule import Rule


@dataclass
class Rules:
    """What makes a run sick.

    Args:
        entropy_collapse: Nothing new is tried.
        entropy_explosion: The policy has turned to noise.
        zero_signal_starvation: Nearly no group teaches anything.
        reward_noise: A step says too little.
        reward_collapse: What had been learnt is lost.
        reward_hacking: The reward rises, what it stands for does not.
        verifier_failures: Rewards that cannot judge.
        length_inflation: Wrong answers grow faster than right ones.
        truncation: Most completions are cut.
        clip_saturation: The clip bounds stop much of the gradient.
        kl_blow_up: The policy has run away.
        dead_optimizer: Nothing moves.
        off_policy_gap: Engine and learner disagree.
        off: Names of rules that are not applied.
        more: Rules of your own.

    Raises:
        ConfigError: For a name in ``off`` that is no rule's.
    """

    entropy_collapse: EntropyCollapse = field(default_factory=EntropyCollapse)
    entropy_explosion: EntropyExplosion = field(default_factory=EntropyExplosion)
    zero_signal_starvation: Starvation = field(default_factory=Starvation)
    reward_noise: RewardNoise = field(default_factory=RewardNoise)
    reward_collapse: RewardCollapse = field(default_factory=RewardCollapse)
    reward_hacking: RewardHacking = field(default_factory=RewardHacking)
    verifier_failures: VerifierFailures = field(default_factory=VerifierFailures)
    length_inflation: LengthInflation = field(default_factory=LengthInflation)
    truncation: Truncation = field(default_factory=Truncation)
    clip_saturation: ClipSaturation = field(default_factory=ClipSaturation)
    kl_blow_up: KLBlowUp = field(default_factory=KLBlowUp)
    dead_optimizer: DeadOptimizer = field(default_factory=DeadOptimizer)
    off_policy_gap: OffPolicyGap = field(default_factory=OffPolicyGap)
    off: list[str] = field(default_factory=list)
    more: list[Rule] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Refuse names that turn nothing off."""
        names = [rule.name for rule in self.all()]
        for name in self.off:
            if name not in names:
                raise ConfigError(
                    f"`off` of the health rules expected names among {', '.join(names)}, but got {name!r}"
                )

    def all(self) -> list[Rule]:
        """Return the rules, those that are off too."""
        return [part for f in fields(self) if isinstance(part := getattr(self, f.name), Rule)] + self.more

    def active(self) -> list[Rule]:
        """Return the rules to apply."""
        return [rule for rule in self.all() if rule.name not in self.off]
