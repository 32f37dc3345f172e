"""What a module owns: the policy, the frozen reference and the old policy; and their weights, for an engine."""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, cast

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel

from grpo_lit.errors import ConfigError
from grpo_lit.evaluating import EvaluatingModule
from grpo_lit.policy.adapter import LoRA, published_weights
from grpo_lit.policy.borrowed import AdapterSnapshot, WithoutAdapter
from grpo_lit.policy.checkpoint import empty_model, load_model
from grpo_lit.policy.policy import Policy, check_head, why_plain_rows
from grpo_lit.policy.precision import cast_once, float32_by_default, hold_casts, weights_dtype
from grpo_lit.policy.quantization import NF4
from grpo_lit.policy.recompute import Recomputed, recompute
from grpo_lit.policy.sharding import can_read_shards, read_shards, shard, whole
from grpo_lit.policy.zero import gathered_weights, partition, size
from grpo_lit.strategies.checkpoint_io import save_atomically
from grpo_lit.strategies.deepspeed import DeepSpeed
from grpo_lit.strategies.fsdp import FSDP, whole_weights
from grpo_lit.strategies.precision import leave_batches

#: What FSDP2 has to say of how a model is sharded; Lightning's own ModelParallelStrategy has nothing.
_OF_SHARDS = ("reshard_after_forward", "cpu_offload")
ReferenceDtype = Literal["auto", "float32", "bfloat16", "nf4"]


