"""What the lab can be asked for."""

from dataclasses import dataclass
from pathlib import Path

from jaxtyping import Float
from torch import Tensor

from grpo_lit.lab.world import Policies, World


@dataclass
class Settings:
    """Settings.

    Attributes:
        vocabulary: Tokens, the end token included.
        max_length: Most tokens of a completion.
        prompts: Prompts, each harder than the last.
        group_size: G, the completions of a group.
        logit_scale: Standard deviation of the policy's logits.
        staleness: Standard deviation of the old policy's logits around the current one's.
        mismatch: Standard deviation of the engine's logits around the learner's.
        reference_distance: Standard deviation of the reference's logits around the policy's, in the KL table.
        dynamic_sampling: Replace groups whose rewards are all equal by groups of a newly drawn prompt.
        seed: Seed of all logits.
        json: File to write settings and rows to.
        csv: File to write rows to.
        plot: Image to draw (png, svg, pdf).
    """

    vocabulary: int = 3
    max_length: int = 3
    prompts: int = 2
    group_size: int = 4
    logit_scale: float = 1.0
    staleness: float = 0.3
    mismatch: float = 0.3
    reference_distance: float = 0.5
    dynamic_sampling: bool = False
    seed: int = 0
    json: Path | None = None
    csv: Path | None = None
    plot: Path | None = None

    def world(self) -> World:
        """Return the prompts and completions."""
        return World(self.vocabulary, self.max_length, self.prompts)

    def current(self, world: World) -> Float[Tensor, "C V"]:
        """Return the policy being trained."""
        return world.random_logits(self.logit_scale, self.seed)

    def near(self, world: World, distance: float, index: int) -> Float[Tensor, "C V"]:
        """Return another policy: the current one plus normal noise of its own."""
        return self.current(world) + world.random_logits(distance, self.seed + index)

    def policies(self, world: World, reference: Float[Tensor, "C V"]) -> dict[str, Policies]:
        """Return who draws and who is old, by scenario."""
        current, old = self.current(world), self.near(world, self.staleness, 1)
        engine = self.near(world, self.mismatch, 2)
        return {
            "on_policy": Policies(current, current, None, reference),
            "stale": Policies(current, old, old, reference),
            "mismatch": Policies(current, engine, None, reference),
        }
