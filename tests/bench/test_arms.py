"""The benchmarked learner is the one of a run."""

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_lit.bench.arms import OurArm
from grpo_lit.bench.settings import Settings


class Casts(TorchDispatchMode):
    """Counts how often each of some float32 weights is copied to bf16."""

    def __init__(self, weights: dict[int, str]) -> None:
        super().__init__()
        self.weights, self.counts = weights, Counter[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") == torch.bfloat16:
            self.counts.update([self.weights[args[0].data_ptr()]] if args[0].data_ptr() in self.weights else [])
        return func(*args, **kwargs)


def test_a_weight_is_cast_once_in_a_step_and_a_frozen_one_before_it(settings: Settings) -> None:
    settings.precision, settings.budget = "bf16", 20
    arm = OurArm(settings)
    arm.prepare(2)
    models = {"policy": arm.models.policy, "reference": arm.models.reference}
    weights = {p.data_ptr(): f"{of}.{name}" for of, model in models.items() for name, p in model.named_parameters()}
    with Casts(weights) as casts:
        arm.step(lambda: None)
    # Budget 20 makes many micro-batches of two groups of eight. Seven products in each of two layers, and the head,
    # whose weight the embedding shares; of the reference that one alone, since its rows are looked up in float32.
    assert set(casts.counts.values()) == {1}
    assert sorted(name for name in casts.counts if name.startswith("reference")) == [
        "reference.model.embed_tokens.weight"
    ]
    assert len(casts.counts) == 2 * 7 + 1 + 1
