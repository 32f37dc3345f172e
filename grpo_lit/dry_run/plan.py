"""What each rank would hold and do, by strategy."""

import math
from dataclasses import dataclass

from grpo_lit.dry_run.footprint import Activations, Footprint
from grpo_lit.dry_run.workload import Workload

#: Strategies that are compared.
STRATEGIES = ("single", "ddp", "fsdp2")
#: Memory that is taken while the learner makes a step, and while the engine samples.
LEARNING, SAMPLING = ("gradients", "activations", "in transit"), "engine's cache"
#: What of the activations waits in the machine's memory.
_MOVED = "activations, moved"
#: What FSDP2 can leave in the machine's memory.
_SHARDED = ("parameters", "gradients", "optimizer", "reference", "old policy")
#: Bytes of DDP's first bucket of gradients, which is sent while backward goes on, and of its others.
_FIRST_BUCKET, _BUCKET = 2**20, 25 * 2**20


@dataclass(frozen=True)
class Copies:
    """Models that a rank holds beside the policy, and how often they see a step's tokens.

    Attributes:
        reference: Frozen references.
        old_policy: Frozen old policies.
        scoring: Forward passes of a step without backward: of the reference, and for old log-probs.
        engine: Bytes of the engine's own copy, in this process.
        rows: Most sequences that it draws at a time.
        cache: Bytes of keys and values of one of them.
    """

    reference: int
    old_policy: int
    scoring: float
    engine: int
    rows: int = 0
    cache: int = 0


@dataclass(frozen=True)
class Sharding:
    """Settings of FSDP2.

    Attributes:
        reshard: A layer is dropped after its forward and gathered again in backward.
        offload: Shards lie in the machine's memory, not in the device's.
    """

    reshard: bool = True
    offload: bool = False


@dataclass(frozen=True)
class Plan:
    """One strategy's step.

    Attributes:
        memory: By what it is for, of the rank that holds most [bytes].
        tokens: Completion tokens of a rank, at most.
        micro_batches: Of a step.
        collectives: Of a step, by what they are for.
        elsewhere: What lies in another memory than the one that is counted.
    """

    memory: dict[str, int]
    tokens: int
    micro_batches: int
    collectives: dict[str, int]
    elsewhere: tuple[str, ...] = ()

    def total(self, at_once: bool = False) -> int:
        """Return the most memory that is in use at a time [bytes].

        Args:
            at_once: Rollouts are drawn while the learner trains; else the two take turns.
        """
        counted = {name: size for name, size in self.memory.items() if name not in self.elsewhere}
        learning = sum(counted.pop(name, 0) for name in LEARNING)
        sampling = counted.pop(SAMPLING)
        return sum(counted.values()) + (learning + sampling if at_once else max(learning, sampling))


def plan(
    strategy: str,
    world_size: int,
    footprint: Footprint,
    workload: Workload,
    copies: Copies,
    activations: Activations,
    sharding: Sharding = Sharding(),
) -> Plan:
    """Return what a rank holds and does under a strategy.

    Args:
        strategy: One of ``STRATEGIES``.
        world_size: Ranks; one process counts as one whatever this says.
        footprint: Of the policy.
        workload: Of a step.
        copies: What else there is.
        activations: Of a micro-batch.
        sharding: How FSDP2 is set.
    """
    ranks = 1 if strategy == "single" else world_size
    cut = ranks if strategy == "fsdp2" else 1
    own = footprint.parameters.bytes(cut)
    memory = {
        "parameters": own,
        "gradients": footprint.gradients.bytes(cut),
        "optimizer": footprint.states.bytes(cut),
        "reference": copies.reference * own,
        "old policy": copies.old_policy * own,
        "engine": copies.engine,
        SAMPLING: copies.cache * workload.sampled_at_once(ranks, copies.rows),
        "activations": activations.held,
        "in transit": _in_transit(strategy, footprint, sharding),
    }
    elsewhere = _SHARDED if strategy == "fsdp2" and sharding.offload else ()
    if activations.moved:
        memory[_MOVED], elsewhere = activations.moved, (*elsewhere, _MOVED)
    micro_batches = workload.micro_batches(ranks)
    return Plan(
        memory=memory,
        tokens=math.ceil(workload.prompts / ranks) * workload.completions * workload.completion_tokens,
        micro_batches=micro_batches,
        collectives={} if ranks == 1 else _collectives(strategy, footprint, micro_batches, copies.scoring, sharding),
        elsewhere=elsewhere,
    )


def _in_transit(strategy: str, footprint: Footprint, sharding: Sharding) -> int:
    """Return bytes of what is whole for a while.

    DDP copies gradients into buckets. FSDP2 keeps embeddings and head gathered through a micro-batch, beside the layer
    at work and the next one, and has one unit's gradients before they are spread. Without resharding it keeps all
    layers.
    """
    if strategy == "ddp":
        return footprint.gradients.bytes()
    if strategy == "fsdp2":
        largest = max(footprint.layers)
        return 2 * footprint.rest + largest + (2 * largest if sharding.reshard else sum(footprint.layers))
    return 0


def _collectives(
    strategy: str, footprint: Footprint, micro_batches: int, scoring: float, sharding: Sharding
) -> dict[str, int]:
    """Return how many collectives a step has of those that carry weights or gradients.

    FSDP2 gathers each layer in forward and, where it reshards, again in backward, the unit of the rest once; gradients
    of every unit are spread after each backward. A forward pass alone gathers every unit. The engine is given whole
    tensors, one by one.
    """
    if strategy == "ddp":
        later = max(footprint.gradients.bytes() - _FIRST_BUCKET, 0)
        return {"gradients": 1 + math.ceil(later / _BUCKET)}
    layers = len(footprint.layers)
    passes = layers * (2 if sharding.reshard else 1) + 1 + scoring * (layers + 1)
    return {
        "weights": math.ceil(micro_batches * passes),
        "gradients": micro_batches * (layers + 1),
        "to the engine": footprint.tensors,
    }
