"""What the policy writes, to be read by a person."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from callbacks.tensorboard import cell, table, writers
from grpo_lit.batch import TokenBatch
from grpo_lit.callback import RolloutCallback
from grpo_lit.errors import ConfigError
from grpo_lit.module import GRPOModule
from grpo_lit.rollout import Group
from grpo_lit.rollouts.minibatch import Minibatch

_HEADER = ["prompt", "completion", "reward", "correct", "advantage", "tokens"]


class Samples(RolloutCallback):
    """Writes some groups of a rollout every so many optimizer steps: what was asked, answered, and what it was worth.

    They stand as a table in TensorBoard's text tab, shortened, and whole in ``samples.jsonl`` beside it, a line per
    group. The advantage is there unless a filter left the sample out. Rank 0 shows its own groups; a run without a
    logger writes nothing.

    Args:
        every_n_steps: Optimizer steps between two looks, the first step among them.
        groups: How many groups.
        completions: Most completions of a group in the table.
        characters: Longest text in the table; the middle of a longer one is left out.

    Raises:
        ConfigError: For a number below 1.
    """

    def __init__(self, every_n_steps: int = 20, groups: int = 4, completions: int = 4, characters: int = 1000) -> None:
        for name, value in {
            "every_n_steps": every_n_steps,
            "groups": groups,
            "completions": completions,
            "characters": characters,
        }.items():
            if value < 1:
                raise ConfigError(f"`{name}` of Samples expected to be >= 1, but got {value}")
        self.every_n_steps, self.groups = every_n_steps, groups
        self.completions, self.characters = completions, characters
        self._file: Path | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find out where to write; every rank must ask."""
        folder = trainer.log_dir
        self._file = Path(folder) / "samples.jsonl" if trainer.loggers and folder is not None else None
        if self._file is None:
            rank_zero_warn("`trainer.callbacks: Samples` writes nothing: the run has no `trainer.logger`")

    def on_step_finished(
        self, trainer: Trainer, module: GRPOModule, minibatch: Minibatch, values: dict[str, float]
    ) -> None:
        """Write groups of the step's rollout; none is left of one that began before a resume."""
        step, rollout = trainer.global_step - 1, minibatch.rollout
        if step % self.every_n_steps or not trainer.is_global_zero or self._file is None or not rollout.groups:
            return
        records = records_of(rollout.groups, rollout.batch, self.groups)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({"step": step, **record}, ensure_ascii=False) + "\n" for record in records)
        for writer in writers(trainer):
            writer.add_text("samples", self.markdown(records), step)

    def markdown(self, records: Sequence[Mapping[str, Any]]) -> str:
        """Return the table of what :func:`records_of` made."""
        rows = []
        for record in records:
            asked = record["question"] + ("" if record["answer"] is None else f"\n= {record['answer']}")
            for completion in record["completions"][: self.completions]:
                numbers = [_number(completion[name]) for name in ("reward", "correct", "advantage", "tokens")]
                cut = " (cut)" if completion["finish_reason"] == "length" else ""
                numbers[-1] += cut
                rows.append([self._text(asked), self._text(completion["text"]), *numbers])
                asked = ""
        return table(_HEADER, rows)

    def _text(self, text: str) -> str:
        if len(text) > self.characters:
            half = self.characters // 2
            text = f"{text[: self.characters - half]} [...] {text[len(text) - half :]}"
        return cell(text)


def records_of(groups: Sequence[Group], batch: TokenBatch, count: int) -> list[dict[str, Any]]:
    """Return the first groups in plain types.

    Args:
        groups: All groups of this rank's rollout.
        batch: Their sequences, those without any that a filter left out.
        count: How many groups to return.
    """
    advantages: dict[int, float] = {}
    if batch.advantages is not None and batch.sample is not None:
        advantages = dict(zip(batch.sample.tolist(), batch.advantages.tolist(), strict=True))
    records, start = [], 0
    for group in groups[:count]:
        completions = [
            {
                "text": completion.text,
                "tokens": len(completion.token_ids),
                "finish_reason": completion.finish_reason,
                "weight_version": completion.weight_version,
                "reward": group.rewards[i],
                "scores": {name: scores[i] for name, scores in group.scores.items()},
                "correct": group.correct[i],
                "advantage": advantages.get(start + i),
            }
            for i, completion in enumerate(group.completions)
        ]
        start += len(group.completions)
        prompt = group.prompt
        records.append(
            {
                "prompt": prompt.id,
                "domain": prompt.domain,
                "question": prompt.question,
                "answer": prompt.answer,
                "completions": completions,
            }
        )
    return records


def _number(value: float | int | bool | None) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value}" if isinstance(value, int) else f"{value:.3g}"
