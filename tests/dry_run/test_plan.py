"""Memory and collectives of a step, by hand."""

import pytest
import torch

from grpo_lit.dry_run.footprint import Activations, Footprint, Sizes
from grpo_lit.dry_run.plan import Copies, Sharding, plan
from grpo_lit.dry_run.workload import Workload

#: 2 layers of 6 rows of 10 floats, and 4 rows of embeddings: 480 and 160 bytes. Adam: twice that, and 3 steps.
LAYER, REST = torch.Size((6, 10)), torch.Size((4, 10))
PARAMETERS = Sizes(((LAYER, 4), (LAYER, 4), (REST, 4)))
FOOTPRINT = Footprint(
    parameters=PARAMETERS,
    gradients=PARAMETERS,
    states=Sizes(PARAMETERS.sharded * 2, replicated=12),
    assumed_states=False,
    layers=(240, 240),
    rest=160,
    tensors=3,
)
WORKLOAD = Workload(8, 4, 20, 10, budget=56, share_prefix=True)


@pytest.mark.parametrize(
    ("strategy", "parameters", "optimizer", "in_transit", "tokens", "micro_batches"),
    [("single", 640, 1292, 0, 320, 8), ("ddp", 640, 1292, 640, 160, 4), ("fsdp2", 320, 652, 2 * 160 + 3 * 240, 160, 4)],
)
def test_what_a_rank_of_two_holds(
    strategy: str, parameters: int, optimizer: int, in_transit: int, tokens: int, micro_batches: int
) -> None:
    cache = 2400 if strategy == "single" else 1600  # 24 of 32 sequences at a time, or a rank's 16
    copies = Copies(1, 1, 1.0, engine=640, rows=24, cache=100)
    made = plan(strategy, 2, FOOTPRINT, WORKLOAD, copies, Activations(1000))
    assert made.memory == {
        "parameters": parameters,
        "gradients": parameters,
        "optimizer": optimizer,
        "reference": parameters,
        "old policy": parameters,
        "engine": 640,
        "engine's cache": cache,
        "activations": 1000,
        "in transit": in_transit,
    }
    # Gradients, activations and what is in transit are gone while the engine samples.
    lasting, learning = 3 * parameters + optimizer + 640, parameters + 1000 + in_transit
    assert made.total() == lasting + max(learning, cache)
    assert made.total(at_once=True) == lasting + learning + cache
    assert (made.tokens, made.micro_batches) == (tokens, micro_batches)


def test_how_often_ranks_wait_for_each_other() -> None:
    copies = Copies(reference=1, old_policy=0, scoring=1.0, engine=0)
    assert plan("single", 2, FOOTPRINT, WORKLOAD, copies, Activations(0)).collectives == {}
    assert plan("ddp", 2, FOOTPRINT, WORKLOAD, copies, Activations(0)).collectives == {"gradients": 1}
    # 4 micro-batches: 2 layers twice and the rest once, and 3 units for the reference; gradients of 3 units.
    assert plan("fsdp2", 2, FOOTPRINT, WORKLOAD, copies, Activations(0)).collectives == {
        "weights": 4 * (5 + 3),
        "gradients": 4 * 3,
        "to the engine": 3,
    }


def test_settings_of_fsdp2_change_what_is_whole_and_where_shards_lie() -> None:
    copies, settings = Copies(reference=1, old_policy=0, scoring=0.0, engine=0), Sharding(reshard=False, offload=True)
    made = plan("fsdp2", 2, FOOTPRINT, WORKLOAD, copies, Activations(1000), settings)
    assert made.memory["in transit"] == 2 * 160 + 2 * 240 + 240  # rest and its gradient, all layers, one's gradient
    assert made.collectives["weights"] == 4 * 3  # 4 micro-batches, 3 units: none is gathered in backward
    assert made.memory["parameters"] == 320
    assert made.total() == 1000 + 1040  # shards and what is made of them lie in the machine's memory
    assert plan("ddp", 2, FOOTPRINT, WORKLOAD, copies, Activations(1000), settings).elsewhere == ()


def test_moved_activations_are_told_and_not_counted() -> None:
    copies = Copies(reference=0, old_policy=0, scoring=0.0, engine=0)
    without, moved = (plan("ddp", 2, FOOTPRINT, WORKLOAD, copies, Activations(100, size)) for size in (0, 900))
    assert moved.memory == without.memory | {"activations, moved": 900}
    assert moved.total() == without.total()
    assert (without.elsewhere, moved.elsewhere) == ((), ("activations, moved",))
