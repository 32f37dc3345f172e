"""Validation and prediction of the tiny model on held-out letters, for as many processes as call it."""

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from toys import EvenShare, Letters

from grpo_lit.data.evaluation import Evaluation
from grpo_lit.data.module import RolloutDataModule
from grpo_lit.module import GRPOModule
from grpo_lit.rewards import RewardCombination, ThinkAnswerFormat, WeightedReward
from grpo_lit.rollout import Sampling
from grpo_lit.rollouts.transformers import TransformersEngine


def evaluate(checkpoint: str, folder: str, devices: int) -> None:
    """Run both; 5 and 1 prompts, so that ranks have more or fewer, and one of them none."""
    rewards = {"even": WeightedReward(EvenShare()), "format": WeightedReward(ThinkAnswerFormat(), 0.0)}
    data = RolloutDataModule(
        engine=TransformersEngine(device="cpu"),
        train=Letters(),
        val={"many": Letters(5, heldout=True), "alone": Letters(1, heldout=True)},
        rewards=RewardCombination(rewards, correct="even", correct_at=0.5),
        sampling=Sampling(max_tokens=6, completions=3),
        evaluation=Evaluation(completions=4, prompts_per_batch=2),
        prompts_per_rollout=4,
        max_prompt_tokens=100,
        checkpoint=checkpoint,
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        logger=CSVLogger(folder, name="", version=""),
        enable_progress_bar=False,
        enable_checkpointing=False,
    )
    module = GRPOModule(checkpoint)
    trainer.validate(module, datamodule=data, verbose=False)
    trainer.predict(module, datamodule=data)
