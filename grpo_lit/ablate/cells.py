"""One run of an ablation: its command, whether it is finished, and what came out."""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from grpo_lit.ablate.spec import Part, Spec, fingerprint_of, slug
from grpo_lit.errors import ConfigError
from grpo_lit.metrics.names import is_held_out
from grpo_lit.report.axis import along
from grpo_lit.report.record import read_run


@dataclass(frozen=True)
class Result:
    """What a finished run gave.

    Attributes:
        settings: Hash of all its settings, the seed apart.
        steps: At which accuracy was measured.
        values: The accuracies.
        spent: What each had cost; empty where the run does not log it.
        held_out_prompts: Prompts that it is the accuracy on; 0 where not known.
        seconds: Sum of all steps.
        trained: Optimizer steps that the run made.
    """

    settings: str
    steps: list[int]
    values: list[float]
    spent: list[float]
    held_out_prompts: int
    seconds: float
    trained: int


@dataclass(frozen=True)
class Cell:
    """A combination of changes with a seed.

    Attributes:
        combination: Names of the changes.
        seed: The seed.
        title: What it is called.
        folder: Where it logs to.
        arguments: Words after ``grpo-lit fit``, without the checkpoint of a run that goes on.
        settings: See :class:`Result`.
        metric: Accuracy to read.
        over: Cumulative count to read.
    """

    combination: tuple[str, ...]
    seed: int
    title: str
    folder: Path
    arguments: tuple[str, ...]
    settings: str
    metric: str
    over: str

    def command(self) -> list[str]:
        """Return the command that makes the run, or goes on with it."""
        go_on = [] if (checkpoint := self.checkpoint()) is None else ["--ckpt_path", str(checkpoint)]
        return [sys.executable, "-m", "grpo_lit", "fit", *self.arguments, *go_on]

    def checkpoint(self) -> Path | None:
        """Return the newest checkpoint of an unfinished run: a resumed run may have numbered its ``last.ckpt``."""
        found = [file for file in self.folder.glob("checkpoints/last*.ckpt") if file.exists()]  # a link may be broken
        return max(found, key=lambda file: file.stat().st_mtime, default=None)

    def begin(self) -> None:
        """Note the settings, so that no later ablation takes the run for one of its own.

        Raises:
            ConfigError: The folder holds a run with other settings.
        """
        self.check()
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / "cell.json", {"settings": self.settings, "arguments": self.arguments})

    def check(self) -> None:
        """Refuse a folder that holds a run with other settings.

        Raises:
            ConfigError: It does.
        """
        file = self.folder / "cell.json"
        if file.exists() and json.loads(file.read_text())["settings"] != self.settings:
            raise ConfigError(
                f"`output` expected runs with these settings, but {self.folder} was made with others: choose another "
                "folder, or delete it"
            )

    def result(self) -> Result | None:
        """Return what came out; ``None`` for a run that is not finished."""
        file = self.folder / "result.json"
        return Result(**json.loads(file.read_text())) if file.exists() else None

    def finish(self, keep_checkpoints: bool) -> Result:
        """Read the run's events, note what came out, and delete its checkpoints unless they are wanted.

        Raises:
            ConfigError: It logged no accuracy of that name.
        """
        run = read_run(self.folder, self.title)
        if self.metric not in run.scalars:
            names = ", ".join(name for name in run.scalars if name.startswith("val/"))
            raise ConfigError(
                f"`metric` expected one that the runs log, but got {self.metric}; they log {names or 'none'}"
            )
        steps, values = run.scalars[self.metric]
        spent = along(run.scalars, self.over)[self.metric][0] if self.over in run.scalars else []
        prompts = run.held_out_prompts.get(self.metric.split("/")[1], 0)
        seconds = sum(run.scalars.get("system/time_step", ([], []))[1])
        trained = max((made[-1] + 1 for name, (made, _) in run.scalars.items() if not is_held_out(name)), default=0)
        result = Result(self.settings, steps, values, spent, prompts, seconds, trained)
        write_json(self.folder / "result.json", asdict(result))
        if not keep_checkpoints:
            shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)
        return result


def cells_of(spec: Spec, overrides: Sequence[str]) -> list[Cell]:
    """Return all runs, seed by seed, so that an ablation cut short is whole for the first seeds."""
    return [_cell(spec, combination, seed, overrides) for seed in spec.seeds for combination in spec.combinations()]


def _cell(spec: Spec, combination: tuple[str, ...], seed: int, overrides: Sequence[str]) -> Cell:
    parts = [*spec.base, *(part for name in combination for part in spec.overlays[name])]
    own = {
        "seed_everything": seed,
        "data.seed": seed,
        "trainer.logger": "lightning.pytorch.loggers.TensorBoardLogger",
        "trainer.logger.init_args.save_dir": spec.output,
        "trainer.logger.init_args.name": slug(combination),
        "trainer.logger.init_args.version": f"seed_{seed}",
    }
    arguments = [word for part in parts for word in ("--config", _written(part))]
    # The bar is for a person watching; a log has a line per step.
    arguments += ["--trainer.enable_progress_bar", "false", *overrides]
    arguments += [word for key, value in own.items() for word in (f"--{key}", str(value))]
    text = fingerprint_of(spec, combination, overrides)
    return Cell(
        combination,
        seed,
        f"{spec.title(combination)}, seed {seed}",
        spec.output / slug(combination) / f"seed_{seed}",
        tuple(arguments),
        hashlib.sha256(text.encode()).hexdigest(),
        spec.metric,
        spec.over,
    )


def _written(part: Part) -> str:
    return part if isinstance(part, str) else json.dumps(part)


def write_json(file: Path, content: object) -> None:
    """Write a file that is there whole or not at all, whenever the process ends."""
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    draft.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(draft, file)
