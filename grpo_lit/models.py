"""What a module owns: the policy, the frozen reference and the old policy, on their way into and out of a run."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from grpo_lit.errors import ConfigError
from grpo_lit.evaluating import EvaluatingModule
from grpo_lit.policy.checkpoint import empty_model, load_model
from grpo_lit.policy.policy import Policy, can_share_prefix
from grpo_lit.policy.precision import float32_by_default, weights_dtype
from grpo_lit.policy.sharding import can_read_shards, read_shards, shard, whole


class ModelsModule(EvaluatingModule):
    """Loads a policy, and the copies of it that a recipe asks for.

    Args:
        checkpoint: Folder or hub id of the model.
        needs_reference: Hold a frozen reference: the weights that the run began with.
        needs_old_policy: Hold a frozen copy for the weights of an earlier step.
        share_prefix: One copy of a prompt for all its completions. ``None``: where the architecture allows it.
        gradient_checkpointing: Recompute activations in backward.
    """

    def __init__(
        self,
        checkpoint: str,
        needs_reference: bool,
        needs_old_policy: bool,
        share_prefix: bool | None,
        gradient_checkpointing: bool,
    ) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self._needs_reference, self._needs_old_policy = needs_reference, needs_old_policy
        self.share_prefix, self.gradient_checkpointing = share_prefix, gradient_checkpointing
        self.policy: Policy | None = None
        self.reference: Policy | None = None
        self.old_policy: Policy | None = None

    @float32_by_default()
    def configure_model(self) -> None:
        """Load the policy, and the copies of it that the recipe asks for; once."""
        if self.policy is not None:
            return
        self._check_mesh()
        self.policy = self._make_policy()
        model, able = self.policy.model, can_share_prefix(self.policy.model)
        if self.share_prefix and not able:
            raise ConfigError(
                f"`model.share_prefix` expected false or null, but got true: {type(model).__name__} attends in a way "
                "that a shared prompt cannot be masked out of"
            )
        self.share_prefix = able if self.share_prefix is None else self.share_prefix
        rank_zero_info(
            f"{type(model).__name__}, {model.num_parameters() / 1e6:.0f} M parameters; prompts are "
            f"{'shared by' if self.share_prefix else 'repeated for'} their completions"
        )
        if self._needs_reference:
            self.reference = self._make_policy(frozen=True)
        if self._needs_old_policy:
            self.old_policy = self._make_policy(frozen=True)

    def _check_mesh(self) -> None:
        if self._device_mesh is not None and (size := self._device_mesh["tensor_parallel"].size()) > 1:
            raise ConfigError(
                f"`trainer.strategy` expected a tensor-parallel size of 1, but got {size}: use "
                "grpo_lit.strategies.FSDP2"
            )

    def _make_policy(self, frozen: bool = False) -> Policy:
        """Return the model of the checkpoint: whole, or this rank's share of it under a strategy that has a mesh."""
        mesh, dtype = self._device_mesh, weights_dtype(str(self.trainer.precision))
        if mesh is None:
            made = copy.deepcopy(self.policy) if frozen else Policy(load_model(self.checkpoint, dtype))
            return self._prepared(made, frozen)
        policy = Policy(empty_model(self.checkpoint, dtype))
        in_shards = can_read_shards(policy, self.checkpoint)
        if not in_shards:
            rank_zero_warn("the model's files cannot be read in shards: every rank holds all of it for a moment")
            policy = Policy(load_model(self.checkpoint, dtype))
        strategy = self.trainer.strategy
        self._prepared(policy, frozen)
        shard(policy, mesh["data_parallel"], getattr(strategy, "reshard_after_forward", True))
        if in_shards:
            read_shards(policy, self.checkpoint, strategy.root_device)
        return policy

    def _prepared(self, policy: Policy, frozen: bool) -> Policy:
        if frozen:
            return policy.requires_grad_(False).eval()
        if self.gradient_checkpointing:
            policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return policy.train()

    @torch.no_grad()
    def refresh_reference(self, decay: float = 0.0) -> None:
        """Move the reference towards the policy: reference = decay * reference + (1 - decay) * policy.

        Args:
            decay: 0 makes it the policy.
        """
        for old, new in zip(self.reference.parameters(), self.policy.parameters(), strict=True):
            old.lerp_(new.to(old.dtype), 1 - decay)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the policy's weights, whole, one at a time, under their Hugging Face names; all ranks must go along."""
        for name, tensor in self.policy.model.state_dict().items():
            yield name, whole(tensor)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Note which model this is, for exporting it."""
        models = [name for name in ("policy", "reference", "old_policy") if getattr(self, name) is not None]
        checkpoint["grpo_lit"] = {"format": 1, "checkpoint": self.checkpoint, "models": models}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint with a reference or an old policy where this run has none, or the reverse."""
        self.resumed_step = checkpoint["global_step"]
        held = checkpoint["grpo_lit"].get("models") or {name.split(".")[0] for name in checkpoint["state_dict"]}
        keys = {"reference": "model.objective.divergence` or `model.shadows", "old_policy": "model.old_policy"}
        for name, key in keys.items():
            if (name in held) != (getattr(self, name) is not None):
                raise ConfigError(
                    f"`{key}` expected what the checkpoint was trained with, {'a' if name in held else 'no'} {name}, "
                    f"but got {'none' if name in held else 'one'}: resume with the same recipe, or start a "
                    "new run from exported weights"
                )
