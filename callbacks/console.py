"""What a person watching the console sees: held-out accuracy, before, now, and the difference."""

import math

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info


class Console(Callback):
    """Prints every held-out accuracy when it is measured, with the change since the run began.

    Args:
        prefix: Metrics whose name starts so are printed.
    """

    def __init__(self, prefix: str = "val/") -> None:
        self.prefix = prefix
        self._before: dict[str, float] = {}

    def state_dict(self) -> dict[str, float]:
        """Keep the accuracies before the first step across a resume."""
        return dict(self._before)

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        """Take up the accuracies of the run that is resumed."""
        self._before = dict(state_dict)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print one line per held-out set."""
        values = {n: float(v) for n, v in trainer.callback_metrics.items() if n.startswith(self.prefix)}
        shares = {n: v for n, v in values.items() if n.split("/")[-1].split("@")[0] in ("greedy", "avg", "truncated")}
        if not shares or not all(math.isfinite(v) for v in shares.values()):
            return
        parts = [f"{name} {value:.1%}{self._change(name, value)}" for name, value in sorted(shares.items())]
        rank_zero_info(f"step {trainer.global_step}: " + ", ".join(parts))

    def _change(self, name: str, value: float) -> str:
        before = self._before.setdefault(name, value)
        return "" if value == before else f" (was {before:.1%})"
