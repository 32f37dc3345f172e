"""DeepSpeed on CPUs, which Lightning does not let it run on: the same engines, over gloo."""

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from ranks_run import fit
from typing_extensions import override

from grpo_lit.strategies import DeepSpeed


class DeepSpeedOnCPU(DeepSpeed):
    """Without the refusals of devices other than CUDA's, and with every weight cut, however small."""

    @override
    def _configure_launcher(self) -> None:
        DDPStrategy._configure_launcher(self)

    @override
    def setup_environment(self) -> None:
        DDPStrategy.setup_environment(self)

    @override
    def setup_distributed(self) -> None:
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first
        self.config["zero_optimization"] |= {"stage3_param_persistence_threshold": 0}
        initialize = getattr(deepspeed.initialize, "args", [deepspeed.initialize])[0]
        deepspeed.initialize = partial(_without_index, initialize)
        self.set_world_ranks()
        self._init_deepspeed_distributed()


def _without_index(initialize: Callable[..., Any], args: Namespace, **options: Any) -> Any:
    """Call ``deepspeed.initialize``; a CPU has no index, and DeepSpeed compares it with 0."""
    return initialize(args=Namespace(device_rank=-1), **options)


def fit_with_zero(stage: int, *arguments: Any, words: tuple[str, ...] = (), **options: Any) -> dict[str, Any]:
    """Return what :func:`ranks_run.fit` does, under ZeRO."""
    named = ("--trainer.strategy=zero.DeepSpeedOnCPU", f"--trainer.strategy.init_args.stage={stage}")
    return fit(*arguments, words=[*named, *words], **options)
