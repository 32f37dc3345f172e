"""What a checkpoint holds of a module's models, and which checkpoints it can go on from."""

from dataclasses import asdict
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from grpo_lit.errors import ConfigError
from grpo_lit.models import ModelsModule
from grpo_lit.policy.adapter import base_digest
from grpo_lit.strategies.reading import shapes

#: What schedulers keep that is no setting, beside what begins with an underscore.
_MOVES = {"last_epoch", "base_lrs", "best", "num_bad_epochs", "cooldown_counter", "T_cur", "T_i"}
_ADVICE = "resume with the settings that it was saved with, or start a new run from exported weights"


class CheckpointedModule(ModelsModule):
    """Saves what a run has trained and cannot be told from elsewhere, with a note of which model it is.

    Beside an adapter that is the adapter alone: the model's own files hold the rest. A reference in 4 bits is made of
    them again.
    """

    def setup(self, stage: str) -> None:
        """Note the recipe as it is written, before schedules move it."""
        super().setup(stage)
        self._resumed: dict[str, Any] | None = None
        self._recipe = {name.strip("_"): _described(part) for name, part in vars(self.objective).items()}

    def configure_model(self) -> None:
        """Make the models; see :meth:`ModelsModule.configure_model`."""
        super().configure_model()
        self.strict_loading = self.adapter is None and self.reference_dtype != "nf4"
        self._base = None if self.adapter is None else base_digest(self.policy.model)
        #: Before a strategy wraps the models: asking them later may take all ranks.
        self._shapes = {name: shape for name, shape in shapes(self.state_dict()).items() if name in self._saved_names()}

    def _saved_names(self) -> set[str]:
        if self.strict_loading:
            return set(self.state_dict())
        if self.adapter is None:
            return {name for name in self.state_dict() if not name.startswith("reference.")}
        return {name for name, p in self.named_parameters() if p.requires_grad or name.startswith("old_policy.")}

    def _note(self) -> dict[str, Any]:
        models = [name for name in ("policy", "reference", "old_policy") if getattr(self, name) is not None]
        note: dict[str, Any] = {"format": 1, "checkpoint": self.checkpoint, "models": models}
        parts = {key: getattr(self, key) for key in ("adapter", "quantization")}
        if self.adapter is not None:
            note |= {"base_dtype": str(self._weights_dtype).removeprefix("torch."), "base": self._base}
        return note | {key: asdict(part) for key, part in parts.items() if part is not None}

    def _trained_by(self) -> dict[str, str | None]:
        schedulers = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        return {
            "optimizer": type(self.trainer.optimizers[0]).__name__,
            "lr_scheduler": type(schedulers[0]).__name__ if schedulers else None,
        }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Note which model this is, for exporting it, and how it is trained; leave out what is frozen."""
        checkpoint["grpo_lit"] = self._note() | self._trained_by() | {"recipe": self._recipe}
        if not self.strict_loading:
            saved = self._saved_names()
            checkpoint["state_dict"] = {n: tensor for n, tensor in checkpoint["state_dict"].items() if n in saved}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse what this run cannot go on from; strategies that load into the models as they read ask before."""
        self.resumed_step = checkpoint["global_step"]
        if self._resumed is None or "state_dict" in checkpoint:
            self.check_checkpoint(checkpoint)

    def check_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of other models, weights, or another optimizer, and warn of another recipe.

        Args:
            checkpoint: Its content; tensors may be on the meta device, and weights missing that are loaded already.

        Raises:
            ConfigError: Going on would fail, or would not be going on.
        """
        self._check_models(checkpoint)
        if "state_dict" in checkpoint:
            self._check_weights(shapes(checkpoint["state_dict"]))
        if self.trainer.state.fn != TrainerFn.FITTING:
            return
        if "lr_schedulers" not in checkpoint:
            raise ConfigError(
                "`ckpt_path` expected a checkpoint with the optimizer's state, but got one of weights alone "
                "(`save_weights_only`): export it, and start a new run from that folder"
            )
        self._resumed = checkpoint["grpo_lit"]
        if self.trainer.optimizers:  # else they are made later
            self._check_trained_by()

    def _check_models(self, checkpoint: dict[str, Any]) -> None:
        held = checkpoint["grpo_lit"].get("models") or {name.split(".")[0] for name in checkpoint["state_dict"]}
        keys = {"reference": "model.objective.divergence` or `model.shadows", "old_policy": "model.old_policy"}
        for name, key in keys.items():
            if (name in held) != (getattr(self, name) is not None):
                raise ConfigError(
                    f"`{key}` expected what the checkpoint was trained with, {'a' if name in held else 'no'} {name}, "
                    f"but got {'none' if name in held else 'one'}: resume with the same recipe, or start a "
                    "new run from exported weights"
                )
        note, noted = self._note(), checkpoint["grpo_lit"]
        for key in ("adapter", "quantization"):
            if (saved := noted.get(key)) != note.get(key):
                raise ConfigError(
                    f"`model.{key}` expected what the checkpoint was trained with, {_shown(saved)}, but got "
                    f"{_shown(note.get(key))}: resume with the same settings, or start a new run from exported weights"
                )

        if noted.get("base", self._base) != self._base:  # not noted in older checkpoints
            raise ConfigError(
                f"`model.checkpoint` expected the model that the checkpoint's adapter was trained beside, "
                f"{noted['checkpoint']}, but got other weights, those of {self.checkpoint}"
            )

    def _check_weights(self, saved: dict[str, tuple[int, ...]]) -> None:
        if odd := saved.keys() ^ self._shapes.keys():
            raise ConfigError(
                f"`ckpt_path` expected the weights of {self.checkpoint} with these settings, but got a checkpoint in "
                f"which {min(odd)} is {'too many' if min(odd) in saved else 'missing'}: {_ADVICE}"
            )
        for name, shape in self._shapes.items():
            if saved[name] != shape:
                raise ConfigError(
                    f"`ckpt_path` expected the weights of {self.checkpoint}, but got a checkpoint of another model, in "
                    f"which {name} is {list(saved[name])} and not {list(shape)}: {_ADVICE}"
                )

    def _check_trained_by(self) -> None:
        for key, here in self._trained_by().items():
            if (saved := self._resumed.get(key, here)) != here:  # not noted in older checkpoints
                raise ConfigError(
                    f"`model.{key}` expected what the checkpoint was trained with, {saved or 'none'}, but got "
                    f"{here or 'none'}, which cannot go on from its state: {_ADVICE}"
                )
        for part, saved in self._resumed.get("recipe", {}).items():
            if saved != (here := self._recipe.get(part)):
                rank_zero_warn(
                    f"`model.objective.{part}` was {saved} where the checkpoint was written, and is {here} from now on"
                )

    def on_fit_start(self) -> None:
        """Refuse another optimizer, where it is made after the checkpoint was read; note its settings."""
        if self._resumed is not None:
            self._check_trained_by()
        self._written = self._settings()

    def on_train_start(self) -> None:
        """Say which settings of the optimizer are the checkpoint's: those written now are not looked at."""
        if self._resumed is None:
            return
        kept = self._settings()
        for key, written in self._written.items():
            if key in kept and kept[key] != written:
                rank_zero_warn(
                    f"`model.{key}` is {written} here, but the run goes on with the checkpoint's {kept[key]}, as its "
                    "optimizer's state holds it. To change it, start a new run from exported weights"
                )

    def _settings(self) -> dict[str, Any]:
        """Return what is set of the optimizer and of the schedule, by key, as long as it is plain."""
        group, schedules = dict(self.trainer.optimizers[0].param_groups[0]), self.trainer.lr_scheduler_configs
        moved = group.pop("lr")
        if "initial_lr" in group or not schedules:
            group["lr"] = group.pop("initial_lr", moved)
        found = {f"optimizer.{key}": value for key, value in group.items() if key != "params"}
        for config in schedules:
            kept = {k: v for k, v in vars(config.scheduler).items() if k[0] != "_" and k not in _MOVES}
            found |= {f"lr_scheduler.{key}": value for key, value in kept.items()}
        return {key: value for key, value in found.items() if isinstance(value, int | float | str | tuple | list)}


def _shown(settings: dict[str, Any] | None) -> str:
    return "none" if settings is None else ", ".join(f"{name} {value}" for name, value in settings.items())


def _described(part: Any) -> str:
    """Return a part of a recipe as it is written; an own one without a representation by its class."""
    if isinstance(part, tuple | list):
        return f"[{', '.join(map(_described, part))}]"
    plain = type(part).__repr__ is object.__repr__
    return type(part).__name__ if plain else repr(part)
