"""Exact gradients of the divergences that an estimator of a KL may or may not follow, by summing over everything."""

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_lit.lab.world import World


def sequence_kl_gradient(
    world: World, logits: Float[Tensor, "C V"], reference: Float[Tensor, "C V"]
) -> Float[Tensor, "C V"]:
    """Return the gradient of the KL between whole completions, its prefixes' own probability included.

    KL = mean_x sum_y pi(y) log(pi(y) / ref(y))
    """
    leaf = logits.detach().requires_grad_()
    return torch.autograd.grad(world.divergence(leaf, reference), leaf)[0]


def context_probability(world: World, logits: Float[Tensor, "C V"]) -> Float[Tensor, "C"]:
    """Return how often a completion passes each context: its prompt's share times its prefix's probability."""
    prompt = torch.arange(world.prompts).repeat_interleave(len(world.completions))
    completion = torch.arange(len(world.completions)).repeat(world.prompts)
    lengths = world.lengths[completion]
    contexts = world.token_contexts(prompt, world.tokens(completion), lengths)
    mass = world.completion_logprobs(logits).exp().flatten() / world.prompts
    return logits.new_zeros(world.contexts).index_add(0, contexts, mass.repeat_interleave(lengths))


def token_kl_gradient(
    world: World,
    logits: Float[Tensor, "C V"],
    reference: Float[Tensor, "C V"],
    sampler: Float[Tensor, "C V"] | None = None,
) -> Float[Tensor, "C V"]:
    """Return the gradient of the KL of the next token, prefixes held as they come.

    sum_c d(c) grad KL(pi(.|c) || ref(.|c))      d: how often the sampler passes c, a constant

    It lacks what a token does to the KL of later ones. With completions of one token it is the whole KL's gradient.

    Args:
        world: Prompts and completions.
        logits: The policy.
        reference: The reference.
        sampler: Who draws the prefixes; the policy by default.
    """
    leaf = logits.detach().requires_grad_()
    often = context_probability(world, logits if sampler is None else sampler).detach()
    policy, other = leaf.log_softmax(-1), reference.log_softmax(-1)
    return torch.autograd.grad((often * (policy.exp() * (policy - other)).sum(-1)).sum(), leaf)[0]
