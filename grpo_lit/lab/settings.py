"""What follows from the lab's options: prompts, completions and policies."""

from jaxtyping import Float
from torch import Tensor

from grpo_lit.lab.options import Options
from grpo_lit.lab.world import Policies, World


class Settings(Options):
    """Options, and the world they describe."""

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
