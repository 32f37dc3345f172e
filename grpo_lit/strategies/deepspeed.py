"""DeepSpeed's ZeRO, where it is installed and there are CUDA devices."""

import importlib.util
import math
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from lightning.pytorch.strategies import DeepSpeedStrategy
from torch.distributed.constants import default_pg_timeout
from typing_extensions import override

from grpo_lit.errors import ConfigError


class DeepSpeed(DeepSpeedStrategy):
    """Lightning's ``DeepSpeedStrategy``, given an optimizer step of several micro-batches.

    The model is whole on every rank; optimizer states, and with stage 2 gradients, are spread. Stage 3, which cuts the
    weights too, is refused, since it assumes two things that are not so here. A module's weights are read in its own
    forward alone: the head reads the output layer's in the policy's forward, and once more as it recomputes its logits
    in backward, when stage 3 has emptied them. And one call of the engine is one forward pass, by whose order of
    modules weights are fetched ahead and let go: for Lightning the engine is the whole module, and its call a training
    step, with several forward and backward passes of the policy, and of a reference in between. FSDP2 cuts the same
    three things. Source: S. Rajbhandari et al., "ZeRO" (https://arxiv.org/abs/1910.02054).

    Args:
        stage: 1: optimizer states in shards; 2: gradients too.
        offload_optimizer: Optimizer states wait in the machine's memory.
        process_group_backend: ``null``: NCCL.
        timeout: Of a collective.
    """

    def __init__(
        self,
        stage: int = 2,
        offload_optimizer: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta = default_pg_timeout,
    ) -> None:
        if stage not in (1, 2):
            raise ConfigError(
                f"`trainer.strategy.init_args.stage` expected 1 or 2, but got {stage}: stage 3 lets weights go after a "
                "module's forward, which the head reads again in backward. For weights in shards use "
                "configs/strategy/fsdp2.yaml"
            )
        if importlib.util.find_spec("deepspeed") is None:
            raise ConfigError(
                "`trainer.strategy` expected an installed deepspeed, but there is none: pip install 'deepspeed>=0.16', "
                "or use configs/strategy/fsdp2.yaml"
            )
        super().__init__(
            stage=stage,
            offload_optimizer=offload_optimizer,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )

    @override
    def _configure_launcher(self) -> None:
        if self.root_device.type != "cuda":
            raise ConfigError(
                f"`trainer.strategy` expected CUDA devices for {type(self).__name__}, but got {self.root_device.type}: "
                "use configs/strategy/fsdp2.yaml, which shards on CPUs too"
            )
        super()._configure_launcher()

    @override
    def _init_config_if_needed(self) -> None:
        config: Any = self.config
        config["gradient_clipping"] = self.lightning_module.gradient_clip_norm or 0.0  # it clips as it steps
        config["train_micro_batch_size_per_gpu"] = 1  # for its log; Lightning would ask the stream of rollouts
        super()._init_config_if_needed()

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        """Add a micro-batch's gradients to the step's, of which this is not the last."""
        engine: Any = self.deepspeed_engine
        engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            engine.set_gradient_accumulation_boundary(True)

    def gradient_norm(self) -> float:
        """Return the norm of the step's gradients over all ranks, NaN where one is not finite."""
        optimizer: Any = self.optimizers[0]
        norm = float(optimizer.scaled_global_norm()) / float(optimizer.loss_scale)
        return norm if norm >= 0 else math.nan  # DeepSpeed marks such a norm with -1

    def drop_gradients(self) -> None:
        """Forget gradients that no step will be made with, as DeepSpeed does where float16 overflows."""
        optimizer: Any = self.optimizers[0]
        optimizer.micro_step_id = -1
        optimizer.zero_grad()
        if optimizer.cpu_offload:
            optimizer.reset_cpu_buffers()
            return
        for group in list(optimizer.averaged_gradients):
            optimizer.averaged_gradients[group] = None
