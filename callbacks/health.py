"""A run that says what is wrong with it while it can still be saved."""

import json
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from callbacks.tensorboard import tensorboards
from grpo_lit.health import Event, Monitor, Rules


class Health(Callback):
    """Names symptoms of a sick run, their likely causes, and what to check or change, as soon as they are seen.

    Each episode is told once: on the console, under ``health`` in TensorBoard's text tab, and as a line of
    ``health.jsonl`` beside the event files. It looks at what is logged, no more: ``scripts/diagnose`` finds the same in
    the files of a finished run, and a run without a logger is not looked at.

    Args:
        rules: Thresholds of the rules, by rule; ``off`` lists those that are not applied. Default: as documented there.
    """

    def __init__(self, rules: Rules | None = None) -> None:
        self.rules = rules or Rules()
        self._monitor = Monitor(self.rules.active())
        self._recorder = _Recorder(self._monitor)
        self._file: Path | None = None

    def state_dict(self) -> dict[str, Any]:
        """Keep what has been seen, and which episodes have been told."""
        return self._monitor.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on looking."""
        self._monitor.load_state_dict(state_dict)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Listen to what is logged: only loggers see it all, and at the steps that the event files have."""
        if stage == "fit" and trainer.loggers and self._recorder not in trainer.loggers:
            trainer.loggers = [*trainer.loggers, self._recorder]

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Listen no more."""
        if self._recorder in trainer.loggers:
            trainer.loggers = [logger for logger in trainer.loggers if logger is not self._recorder]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find out where to write; every rank must ask."""
        folder = trainer.log_dir
        self._file = Path(folder) / "health.jsonl" if trainer.loggers and folder is not None else None
        if not trainer.loggers:
            rank_zero_warn("`trainer.callbacks: Health` looks at nothing: the run has no `trainer.logger`")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look at the step just made, and at the validation before it."""
        self._look(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at the last validation."""
        self._look(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Look at the step that ended the run."""
        self._look(trainer)

    def _look(self, trainer: Trainer) -> None:
        events = self._monitor.look()
        if not events or not trainer.is_global_zero:
            return
        for event in events:
            rank_zero_info(f"health: {event}")
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(event.as_dict()) + "\n" for event in events)
        for logger in tensorboards(trainer):
            logger.experiment.add_text("health", "\n\n".join(map(_markdown, events)), events[0].step)
            logger.save()


class _Recorder(Logger):
    """Hands what is logged to a monitor."""

    def __init__(self, monitor: Monitor) -> None:
        super().__init__()
        self._monitor = monitor

    @property
    def name(self) -> None:
        """Of no experiment."""

    @property
    def version(self) -> None:
        """Of none either."""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Rules look at metrics only."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Take them in."""
        if step is not None:
            self._monitor.add(step, metrics)


def _markdown(event: Event) -> str:
    lists = {"likely causes": event.causes, "what to check or change": event.checks}
    parts = [f"**{event.rule.replace('_', ' ')}** at step {event.step}: {event.symptom}"]
    parts += [f"{heading}:\n\n" + "\n".join(f"- {text}" for text in texts) for heading, texts in lists.items()]
    return "\n\n".join(parts)
