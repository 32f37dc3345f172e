"""DeepSpeed's ZeRO, where it is installed and there are CUDA devices."""

import argparse
import importlib.util
import math
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.strategies.strategy import _ForwardRedirection
from torch import nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer
from typing_extensions import override

from grpo_lit.errors import ConfigError
from grpo_lit.strategies import saving


class DeepSpeed(DeepSpeedStrategy):
    """Lightning's ``DeepSpeedStrategy``, given an optimizer step of several micro-batches.

    With stages 1 and 2 the model is whole on every rank; optimizer states, and with stage 2 gradients, are spread, and
    the engine is around the whole module, as Lightning has it. Stage 3 cuts the weights too. One call of its engine is
    one forward pass of it: gradients of a second backward without another call in between replace those of the first,
    which is silent, and by the order of modules in a call weights are fetched ahead and let go. So there a training
    step runs outside, as under FSDP, and the policy and the reference are in an engine each. A checkpoint of stage 3
    holds the policy and its optimizer's shards; the reference is made of the model's files again.
    Source: S. Rajbhandari et al., "ZeRO" (https://arxiv.org/abs/1910.02054).

    Args:
        stage: 1: optimizer states in shards; 2: gradients too; 3: weights too.
        offload_optimizer: Optimizer states wait in the machine's memory, where the optimizer steps.
        offload_parameters: With stage 3: shards of weights wait there too.
        process_group_backend: ``null``: NCCL.
        timeout: Of a collective.
    """

    def __init__(
        self,
        stage: int = 2,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta = default_pg_timeout,
    ) -> None:
        if stage not in (1, 2, 3):
            raise ConfigError(f"`trainer.strategy.init_args.stage` expected 1, 2 or 3, but got {stage}")
        if offload_parameters and stage != 3:
            raise ConfigError(
                f"`trainer.strategy.init_args.offload_parameters` expected stage 3, which cuts weights, but got "
                f"stage {stage}: set that, or drop it"
            )
        if importlib.util.find_spec("deepspeed") is None:
            raise ConfigError(
                "`trainer.strategy` expected an installed deepspeed, but there is none: pip install deepspeed==0.19.8, "
                "or use configs/strategy/fsdp2.yaml"
            )
        super().__init__(
            stage=stage,
            offload_optimizer=offload_optimizer,
            offload_parameters=offload_parameters,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        if stage == 3:
            self._forward_redirection = _Outside()

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
        config["zero_force_ds_cpu_optimizer"] = False  # torch's own step where their states are
        super()._init_config_if_needed()

    # ------------------------------------------------------------------ stage 3: an engine for each model

    @contextmanager
    @override
    def model_sharded_context(self) -> Iterator[None]:
        """Let modules be made whole or empty: with stage 3 they are cut when they are complete, tied weights too."""
        self._init_config_if_needed()
        yield

    def check_stage_3(self, lost: dict[str, bool], reference_dtype: str) -> None:
        """Refuse what would be lost at the end of a run, or is not tried together.

        Args:
            lost: Keys below ``model``, and whether they ask for something.
            reference_dtype: Of the model.

        Raises:
            ConfigError: Names the key.
        """
        for key in (key for key, asked in lost.items() if asked):
            raise ConfigError(
                f"`model.{key}` and `trainer.strategy: DeepSpeed` of stage 3 contradict: its checkpoints hold the "
                "policy, whose weights are there in a module's forward and backward alone. Use "
                "configs/strategy/fsdp2.yaml, or drop one of them"
            )
        if reference_dtype == "float32" and self.shards_dtype != torch.float32:
            raise ConfigError(
                "`model.reference_dtype: float32` and `trainer.precision: bf16-mixed` contradict with DeepSpeed's "
                "stage 3, which holds weights in bf16 then. Use 32-true, or drop `model.reference_dtype`"
            )

    @property
    def shards_dtype(self) -> torch.dtype:
        """What weights of stage 3 are held and multiplied in; the optimizer keeps a float32 copy."""
        return torch.bfloat16 if self.config.get("bf16", {}).get("enabled") else torch.float32

    @override
    def _setup_model_and_optimizer(
        self, model: nn.Module, optimizer: Optimizer | None, lr_scheduler: Any = None
    ) -> tuple[Any, Optimizer]:
        if not self.zero_stage_3:
            return super()._setup_model_and_optimizer(model, optimizer, lr_scheduler)
        module: Any = model
        module.policy, made = super()._setup_model_and_optimizer(module.policy, optimizer, lr_scheduler)
        if module.reference is not None:
            module.reference = self._frozen(module.reference)
        return module.policy, made

    @override
    def _initialize_deepspeed_inference(self, model: nn.Module) -> None:
        if not self.zero_stage_3:
            super()._initialize_deepspeed_inference(model)
            return
        module: Any = model
        for name in ("policy", "reference"):
            if getattr(module, name) is not None:
                setattr(module, name, self._frozen(getattr(module, name)))
        self.model = module.policy

    def _frozen(self, model: nn.Module) -> Any:
        """Return an engine that gathers weights and has no optimizer."""
        import deepspeed  # an extra

        kept = ("train_micro_batch_size_per_gpu", "bf16", "zero_allow_untested_optimizer", "zero_optimization")
        config = {key: self.config[key] for key in kept if key in self.config}
        place = argparse.Namespace(device_rank=self.root_device.index)
        return deepspeed.initialize(args=place, config=config, model=model, dist_init_required=False)[0]

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any = None) -> None:
        """Write a checkpoint beside its place, and move it there when every rank's shards are written.

        DeepSpeed would write into a folder that is there, and through a link into the checkpoint that it points to.

        Raises:
            SaveError: A rank could not write its share; the checkpoint of this name is as it was.
        """
        target = Path(self.broadcast(filepath))
        with saving.written_by_all(self, target) as written:
            super().save_checkpoint(checkpoint, written, storage_options)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return nothing with stage 3, whose engine writes the shards itself."""
        return {} if self.zero_stage_3 else super().lightning_module_state_dict()

    # ------------------------------------------------------------------ a step of several micro-batches

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
        if self.zero_stage_3:
            norms = [float(norm) / float(optimizer.loss_scale) for norm in optimizer._get_norm_groups()]
            return math.hypot(*norms) if min(norms) >= 0 else math.nan
        norm = float(optimizer.scaled_global_norm()) / float(optimizer.loss_scale)
        return norm if norm >= 0 else math.nan  # DeepSpeed marks such a norm with -1

    def drop_gradients(self) -> None:
        """Forget gradients that no step will be made with, as DeepSpeed does where float16 overflows."""
        optimizer: Any = self.optimizers[0]
        if self.zero_stage_3:
            optimizer._overflow_clean_up(optimizer.loss_scale)
            return
        optimizer.micro_step_id = -1
        optimizer.zero_grad()
        if optimizer.cpu_offload:
            optimizer.reset_cpu_buffers()
            return
        for group in list(optimizer.averaged_gradients):
            optimizer.averaged_gradients[group] = None


class _Outside(_ForwardRedirection):
    """Runs a step by itself, and not as the forward pass of an engine."""

    @override
    def __call__(
        self, wrapper_module: nn.Module, original_module: LightningModule, method_name: str, *args: Any, **kwargs: Any
    ) -> Any:
        """Return what the module's own method does."""
        return getattr(original_module, method_name)(*args, **kwargs)
