"""Batches stay as they are: the learner moves and casts what it needs, micro-batch by micro-batch."""

from typing import Any

from lightning.pytorch.strategies import Strategy


def leave_batches(strategy: Strategy) -> None:
    """Keep Lightning's precision plugins away from rollouts.

    Those of FSDP, DeepSpeed and ``bf16-true`` would cast every float of a batch, log-probs of the sampler and rewards
    among them, and refuse frozen dataclasses.
    """
    plugin: Any = strategy.precision_plugin
    plugin.convert_input = _unchanged


def _unchanged(data: Any) -> Any:
    return data
