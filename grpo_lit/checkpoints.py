"""What a checkpoint holds of a module's models, and which checkpoints it can go on from."""

from dataclasses import asdict
from typing import Any

from grpo_lit.errors import ConfigError
from grpo_lit.models import ModelsModule


class CheckpointedModule(ModelsModule):
    """Saves what a run has trained and cannot be told from elsewhere, with a note of which model it is.

    Beside an adapter that is the adapter alone: the model's own files hold the rest. A reference in 4 bits is made of
    them again.
    """

    def configure_model(self) -> None:
        """Make the models; see :meth:`ModelsModule.configure_model`."""
        super().configure_model()
        self.strict_loading = self.adapter is None and self.reference_dtype != "nf4"

    def _saved_names(self) -> set[str]:
        if self.adapter is None:
            return {name for name in self.state_dict() if not name.startswith("reference.")}
        return {name for name, p in self.named_parameters() if p.requires_grad or name.startswith("old_policy.")}

    def _note(self) -> dict[str, Any]:
        models = [name for name in ("policy", "reference", "old_policy") if getattr(self, name) is not None]
        note: dict[str, Any] = {"format": 1, "checkpoint": self.checkpoint, "models": models}
        parts = {key: getattr(self, key) for key in ("adapter", "quantization")}
        if self.adapter is not None:
            note["base_dtype"] = str(self._weights_dtype).removeprefix("torch.")
        return note | {key: asdict(part) for key, part in parts.items() if part is not None}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Note which model this is, for exporting it, and leave out what is frozen."""
        checkpoint["grpo_lit"] = self._note()
        if not self.strict_loading:
            saved = self._saved_names()
            checkpoint["state_dict"] = {n: tensor for n, tensor in checkpoint["state_dict"].items() if n in saved}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint with a reference, an old policy or an adapter where this run has none, or the reverse."""
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
        note = self._note()
        for key in ("adapter", "quantization"):
            if (saved := checkpoint["grpo_lit"].get(key)) != note.get(key):
                raise ConfigError(
                    f"`model.{key}` expected what the checkpoint was trained with, {_shown(saved)}, but got "
                    f"{_shown(note.get(key))}: resume with the same settings, or start a new run from exported weights"
                )
        if not self.strict_loading and (odd := self._saved_names() ^ checkpoint["state_dict"].keys()):
            raise ConfigError(
                f"`ckpt_path` expected the weights of {self.checkpoint} with these settings, but got a checkpoint in "
                f"which {min(odd)} is missing or too many: resume with the settings that it was saved with"
            )


def _shown(settings: dict[str, Any] | None) -> str:
    return "none" if settings is None else ", ".join(f"{name} {value}" for name, value in settings.items())
