"""What a rollout is made of, beyond one group for each prompt, and when it is drawn."""

from dataclasses import dataclass

from grpo_lit.data.curriculum import Curriculum
from grpo_lit.errors import ConfigError
from grpo_lit.rollouts.asynchronous import Asynchronous
from grpo_lit.rollouts.dynamic import DynamicSampling
from grpo_lit.rollouts.replay import Replay


@dataclass(frozen=True)
class RolloutOptions:
    """What a rollout is made of, and when it is drawn.

    Args:
        dynamic_sampling: Fill rollouts with groups that have signal. ``null``: train on whatever is drawn.
        replay: Let stored groups stand in for groups without signal. ``null``: no replay.
        curriculum: Ask prompts less often that all samples solve, or none. ``null``: ask each once an epoch.
        asynchronous: Draw rollouts ahead while the learner trains. ``null``: engine and learner take turns.
        engine_calls: Calls that a round of prompts is cut into; the rewards of one are computed while the next is
            drawn. Worth it where rewards are slow.

    Raises:
        ConfigError: For fewer than one call, or a curriculum beside a probe.
    """

    dynamic_sampling: DynamicSampling | None = None
    replay: Replay | None = None
    curriculum: Curriculum | None = None
    asynchronous: Asynchronous | None = None
    engine_calls: int = 1

    def __post_init__(self) -> None:
        """Refuse to draw nothing."""
        if self.engine_calls < 1:
            raise ConfigError(f"`data.rollout.engine_calls` expected to be >= 1, but got {self.engine_calls}")
        if self.curriculum and self.dynamic_sampling and self.dynamic_sampling.probe:
            raise ConfigError(
                "`data.rollout.curriculum` and `data.rollout.dynamic_sampling.probe` contradict: a few samples that "
                "agree do not say that a prompt is always solved, or never. Drop one"
            )
