"""TRL's GRPOTrainer on the same rollout, through its public interface."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, TrainerCallback

from grpo_lit.bench.arms import Arm, Step
from grpo_lit.bench.flops import now
from grpo_lit.bench.settings import Settings
from grpo_lit.bench.workload import Models, make_groups
from grpo_lit.errors import ConfigError
from grpo_lit.objectives import K3, GroupAdvantage, Objective, SequenceMean, TokenClip
from grpo_lit.rollout import Group


class _Clock(TrainerCallback):
    """Notes when the rollout came, when its gradient was there and when the weights had moved [s]."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_gradient: Callable[[], None] = lambda: None
        self.rollout_at = self.gradient_at = self.update_at = self.updated_at = 0.0

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.gradient_at = now(self.device)
        self.on_gradient()
        self.update_at = now(self.device)

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.updated_at = now(self.device)


class TRLArm(Arm):
    """A GRPOTrainer whose ``rollout_func`` returns completions that were drawn beforehand.

    Its time runs from their return to ``on_pre_optimizer_step``: rewards, advantages, the reference's log-probs,
    forward and backward. Sampling is no part of it.
    """

    trainer: Any

    def __init__(self, settings: Settings) -> None:
        os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func says at every start that it may change
        super().__init__(settings)
        self.loss_arguments = _loss_arguments(self.objective)
        self.folder = tempfile.TemporaryDirectory(prefix="grpo_lit_trl_")
        self.clock = _Clock(self.device)
        self.tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1, "<pad>": 2}, unk_token="<unk>")),
            unk_token="<unk>",
            eos_token="<eos>",
            pad_token="<pad>",
        )
        if self.models.reference is not None:  # TRL loads its reference from where the policy came from
            folder = str(Path(self.folder.name) / "reference")
            self.models.reference.save_pretrained(folder)
            self.models.policy.config._name_or_path = folder
            self.models = Models(self.models.policy, None)

    def prepare(self, groups: int) -> None:
        """Make a trainer; it holds the reference."""
        from datasets import Dataset
        from trl import GRPOTrainer

        settings = self.settings
        vocabulary = self.models.policy.config.vocab_size
        made = make_groups(settings.shape, groups, settings.group_size, vocabulary, settings.seed)
        self.trainer = GRPOTrainer(
            model=self.models.policy,
            reward_funcs=_stored_reward,
            args=self._config(groups),
            train_dataset=Dataset.from_list([{"prompt": group.prompt.id} for group in made]),
            processing_class=self.tokenizer,
            callbacks=[self.clock],
            optimizers=(self.optimizer, None),
            rollout_func=lambda prompts, trainer: self._rollout(made, prompts),
        )

    def step(self, on_gradient: Callable[[], None]) -> Step:
        """Train for one step; see the base class."""
        clock = self.clock
        clock.on_gradient = on_gradient
        self.trainer.train()
        losses = [entry["loss"] for entry in self.trainer.state.log_history if "loss" in entry]
        return Step(losses[0], clock.gradient_at - clock.rollout_at, clock.updated_at - clock.update_at)

    def _rollout(self, made: list[Group], prompts: list[str]) -> dict[str, list]:
        """Return the next stored completion of each prompt, which stands there once for each of them."""
        left = {group.prompt.id: iter(zip(group.completions, group.rewards, strict=True)) for group in made}
        drawn = [next(left[prompt]) for prompt in prompts]
        tokens = {group.prompt.id: list(group.prompt.token_ids) for group in made}
        result: dict[str, list] = {
            "prompt_ids": [tokens[prompt] for prompt in prompts],
            "completion_ids": [list(completion.token_ids) for completion, _ in drawn],
            "logprobs": [list(completion.logprobs) for completion, _ in drawn],
            "stored": [reward for _, reward in drawn],
        }
        self.clock.rollout_at = now(self.device)
        return result

    def _config(self, groups: int) -> Any:
        from trl import GRPOConfig

        settings = self.settings
        sequences = groups * settings.group_size
        rows = min(settings.plain_rows, sequences)
        if sequences % rows:
            raise ConfigError(
                f"`plain_rows` expected to divide the {sequences} completions of a step, but got {rows}: TRL's "
                "batches are equal"
            )
        return GRPOConfig(
            output_dir=self.folder.name,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=sequences // rows,
            num_generations=settings.group_size,
            max_completion_length=settings.shape.cap,
            max_steps=1,
            learning_rate=0.0,
            max_grad_norm=0.0,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            shuffle_dataset=False,
            disable_tqdm=True,
            bf16=settings.dtype == torch.bfloat16,
            use_cpu=self.device.type == "cpu",
            gradient_checkpointing=settings.gradient_checkpointing,
            seed=settings.seed,
            **self.loss_arguments,
        )


def _stored_reward(completions: list, stored: list[float], **columns: Any) -> list[float]:
    return stored


def _loss_arguments(objective: Objective) -> dict[str, Any]:
    """Return TRL's names for GRPO's recipe.

    Raises:
        ConfigError: For another recipe: what TRL makes of its parts differs in details.
    """
    clip, advantage, divergence = objective.surrogate, objective.advantage, objective.divergence
    known = (
        isinstance(clip, TokenClip)
        and clip.dual is None
        and isinstance(advantage, GroupAdvantage)
        and advantage.scale == "group_std"
        and not advantage.leave_one_out
        and isinstance(objective.reduction, SequenceMean)
        and (divergence is None or (isinstance(divergence, K3) and isinstance(divergence.beta, float)))
        and not (objective.corrections or objective.filters)
    )
    if not known:
        raise ConfigError("`recipe` expected grpo.yaml for the arm trl, but got another: leave trl out of `arms`")
    beta = divergence.beta if divergence is not None else 0.0
    clips = {"epsilon": cast("TokenClip", clip).low, "epsilon_high": cast("TokenClip", clip).high}
    return {"loss_type": "grpo", "scale_rewards": "group", "beta": beta, **clips}
