"""An entropy bonus that holds the policy's entropy up."""

import math
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer

from grpo_lit.errors import ConfigError
from grpo_lit.module import GRPOModule


class EntropyTarget(Callback):
    """Raises the entropy bonus while the policy's entropy is below a target, and lowers it above.

        coefficient_(k+1) = clip(coefficient_k + rate * sign(target - entropy_k), 0, maximum)

    k counts optimizer steps; the entropy is the mean over the tokens of sequences that reward or KL can move, the same
    ones whether the bonus is on or off. A step without any leaves the coefficient alone. Above the target the bonus
    fades to 0 and does nothing. Source: the adaptive entropy control of Skywork-OR1, https://arxiv.org/abs/2505.22312;
    it drops the bonus at once above the target, we let it fade by the same steps.

    Args:
        target: Mean entropy per token to stay above [nats].
        rate: Change of the coefficient per optimizer step.
        maximum: Largest coefficient: a bonus far above this teaches noise.

    Raises:
        ConfigError: For a number that is not above 0.
    """

    def __init__(self, target: float = 0.2, rate: float = 0.001, maximum: float = 0.05) -> None:
        for name, value in {"target": target, "rate": rate, "maximum": maximum}.items():
            if not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"`{name}` of EntropyTarget expected to be > 0, but got {value}")
        self.target, self.rate, self.maximum = target, rate, maximum
        self._coefficient = 0.0
        self._resumed: float | None = None

    def state_dict(self) -> dict[str, Any]:
        """Keep the coefficient across a resume."""
        return {"coefficient": self._coefficient}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the coefficient of the run that is resumed."""
        self._resumed = state_dict["coefficient"]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin with the recipe's own coefficient, or the one of the run that is resumed."""
        objective = cast("GRPOModule", pl_module).objective
        if self._resumed is not None:
            objective.entropy_coefficient = self._resumed
        self._coefficient = objective.entropy_coefficient

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the coefficient that this step was made with, and set the next one's."""
        module = cast("GRPOModule", pl_module)
        module.log_at(trainer.global_step - 1, {"optimization/entropy_coefficient": self._coefficient})
        entropy = float(trainer.callback_metrics.get("exploration/entropy", math.nan))  # neither below nor above
        step = self.rate * ((entropy < self.target) - (entropy > self.target))
        self._coefficient = min(max(self._coefficient + step, 0.0), self.maximum)
        module.objective.entropy_coefficient = self._coefficient
