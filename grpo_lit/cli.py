"""The command line: ``grpo-lit fit|validate|test|predict --config base.yaml --config overlay.yaml ...``."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback

from grpo_lit import objectives, rewards
from grpo_lit.data import files, hub, mixture, reasoning_gym
from grpo_lit.data.module import RolloutDataModule
from grpo_lit.errors import ConfigError, EngineError, RewardError, TrainingError
from grpo_lit.interrupts import Interrupted, ending_in_order, handle, is_first_rank, outcome_of, started_by_lightning
from grpo_lit.mistakes import PlainParser, condensed
from grpo_lit.module import GRPOModule
from grpo_lit.quiet import quieten
from grpo_lit.rollouts import transformers, vllm, vllm_server
from grpo_lit.strategies import DeepSpeed
from grpo_lit.strategies.checkpoint_io import in_own_format
from grpo_lit.strategies.checks import check_processes, refusal
from grpo_lit.strategies.reading import inspect
from grpo_lit.strategies.saving import check_writable
from grpo_lit.versions import VERSIONS_FILE, note_versions

DESCRIPTION = """Train a language model on its own scored answers, with GRPO or a relative of it, and measure what it
learnt. Configurations are YAML files, of which later ones win: grpo-lit fit --config configs/base.yaml --config
configs/recipe/dr_grpo.yaml --model.checkpoint FOLDER_OR_HUB_ID. A subcommand's --help explains every key."""
#: Having been imported, their classes can be named without a path in YAML: `surrogate: TokenClip`.
PARTS = (objectives, rewards, files, hub, mixture, reasoning_gym, transformers, vllm, vllm_server)
#: Checkpoints that Lightning looks for itself.
_FOUND_LATER = ("last", "best", "hpc", "registry")
PlainParser.class_names = tuple(name for part in PARTS for name in vars(part) if name[0].isupper())


class ConfigBesideLogs(SaveConfigCallback):
    """Saves configuration and versions where the run is logged, and nowhere if it is not."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write them, but not into the current folder, where they might replace the user's own config.yaml."""
        if not trainer.loggers:
            return
        super().setup(trainer, pl_module, stage)
        folder = trainer.log_dir  # every rank must ask
        if trainer.is_global_zero:
            held_out = trainer.datamodule._held_out.prompts  # type: ignore[attr-defined]
            note_versions(Path(folder) / VERSIONS_FILE, {name: len(prompts) for name, prompts in held_out.items()})


