"""Compiled norms in a run."""

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from grpo_lit.errors import ConfigError
from grpo_lit.policy.compiling import compile_norms


class CompileNorms(Callback):
    """Compiles the RMS norms of all models; see :func:`grpo_lit.policy.compiling.compile_norms`.

    It takes some seconds when a run begins: ``scripts/benchmark_learner --arms ours compiled`` says whether they pay.

    Raises:
        ConfigError: For a model without RMS norms, or a machine that cannot compile.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Have norms compiled at their first use."""
        _check_compiler(pl_module.device)
        count = compile_norms(pl_module)
        if not count:
            raise ConfigError(
                "`trainer.callbacks: CompileNorms` expected a model with RMS norms, but got one without: drop the "
                "callback"
            )
        rank_zero_info(f"{count} norms are compiled at their first use")


def _check_compiler(device: torch.device) -> None:
    try:
        torch.compile(torch.neg)(torch.ones(2, device=device))
    except RuntimeError as error:
        needed = "Triton" if device.type == "cuda" else "a C++ compiler (g++)"
        raise ConfigError(
            f"`trainer.callbacks: CompileNorms` expected a machine with {needed}, but got {type(error).__name__}: "
            f"{str(error).splitlines()[0]}. Install it, or drop the callback"
        ) from error
