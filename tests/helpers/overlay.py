"""An overlay that makes any configuration a run of seconds."""

from pathlib import Path
from typing import Any


def tiny_overlay(model: Path, trainer: dict[str, Any] | None = None, **data: Any) -> dict[str, Any]:
    """Return a tiny run of the real path, on one CPU process without vLLM.

    Args:
        model: Folder of a tiny model.
        trainer: What differs of the trainer.
        data: What differs of the data.
    """
    return {
        "trainer": {"accelerator": "cpu", "devices": 1, **(trainer or {})},
        "model": {"checkpoint": str(model)},
        "data": {
            "engine": {"class_path": "TransformersEngine", "init_args": {"device": "cpu"}},
            "train": {"class_path": "toys.Letters", "init_args": {"size": 12}},
            "val": {"letters": {"class_path": "toys.Letters", "init_args": {"size": 2, "heldout": True}}},
            "rewards": {
                "rewards": {"answer": {"reward": {"class_path": "toys.EvenShare"}}},
                "correct": "answer",
                "correct_at": 0.5,
            },
            "sampling": {"max_tokens": 5, "completions": 3},
            "prompts_per_rollout": 4,
            "max_prompt_tokens": 200,
            **data,
        },
    }
