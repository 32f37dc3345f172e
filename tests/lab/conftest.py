"""What the lab's tests share.

Nothing of grpo_lit is imported at the top: shapes are checked in modules that are imported after this file only.
"""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread(_same_start: None) -> None:
    """Hand tiny tensors to no second thread, which costs more than the work; every test starts with its own number."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def world():
    """Two prompts, tokens {end, 1, 2}, length up to 2: 3 prefixes and 7 completions of each prompt."""
    from grpo_lit.lab.world import World

    return World(vocabulary=3, max_length=2, prompts=2)


@pytest.fixture(scope="session")
def logits(world) -> torch.Tensor:
    return world.random_logits(scale=1.0, seed=3)


@pytest.fixture(scope="session")
def scores_of():
    """Grad log pi(y|x) of every completion [X Y D], by plain loops over tokens, without the lab's chain rule."""

    def scores_of(world, logits: torch.Tensor) -> torch.Tensor:
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
    """Gradients of some steps, each alone, by autograd from the loss to the logits: no batching, no chain rule."""
    from grpo_lit.lab.enumeration import prepare

    def through_theta(objective, steps, every: int) -> torch.Tensor:
        result = []
        for members in steps.members[::every]:
            batch = prepare(objective, steps.batch.select(members))
            leaf = steps.policies.current.clone().requires_grad_()
            contexts = steps.world.token_contexts(batch.prompt_ids[batch.group], batch.token_ids, batch.lengths)
            logprobs = leaf.log_softmax(-1)[contexts, batch.token_ids]
            entropy = torch.distributions.Categorical(logits=leaf).entropy()[contexts]
            loss = objective.loss(batch, logprobs, entropy).loss
            result.append(-torch.autograd.grad(loss, leaf)[0].flatten())
        return torch.stack(result)

    return through_theta
