"""What ``predict`` writes: one JSON line per held-out prompt with all its answers."""

import heapq
import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from grpo_lit.data.evaluation import EvaluationBatch
from grpo_lit.errors import ConfigError
from grpo_lit.ranks import Ranks
from grpo_lit.rollout import Group

#: Name of the file where none is given, in the folder that the run is logged to.
DEFAULT_NAME = "predictions.jsonl"


def prediction_rows(batch: EvaluationBatch) -> list[dict[str, Any]]:
    """Return one row per prompt, in the order of the batch, plain types only.

    ``set`` and ``index`` say where the prompt stands; ``id``, ``domain``, ``question`` and ``answer``, the ground
    truth, are its own; ``completions`` holds the greedy answer first, then the sampled ones.
    """
    rows = []
    for i, (place, greedy) in enumerate(zip(batch.places, batch.greedy, strict=True)):
        prompt = greedy.prompt
        completions = _completions(greedy, greedy=True)
        if batch.sampled:
            completions += _completions(batch.sampled[i], greedy=False)
        rows.append(
            {
                "set": batch.name,
                "index": place,
                "id": prompt.id,
                "domain": prompt.domain,
                "question": prompt.question,
                "answer": prompt.answer,
                "completions": completions,
            }
        )
    return rows


class PredictionWriter(Callback):
    """Writes the rows that ``predict`` makes, and puts the file in its place when all are there.

    Every rank writes a part of its own beside the file, line by line, so that an interrupted run loses no row that was
    written. At the end the first rank merges the parts in the order of sets and prompts and renames the result: whoever
    finds the file finds all of it.
    """

    def __init__(self) -> None:
        self._target = self._path = Path()
        self._part: TextIO | None = None
        self._written = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Open this rank's part before any prompt is answered.

        Raises:
            ConfigError: The file cannot be written.
        """
        if stage != TrainerFn.PREDICTING:
            return
        folder = trainer.log_dir  # every rank must ask
        named = trainer.datamodule.evaluation.predictions  # type: ignore[attr-defined]
        self._target = Path(folder or ".") / DEFAULT_NAME if named is None else Path(named).expanduser()
        ranks = Ranks(trainer.strategy)
        self._path = self._beside(f"rank{ranks.rank}.part" if ranks.world_size > 1 else "part")
        try:
            if self._target.is_dir():
                raise IsADirectoryError("it is a folder")
            self._target.parent.mkdir(parents=True, exist_ok=True)
            self._part = self._path.open("w", encoding="utf-8", buffering=1)
        except OSError as error:
            raise ConfigError(
                f"`data.evaluation.predictions` expected a file that can be written, but got {self._target}: {error}"
            ) from error
        self._written = 0

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Write a batch's rows."""
        for row in outputs:
            self._part.write(json.dumps(row) + "\n")
        self._written += len(outputs)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the file in its place, and say where that is.

        Raises:
            ConfigError: The ranks do not see what the others wrote.
        """
        self._part.flush()
        os.fsync(self._part.fileno())
        self._part.close()
        ranks, whole = Ranks(trainer.strategy), self._beside("part")
        written = ranks.gather(self._written)  # nobody comes out of this before every part is whole
        if ranks.world_size > 1:
            parts = [self._beside(f"rank{rank}.part") for rank in range(ranks.world_size)]
            missing = [name for names in ranks.gather([p.name for p in parts if not p.exists()]) for name in names]
            if missing:
                raise ConfigError(
                    f"`data.evaluation.predictions` expected a folder that all ranks share, but got "
                    f"{self._target.parent}, where one does not find {missing[0]}: each rank's "
                    "answers are in the part it wrote"
                )
            if ranks.rank == 0:
                _merge(parts, list(trainer.datamodule.val), whole)  # type: ignore[attr-defined]
        if ranks.rank == 0:
            os.replace(whole, self._target)
        trainer.strategy.barrier("predictions")
        rank_zero_info(f"answers to {sum(written)} prompts are in {self._target}")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Say where the rows are that were written so far, on Ctrl-C too."""
        if self._part is None or self._part.closed:
            return
        self._part.close()
        others = f", those of other ranks in {self._beside('rank*.part')}" if trainer.world_size > 1 else ""
        rank_zero_info(f"interrupted: answers to the first {self._written} prompts are in {self._path}{others}")

    def _beside(self, ending: str) -> Path:
        return self._target.with_name(f"{self._target.name}.{ending}")


def _merge(parts: list[Path], sets: list[str], target: Path) -> None:
    """Write the lines of all parts, each of them in order, to ``target`` in order, and remove the parts.

    Args:
        parts: Files of rows.
        sets: Names of the sets in their order.
        target: The file to write.
    """
    order = {name: i for i, name in enumerate(sets)}

    def place(line: str) -> tuple[int, int]:
        row = json.loads(line)
        return order[row["set"]], row["index"]

    with ExitStack() as opened, target.open("w", encoding="utf-8") as file:
        file.writelines(heapq.merge(*(opened.enter_context(part.open(encoding="utf-8")) for part in parts), key=place))
        file.flush()
        os.fsync(file.fileno())
    for part in parts:
        part.unlink()


def _completions(group: Group, greedy: bool) -> list[dict[str, Any]]:
    return [
        {
            "text": completion.text,
            "tokens": len(completion.token_ids),
            "finish_reason": completion.finish_reason,
            "greedy": greedy,
            "correct": group.correct[i],
            "reward": group.rewards[i],
            "rewards": {name: scores[i] for name, scores in group.scores.items()},
        }
        for i, completion in enumerate(group.completions)
    ]
