"""What each rank would hold and do, by strategy."""

import math
from dataclasses import dataclass

from grpo_lit.dry_run.footprint import Footprint
from grpo_lit.dry_run.workload import Workload

#: Strategies that are compared.
STRATEGIES = ("single", "ddp", "fsdp2")
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
    """

    reference: int
    old_policy: int
    scoring: float
    engine: int


@dataclass(frozen=True)
class Plan:
    """One strategy's step.

    Attributes:
        memory: By what it is for, of the rank that holds most [bytes].
        tokens: Completion tokens of a rank, at most.
        micro_batches: Of a step.
        collectives: Of a step, by what they are for.
    """

    memory: dict[str, int]
    tokens: int
    micro_batches: int
    collectives: dict[str, int]

    @property
    def total(self) -> int:
        """All memory [bytes]."""
        return sum(self.memory.values())


def plan(
    strategy: str, world_size: int, footprint: Footprint, workload: Workload, copies: Copies, activations: int
) -> Plan:
    """Return what a rank holds and does under a strategy.

    Args:
        strategy: One of ``STRATEGIES``.
        world_size: Ranks; one process counts as one whatever this says.
        footprint: Of the policy.
        workload: Of a step.
        copies: What else there is.
        activations: Of a micro-batch [bytes].
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
        "activations": activations,
        "in transit": _in_transit(strategy, footprint),
    }
    micro_batches = workload.micro_batches(ranks)
    return Plan(
        memory=memory,
        tokens=math.ceil(workload.prompts / ranks) * workload.completions * workload.completion_tokens,
        micro_batches=micro_batches,
        collectives={} if ranks == 1 else _collectives(strategy, footprint, micro_batches, copies.scoring),
    )


def _in_transit(strategy: str, footprint: Footprint) -> int:
    """Return bytes of what is whole for a while.

    DDP copies gradients into buckets. FSDP2 keeps embeddings and head gathered through a micro-batch, beside the layer
    at work and the next one, and has one unit's gradients before they are spread.
    """
    if strategy == "ddp":
        return footprint.gradients.bytes()
    if strategy == "fsdp2":
        return 2 * footprint.rest + 3 * max(footprint.layers)
    return 0


def _collectives(strategy: str, footprint: Footprint, micro_batches: int, scoring: float) -> dict[str, int]:
    """Return how many collectives a step has of those that carry weights or gradients.

    FSDP2 gathers each layer in forward and again in backward, the unit of the rest once; gradients of every unit are
    spread after each backward. A forward pass alone gathers every unit. The engine is given whole tensors, one by one.
    """
    if strategy == "ddp":
        later = max(footprint.gradients.bytes() - _FIRST_BUCKET, 0)
        return {"gradients": 1 + math.ceil(later / _BUCKET)}
    layers = len(footprint.layers)
    passes = 2 * layers + 1 + scoring * (layers + 1)
    return {
        "weights": math.ceil(micro_batches * passes),
        "gradients": micro_batches * (layers + 1),
        "to the engine": footprint.tensors,
    }
