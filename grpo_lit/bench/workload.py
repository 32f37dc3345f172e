"""The work that every arm does: the same weights, the same rollout."""

import copy
import math
from dataclasses import dataclass, replace

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from grpo_lit.batch import TokenBatch
from grpo_lit.bench.settings import Preset, Settings
from grpo_lit.errors import ConfigError
from grpo_lit.lab.recipes import load_objective
from grpo_lit.objectives import Objective
from grpo_lit.objectives.reductions import Counts
from grpo_lit.policy.recompute import recompute
from grpo_lit.rollout import Completion, Group, Prompt

#: Ids below are special tokens, which no completion holds.
FIRST_TOKEN = 3
#: Standard deviation of the reference's weights around the policy's: their KL has a gradient.
REFERENCE_DISTANCE = 2e-3


@dataclass(frozen=True)
class Models:
    """The weights of a run.

    Attributes:
        policy: Is trained.
        reference: Frozen, other weights; ``None`` where the recipe pays no KL.
    """

    policy: PreTrainedModel
    reference: PreTrainedModel | None


def make_models(settings: Settings, needs_reference: bool) -> Models:
    """Return seeded random weights: time and memory do not depend on what they are."""
    torch.manual_seed(settings.seed)
    policy = AutoModelForCausalLM.from_config(
        settings.model_config(), dtype=torch.float32, attn_implementation="sdpa"
    ).to(settings.device)
    recompute(policy, settings.gradient_checkpointing)
    reference = None
    if needs_reference:
        reference = copy.deepcopy(policy).requires_grad_(False).eval()
        for parameter in reference.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=REFERENCE_DISTANCE)
    return Models(policy.train(), reference)


def make_groups(shape: Preset, groups: int, group_size: int, vocabulary: int, seed: int) -> list[Group]:
    """Return rollouts of random tokens; group n is the same however many groups there are.

    Rewards alternate, so that every completion has an advantage and none can be skipped.
    """
    made = []
    for n in range(groups):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + n)
        lengths = shape.draw(group_size, generator)
        prompt, *completions = (
            tuple(torch.randint(FIRST_TOKEN, vocabulary, (k,), generator=generator).tolist())
            for k in (shape.prompt, *lengths)
        )
        samples = tuple(Completion(c, (-math.log(vocabulary),) * len(c), "", "stop", 0) for c in completions)
        rewards: list[float | None] = [float(i % 2) for i in range(group_size)]
        made.append(Group(Prompt(str(n), "", token_ids=prompt), 0, samples, {"answer": rewards}, rewards))
    return made


def make_batch(settings: Settings, groups: int) -> TokenBatch:
    """Return the rollout of one optimizer step."""
    vocabulary = settings.model_config().vocab_size
    made = make_groups(settings.shape, groups, settings.group_size, vocabulary, settings.seed)
    return TokenBatch.from_groups(made, temperature=1.0, score_names=["answer"])


def make_objective(settings: Settings) -> Objective:
    """Return the recipe's objective.

    Raises:
        ConfigError: It asks for more than one gradient.
    """
    objective = load_objective(settings.recipe, settings.shape.cap)
    if objective.needs_old_entropy or objective.needs_reference_before_advantages:
        raise ConfigError(
            f"`recipe` expected one that scores no rollout beforehand, but got {settings.recipe.name}: its selection "
            "or KL in the reward is no part of the gradient measured here"
        )
    return objective


def with_weights(objective: Objective, batch: TokenBatch) -> TokenBatch:
    """Return the rollout with advantages and the reduction's weights, on one process."""
    batch = objective.filtered(replace(batch, advantages=objective.advantages(batch, _alone)))
    return replace(batch, weights=objective.weights(batch, Counts.of(batch, _alone)))


def _alone(values: torch.Tensor) -> torch.Tensor:
    return values
