import pytest
import torch

from grpo_lit.lab.enumeration import Steps, prepare
from grpo_lit.lab.world import World
from grpo_lit.objectives import Objective


@pytest.fixture(scope="session")
def world() -> World:
    """Two prompts, tokens {end, 1, 2}, length up to 2: 3 prefixes and 7 completions of each prompt."""
    return World(vocabulary=3, max_length=2, prompts=2)


@pytest.fixture(scope="session")
def logits(world: World) -> torch.Tensor:
    return world.random_logits(scale=1.0, seed=3)


@pytest.fixture(scope="session")
def scores_of():
    """Grad log pi(y|x) of every completion [X Y D], by plain loops over tokens, without the lab's chain rule."""

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


@pytest.fixture(scope="session")
def through_theta():
    def through_theta(objective: Objective, steps: Steps, every: int) -> torch.Tensor:
        """Gradients of some steps, each alone, by autograd from the loss to the logits: no batching, no chain rule."""
        result = []
        for members in steps.members[::every]:
            batch, leaf = (
                prepare(objective, steps.batch.select(members)),
                steps.policies.current.clone().requires_grad_(),
            )
            table = leaf.log_softmax(-1)
            contexts = steps.world.token_contexts(batch.prompt_ids[batch.group], batch.token_ids, batch.lengths)
            entropy = torch.distributions.Categorical(logits=leaf).entropy()[contexts]
            loss = objective.loss(batch, table[contexts, batch.token_ids], entropy).loss
            result.append(-torch.autograd.grad(loss, leaf)[0].flatten())
        return torch.stack(result)

    return through_theta
