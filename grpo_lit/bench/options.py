"""What the learner's benchmark can be asked for; imports next to nothing, so that its help is there at once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from grpo_lit.command import check_folder
from grpo_lit.errors import ConfigError

RECIPES = Path(__file__).parents[2] / "configs/recipe"
ARMS = ("ours", "compiled", "plain", "trl")
#: Those that are measured where none are named.
MEASURED = ("ours", "plain", "trl")


@dataclass
class Options:
    """Settings of the command line.

    Attributes:
        preset: ``short``: prompts of 53 tokens, completions of 1 to 64. ``long``: prompts of 256, completions
            log-normal around 200, at most 512.
        recipe: Recipe file whose loss is paid.
        precision: ``float32``, ``bf16`` (autocast over float32 weights) or ``auto``: bf16 where the processor has
            instructions for it.
        rounds: How often every arm is measured; medians are over them.
        group_size: Completions of a prompt.
        budget: Most input tokens of a micro-batch of ours, as ``model.max_tokens_per_micro_batch``.
        plain_rows: Sequences of a micro-batch of the others.
        gradient_checkpointing: Make layers again in backward, in every arm. Without, ours makes its norms again.
        one_at_a_time: End an arm's process before the next one's starts: for arms that do not fit beside each other.
        threads: Of each process; 0: as many as PyTorch takes.
        tiny: A model of two layers and an eighth of the lengths: says whether the benchmark works, and nothing else.
        seed: Of weights, tokens and lengths.
        min_free_gib: An arm is ended when the machine has less memory left than this [GiB].
        json: File to write every measurement to.
    """

    preset: Literal["short", "long"] = "short"
    recipe: Path = RECIPES / "grpo.yaml"
    precision: Literal["auto", "float32", "bf16"] = "auto"
    rounds: int = 5
    group_size: int = 8
    budget: int = 2048
    plain_rows: int = 16
    gradient_checkpointing: bool = False
    one_at_a_time: bool = False
    threads: int = 0
    tiny: bool = False
    seed: int = 0
    min_free_gib: float = 1.0
    json: Path | None = None

    def __post_init__(self) -> None:
        """Refuse sizes that mean nothing."""
        for name, least in (("rounds", 1), ("group_size", 2), ("budget", 1), ("plain_rows", 1), ("threads", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"`{name}` expected to be >= {least}, but got {getattr(self, name)}")
        if not self.recipe.is_file():
            raise ConfigError(f"`recipe` expected a YAML file, but got {self.recipe}: see configs/recipe")
        check_folder(self.json, "json")
