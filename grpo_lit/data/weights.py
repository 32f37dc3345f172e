"""When the engine gets the learner's weights, and a warning where they do not arrive."""

from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn

from grpo_lit.ranks import Ranks
from grpo_lit.rollouts.handover import Probe
from grpo_lit.rollouts.queue import RolloutQueue


class WeightSync:
    """Keeps the engine's weights up with the learner's; all ranks make the same calls.

    Args:
        queue: What draws with the engine.
        tolerance: Mean gap of log-probs between engine and learner from which a warning is given [nats].
    """

    def __init__(self, queue: RolloutQueue, tolerance: float) -> None:
        self.queue, self.handover, self.tolerance = queue, queue.handover, tolerance

    def now(self, module: Any, text: tuple[int, ...], ranks: Ranks) -> None:
        """Give the engine the learner's weights if it holds others; nothing may be drawn meanwhile.

        Args:
            module: The learner.
            text: What to compare both on.
            ranks: All processes.
        """
        if self.handover.engine.weight_version != module.global_step:
            probe = Probe(text, module.score(text))
            self.handover.load(module.named_weights(), module.global_step, probe)
            self._compare(ranks)

    def in_passing(self, module: Any, text: tuple[int, ...], ranks: Ranks) -> None:
        """Hand the learner's weights over where it is time, for whatever is drawn next.

        Args:
            module: The learner.
            text: What to compare both on.
            ranks: All processes.
        """
        if module.global_step - self.handover.version >= self.queue.settings.weight_sync_steps:
            self.queue.wait_for_copy()
            probe = Probe(text, module.score(text))
            self.handover.put(module.named_weights(), module.global_step, probe)
        self._compare(ranks)

    def _compare(self, ranks: Ranks) -> None:
        gap = float(ranks.max(torch.tensor(self.handover.take_gap())))
        if gap > self.tolerance:
            rank_zero_warn(
                f"engine and learner disagree after the weight sync of step {self.handover.engine.weight_version}: "
                f"mean log-prob gap {gap:.3f} nats on a fixed text, more than `data.probe_tolerance` "
                f"({self.tolerance}). The engine may not have taken the weights, or its precision is too low"
            )
