import pytest
import torch

from grpo_lit.lab.world import World


@pytest.fixture(scope="session")
def world() -> World:
    """Two prompts, tokens {end, 1, 2}, length up to 2: 3 prefixes and 7 completions of each prompt."""
    return World(vocabulary=3, max_length=2, prompts=2)


@pytest.fixture(scope="session")
def logits(world: World) -> torch.Tensor:
    return world.random_logits(scale=1.0, seed=3)


@pytest.fixture(scope="session")
def scores_of():
    """Grad log pi(y|x) of every completion [X Y D], by plain loops over its tokens: the lab's chain rule has no part in it."""

    def scores_of(world: World, logits: torch.Tensor) -> torch.Tensor:
        probs = logits.softmax(-1)
        result = torch.zeros(world.prompts, len(world.completions), *logits.shape, dtype=torch.float64)
        for x in range(world.prompts):
            for y, completion in enumerate(world.completions):
                for t, token in enumerate(completion):
                    context = x * len(world.prefixes) + world.prefixes.index(completion[:t])
                    result[x, y, context] -= probs[context]
                    result[x, y, context, token] += 1
        return result.flatten(2)

    return scores_of