class GRPOCLI(LightningCLI):
    """LightningCLI with the model's checkpoint handed to the data module and to rewards that read tokens."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Link what two sides must agree on, so that it is written once."""
        parser.link_arguments("model.checkpoint", "data.checkpoint")

    def before_instantiate_classes(self) -> None:
        """Refuse devices that there are none of, and fill in what one key says of another part.

        That is the tokenizer of rewards that name none; and no progress bar where none is wanted.

        Rewards are named by the user, so that no link can point at them. A bar: Lightning refuses
        ``enable_progress_bar: false`` beside one.
        """
        config = self.config[self.subcommand]
        for part in config.data.rewards.init_args.get("rewards", {}).values():
            arguments = part.reward.get("init_args", {})
            if arguments.get("tokenizer") == "":
                arguments["tokenizer"] = config.model.checkpoint
        trainer = config.trainer
        check_processes(trainer)
        if trainer.enable_progress_bar is False and trainer.callbacks:
            trainer.callbacks = [part for part in trainer.callbacks if not part.class_path.endswith("ProgressBar")]

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Return the trainer, with SIGTERM, and SLURM's signal before the time limit, left to grpo_lit.interrupts.

        Lightning waits for the end of the batch, while vLLM's processes end at once; and with several ranks it starts a
        collective inside of the signal's handler, which hangs where a rank is in another one. Of a SLURM job it would
        save there too, in the middle of a step, and queue the job again.
        """
        trainer = super().instantiate_trainer(**kwargs)
        signals = trainer._signal_connector
        signals._sigterm_notifier_fn = lambda *_: None  # type: ignore[method-assign]
        signals._slurm_sigusr_handler_fn = handle  # type: ignore[method-assign, assignment]
        return trainer

    def _run_subcommand(self, subcommand: str) -> None:
        try:
            super()._run_subcommand(subcommand)
        except Interrupted as interrupted:
            interrupted.outcome = outcome_of(self.trainer)
            if started_by_lightning(self.trainer):
                interrupted.status = 0
            raise

    def _parse_ckpt_path(self) -> None:
        """Leave the checkpoint alone: Lightning would read all of it for settings that this package keeps in YAML."""

    def before_fit(self) -> None:
        """Look at the checkpoint to go on from, and at where the run is logged, before anything takes time."""
        path, strategy = self.config[self.subcommand].get("ckpt_path"), self.trainer.strategy
        named = path is not None and path.split(":")[0] not in _FOUND_LATER and _is_local_file_protocol(path)
        if named and in_own_format(strategy) and not isinstance(strategy, DeepSpeed):  # which has a format of its own
            inspect(Path(path), weights_only=self.config[self.subcommand].get("weights_only"))
        for logger in self.trainer.loggers if self.trainer.is_global_zero else ():
            if logger.save_dir is not None and _is_local_file_protocol(logger.save_dir):
                check_writable(Path(logger.save_dir), "trainer.logger")

    before_validate = before_test = before_predict = before_fit

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        """Make the Trainer; what Lightning has against its settings is the user's to mend."""
        try:
            return super()._instantiate_trainer(config, callbacks)
        except (ValueError, TypeError, ImportError, MisconfigurationException) as error:
            raise refusal(error, self.config[self.subcommand].trainer) from error


def run(args: ArgsType = None) -> GRPOCLI:
    """Run a subcommand, for Python callers and tests.

    Args:
        args: Command-line words; ``None``: those of this process.

    Raises:
        ConfigError: A setting cannot work.
        EngineError: The engine failed.
        TrainingError: The run cannot go on.
    """
    quieten()
    return GRPOCLI(
        GRPOModule,
        RolloutDataModule,
        # A second run in the same folder replaces the record of the first instead of refusing to start.
        save_config_kwargs={"overwrite": True},
        save_config_callback=ConfigBesideLogs,
        auto_configure_optimizers=False,
        parser_class=PlainParser,
        # Named here: run as a module, or by torchrun, the program's own name is that of a file.
        parser_kwargs={"parser_mode": "yaml", "prog": "grpo-lit", "description": DESCRIPTION},
        args=args,
    )


def main(args: Sequence[str] | None = None) -> None:
    """Console script: a user's error is answered in a few lines, without a traceback unless GRPO_LIT_TRACEBACK=1."""
    if "" not in sys.path:
        sys.path.insert(0, "")  # an own part beside the YAML is found, as `python -m` would
    try:
        with ending_in_order():
            run(list(args) if args is not None else None)
    except Interrupted as interrupted:
        if is_first_rank():
            print(f"{interrupted}: {interrupted.outcome or 'ended before the run began'}", file=sys.stderr)
        sys.exit(interrupted.status)
    except (ConfigError, EngineError, RewardError, TrainingError) as error:
        _answer(error, str(error))
    except MisconfigurationException as error:
        # Manual optimization: the learner clips and cuts into micro-batches itself.
        _answer(
            error,
            f"{error}\n  grpo_lit has its own keys for these: model.gradient_clip_norm, data.num_updates, "
            "model.max_tokens_per_micro_batch",
        )
    except FileNotFoundError as error:
        _answer(error, str(error))
    except ValueError as error:
        # jsonargparse wraps what a constructor refused, once for each branch of its type.
        if "Does not validate against any" not in str(error):
            raise
        _answer(error, condensed(str(error), PlainParser.class_names))


def _answer(error: Exception, message: str) -> NoReturn:
    if os.environ.get("GRPO_LIT_TRACEBACK"):
        raise error
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)