class ModelsModule(EvaluatingModule):
    """Loads a policy, and the copies of it that a recipe asks for.

    Args:
        checkpoint: Folder or hub id of the model.
        needs_reference: Hold a frozen reference: the weights that the run began with.
        needs_old_policy: Hold a frozen copy for the weights of an earlier step.
        share_prefix: One copy of a prompt for all its completions. ``None``: where the architecture allows it.
        gradient_checkpointing: What backward makes again; see :func:`grpo_lit.policy.recompute.recompute`.
        adapter: What to train instead of the model's weights.
        quantization: How to hold the weights that are not trained.
        reference_dtype: How to hold the reference.
    """

    #: Set by a callback before the models are made: the reference is to become an average, too fine for bf16.
    averages_reference = False
    #: Activations wait for backward in the machine's memory.
    activation_offload = False

    def __init__(
        self,
        checkpoint: str,
        needs_reference: bool,
        needs_old_policy: bool,
        share_prefix: bool | None,
        gradient_checkpointing: Recomputed,
        adapter: LoRA | None = None,
        quantization: NF4 | None = None,
        reference_dtype: ReferenceDtype = "auto",
    ) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self._needs_reference, self._needs_old_policy = needs_reference, needs_old_policy
        self.share_prefix, self.gradient_checkpointing = share_prefix, gradient_checkpointing
        self.adapter, self.quantization, self.reference_dtype = adapter, quantization, reference_dtype
        self.policy: Policy | None = None
        self.reference: Policy | WithoutAdapter | None = None
        self.old_policy: Policy | AdapterSnapshot | None = None
        if quantization is not None and adapter is None:
            raise ConfigError(
                "`model.quantization` expected `model.adapter` beside it, but got none: 4-bit weights cannot be "
                "trained. Add one (configs/model/qlora.yaml), or drop `model.quantization`"
            )
        if adapter is not None and reference_dtype != "auto":
            raise ConfigError(
                f"`model.reference_dtype: {reference_dtype}` and `model.adapter` contradict: the reference is the "
                "policy with its adapter off, not a model of its own. Drop `model.reference_dtype`"
            )

    def setup(self, stage: str) -> None:
        """Make checkpoints survive the end of the process that writes them, and keep batches as they are."""
        save_atomically(self.trainer.strategy)
        leave_batches(self.trainer.strategy)

    @float32_by_default()
    def configure_model(self) -> None:
        """Load the policy, and the copies of it that the recipe asks for; once."""
        if self.policy is not None:
            return
        self._check_strategy()
        if self.activation_offload and self.device.type == "cpu":
            raise ConfigError(
                "`model.activation_offload` expected a GPU, but got `trainer.accelerator: cpu`: activations are in the "
                "machine's memory already. Drop it, or use model.gradient_checkpointing"
            )
        self.policy = self._make_policy()
        self._choose_rows(self.policy)
        adapted = self.adapter is not None
        if self._needs_reference:
            self.reference = WithoutAdapter(self.policy) if adapted else self._make_frozen(self.reference_dtype)
        if self._needs_old_policy:
            self.old_policy = AdapterSnapshot(self.policy) if adapted else self._make_frozen("auto")

    def _choose_rows(self, policy: Policy) -> None:
        """Decide whether completions share their prompt, and say so."""
        name, obstacle = type(policy.model).__name__, why_plain_rows(policy.model)
        if self.share_prefix and obstacle:
            raise ConfigError(f"`model.share_prefix` expected false or null, but got true: {name} has {obstacle}")
        shared = obstacle is None if self.share_prefix is None else self.share_prefix
        reason = "" if shared else f" ({obstacle or 'model.share_prefix: false'})"
        self.share_prefix = shared
        how = "shared by" if shared else "repeated for"
        rank_zero_info(f"{name}, {_size(policy)}; prompts are {how} their completions{reason}")

    def _check_strategy(self) -> None:
        if self._device_mesh is not None and (size := self._device_mesh["tensor_parallel"].size()) > 1:
            raise ConfigError(
                f"`trainer.strategy` expected a tensor-parallel size of 1, but got {size}: use "
                "grpo_lit.strategies.FSDP2"
            )
        if self._in_shards and (self.adapter is not None or self.reference_dtype == "nf4"):
            key = "model.reference_dtype: nf4" if self.adapter is None else "model.adapter"
            name = type(self.trainer.strategy).__name__ if self._device_mesh is None else "FSDP2"
            raise ConfigError(
                f"`{key}` and `trainer.strategy: {name}` contradict: frozen, trained and 4-bit weights are not sharded "
                "together here. Use configs/strategy/ddp.yaml, or drop one of them"
            )
        if self._in_zero_3:
            held = {"old_policy: weights": self._needs_old_policy, "activation_offload": self.activation_offload}
            cast("DeepSpeed", self.trainer.strategy).check_stage_3(held, self.reference_dtype)

    @property
    def _weights_dtype(self) -> torch.dtype:
        return weights_dtype(str(self.trainer.precision))

    @property
    def _products_dtype(self) -> torch.dtype:
        """What matrices are multiplied in."""
        return torch.bfloat16 if str(self.trainer.precision).startswith("bf16") else torch.float32

    def _make_policy(self) -> Policy:
        """Return the policy of the checkpoint: whole, or this rank's share of it under a strategy that has a mesh."""
        if self._device_mesh is not None:
            return self._make_sharded(self._weights_dtype, frozen=False)
        if self._in_zero_3:
            return self._make_partitioned(None, frozen=False)
        policy = Policy(load_model(self.checkpoint, self._weights_dtype))
        check_head(policy)
        if self.quantization is not None:
            self.quantization.quantize(policy.model, policy.model.get_output_embeddings(), self._products_dtype)
        if self.adapter is not None:
            self.adapter.inject(policy.model)
            policy.adapted = True
            policy.input_casts.watch(policy.model)
            hold_casts(policy, self._products_dtype)
        return self._prepared(policy)

    def _make_frozen(self, held: ReferenceDtype) -> Policy:
        """Return a frozen copy of the policy, held as ``reference_dtype`` says."""
        if held == "float32" and self._weights_dtype != torch.float32:
            raise ConfigError(
                "`model.reference_dtype: float32` and `trainer.precision: bf16-true` contradict: that precision casts "
                "every model. Use bf16-mixed, or drop `model.reference_dtype`"
            )
        if self._device_mesh is not None:
            return self._make_sharded(torch.bfloat16 if held == "bfloat16" else self._weights_dtype, frozen=True)
        if self._in_zero_3:
            return self._make_partitioned(torch.bfloat16 if held == "bfloat16" else None, frozen=True)
        policy = copy.deepcopy(self.policy).requires_grad_(False).eval()
        if held == "nf4":
            NF4().quantize(policy.model, policy.model.get_output_embeddings(), self._products_dtype)
        elif held == "bfloat16":
            policy.bfloat16()
        elif held == "auto" and not self.averages_reference and not self._in_shards:
            hold_casts(policy, self._products_dtype)
        return policy

    def _made_empty(self, dtype: torch.dtype, frozen: bool) -> tuple[Policy, bool]:
        """Return a model to be cut, and whether it is empty until then: else its files cannot be read in shards."""
        policy = Policy(empty_model(self.checkpoint, dtype))
        in_shards = can_read_shards(policy, self.checkpoint)
        if not in_shards:
            rank_zero_warn("the model's files cannot be read in shards: every rank holds all of it for a moment")
            policy = Policy(load_model(self.checkpoint, dtype))
        return (policy.requires_grad_(False).eval() if frozen else self._prepared(policy)), in_shards

    def _make_sharded(self, dtype: torch.dtype, frozen: bool) -> Policy:
        policy, in_shards = self._made_empty(dtype, frozen)
        strategy = self.trainer.strategy
        settings = {name: getattr(strategy, name) for name in _OF_SHARDS if hasattr(strategy, name)}
        shard(policy, self._device_mesh["data_parallel"], **settings)
        if in_shards:
            read_shards(policy, self.checkpoint, getattr(strategy, "shards_device", strategy.root_device))
        return policy

    def _make_partitioned(self, dtype: torch.dtype | None, frozen: bool) -> Policy:
        """Return a model cut by DeepSpeed; ``None``: of the dtype that its engine trains in."""
        strategy: Any = self.trainer.strategy
        policy, in_shards = self._made_empty(dtype or strategy.shards_dtype, frozen)
        partition(policy, strategy.config, strategy.root_device, self.checkpoint if in_shards else None)
        return policy

    def _prepared(self, policy: Policy) -> Policy:
        recompute(policy.model, self.gradient_checkpointing)
        policy.offloads = self.activation_offload
        return policy.train()

    def cast_once(self) -> AbstractContextManager:
        """Keep autocast's copies of weights for all passes within; of shards they would undo what sharding saves."""
        return nullcontext() if self._in_shards else cast_once(self.device)

    @property
    def _in_shards(self) -> bool:
        return self._device_mesh is not None or self._in_zero_3 or isinstance(self.trainer.strategy, FSDP)

    @property
    def _in_zero_3(self) -> bool:
        return isinstance(self.trainer.strategy, DeepSpeed) and self.trainer.strategy.zero_stage_3

    def keep_old_policy(self) -> None:
        """Make the old policy what the policy is now."""
        if isinstance(self.old_policy, AdapterSnapshot):
            self.old_policy.take()
        else:
            self._move(self.old_policy)

    def check_refresh(self, decay: float) -> None:
        """Refuse to move a reference that cannot be moved so.

        Args:
            decay: Of :meth:`refresh_reference`.
        """
        if self._in_zero_3:
            raise ConfigError(
                "`trainer.callbacks: ReferenceRefresh` and `trainer.strategy: DeepSpeed` of stage 3 contradict: its "
                "checkpoints hold the policy alone. Use configs/strategy/fsdp2.yaml, or drop the callback"
            )
        if self.adapter is not None:
            raise ConfigError(
                "`trainer.callbacks: ReferenceRefresh` and `model.adapter` contradict: the reference is the policy "
                "with its adapter off, which never moves. Drop one of them"
            )
        dtypes = {
            str(parameter.dtype).removeprefix("torch.") for parameter in cast("Policy", self.reference).parameters()
        }
        if self.reference_dtype == "nf4" or (decay > 0 and dtypes != {"float32"}):
            raise ConfigError(
                f"`model.reference_dtype` expected float32 for a reference that "
                f"{'is an average' if decay > 0 else 'is replaced'}, but got "
                f"{', '.join(sorted(dtypes))}: set it, and `trainer.precision` to 32-true or bf16-mixed"
            )

    def refresh_reference(self, decay: float = 0.0) -> None:
        """Move the reference towards the policy: reference = decay * reference + (1 - decay) * policy.

        Args:
            decay: 0 makes it the policy.
        """
        self._move(cast("Policy", self.reference), decay)

    @torch.no_grad()
    def _move(self, copied: Policy, decay: float = 0.0) -> None:
        for old, new in zip(copied.parameters(), self.policy.parameters(), strict=True):
            old.lerp_(new.to(old.dtype), 1 - decay)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the policy's weights, whole, one at a time, under their Hugging Face names; all ranks must go along."""
        if self.adapter is not None:
            yield from published_weights(self.policy.model)
            return
        if isinstance(self.policy, FullyShardedDataParallel):
            yield from ((name.removeprefix("model."), tensor) for name, tensor in whole_weights(self.policy))
            return
        if self._in_zero_3:
            yield from gathered_weights(self.policy.model)
            return
        for name, tensor in self.policy.model.state_dict().items():
            yield name, whole(tensor)


def _size(policy: Policy) -> str:
    """Return how many parameters there are, and how many of them are trained if not all; a byte holds two of 4 bits."""
    held = sum(size(p) * (2 if p.dtype == torch.uint8 else 1) for p in policy.parameters())
    trained = sum(size(p) for p in policy.parameters() if p.requires_grad)
    part = "" if trained == held else f", {trained / 1e6:.2g} M of them trained"
    return f"{held / 1e6:.0f} M parameters{part}"
