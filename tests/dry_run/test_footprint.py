"""What is said of a model from its configuration is what a real one takes."""

from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache

from grpo_lit.dry_run.footprint import Footprint, Sizes, activations, cache_bytes
from grpo_lit.dry_run.workload import Workload
from grpo_lit.errors import ConfigError
from grpo_lit.module import GRPOModule
from grpo_lit.policy import offload
from grpo_lit.policy.adapter import LoRA
from grpo_lit.policy.checkpoint import load_model
from grpo_lit.policy.policy import Policy
from grpo_lit.policy.recompute import Recomputed, recompute

MAKE = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
}


@pytest.mark.parametrize("name", MAKE)
def test_parameters_gradients_and_states_are_exact(tiny_model_path: Path, name: str) -> None:
    told = Footprint.of(GRPOModule(str(tiny_model_path), optimizer=MAKE[name]))
    policy = Policy(load_model(str(tiny_model_path)))
    optimizer = MAKE[name](list(policy.parameters()))
    for parameter in policy.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    assert told.parameters.bytes() == sum(p.nbytes for p in policy.parameters())
    assert told.gradients.bytes() == sum(p.grad.nbytes for p in policy.parameters())
    assert told.states.bytes() == sum(state.nbytes for state in states)
    assert not told.assumed_states
    assert sum(told.layers) + told.rest == told.parameters.bytes() == 4 * told.parameters.elements
    assert len(told.layers) == 2


def test_states_of_an_optimizer_that_reads_values_are_a_guess_that_is_told(tiny_model_path: Path) -> None:
    told = Footprint.of(GRPOModule(str(tiny_model_path), optimizer=torch.optim.Adafactor))
    assert told.assumed_states
    assert told.states.bytes() == 2 * told.parameters.bytes()


def test_an_adapter_is_refused(tiny_model_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.adapter.*dry run"):
        Footprint.of(GRPOModule(str(tiny_model_path), adapter=LoRA()))


def test_rows_are_cut_into_chunks_of_equal_size() -> None:
    # 5 rows of 3 on 2 ranks: chunks of 3 and 2; on 4: 2, 2, 1, 0. Scalars are on all.
    sizes = Sizes.of([torch.empty(5, 3), torch.empty(())], like=[torch.Size((5, 3))])
    assert [sizes.bytes(2, rank) for rank in range(2)] == [4 * (9 + 1), 4 * (6 + 1)]
    assert [sizes.bytes(4, rank) for rank in range(4)] == [4 * (6 + 1), 4 * (6 + 1), 4 * (3 + 1), 4]
    assert sizes.bytes() == 64


@pytest.mark.parametrize("checkpointing", [False, "norms", True])
def test_activations_are_those_of_a_real_pass(tiny_model_path: Path, checkpointing: Recomputed) -> None:
    pack = Workload(400, 4, 20, 20, budget=8192, share_prefix=True).largest_pack()
    module = GRPOModule(str(tiny_model_path), gradient_checkpointing=checkpointing)
    Footprint.of(module)
    told = activations(module, pack).held
    policy = Policy(load_model(str(tiny_model_path))).train()
    recompute(policy.model, checkpointing)
    for parameter in policy.parameters():
        parameter.grad = torch.zeros_like(parameter)  # counted apart
    targets = torch.ones(len(pack.predictor), dtype=torch.long)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        policy(pack, targets, 1.0).logprobs.sum().backward()
    events = profiler.profiler.kineto_results.events()
    taken = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    measured = max(accumulate(size for _, size in taken))
    print(f"{told / 2**20:.1f} MiB told, {measured / 2**20:.1f} measured")
    assert measured / 1.25 < told < 1.25 * measured


def test_moved_activations_are_those_of_a_real_pass(tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, copies are made of the same tensors. Of 2 layers, the half of them is back at a time."""
    pack = Workload(400, 4, 20, 20, budget=8192, share_prefix=True).largest_pack()
    module = GRPOModule(str(tiny_model_path), activation_offload=True)
    Footprint.of(module)
    told, module.activation_offload = activations(module, pack), False
    Footprint.of(module)
    whole = activations(module, pack)
    copies: list[int] = []

    class Counted(offload._Moved):
        def __init__(self, copy: torch.Tensor, device: torch.device) -> None:
            super().__init__(copy, device)
            copies.append(copy.nbytes)

    monkeypatch.setattr(offload, "_Moved", Counted)
    policy = Policy(load_model(str(tiny_model_path))).train()
    policy.offloads = True
    recompute(policy.model, "norms")
    policy(pack, torch.ones(len(pack.predictor), dtype=torch.long), 1.0)
    assert told.moved == sum(copies)
    assert whole.moved == 0
    assert whole.held - told.moved <= told.held < whole.held - 0.25 * told.moved


@pytest.mark.parametrize(("architecture", "heads"), [("llama", 2), ("llama", 1), ("gemma2", 2)])
def test_the_cache_is_that_of_transformers(tiny_folder: Callable[..., Path], architecture: str, heads: int) -> None:
    """20 tokens of which the last is not read; Gemma 2 keeps a window of 8 in one of its layers."""
    folder = str(tiny_folder(architecture, num_key_value_heads=heads))
    kept = 7 + 19 if architecture == "gemma2" else 2 * 19  # over both layers
    assert cache_bytes(folder, 20, 2) == kept * heads * 32 * 2 * 2  # heads of 32, keys and values, 2 bytes
    model = load_model(folder)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.zeros(3, 19, dtype=torch.long), past_key_values=cache, logits_to_keep=1)
    held = sum(part.nbytes for layer in cache.layers for part in (layer.keys, layer.values))
    assert held == 3 * cache_bytes(folder, 20, 4)
