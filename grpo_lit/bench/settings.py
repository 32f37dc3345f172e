"""The shapes that the learner's benchmark measures at."""

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from grpo_lit.bench.options import Options

#: Shapes of SmolLM2-135M, as published with its weights.
SMOLLM2_135M: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
#: The same architecture in a size that a test can wait for.
TINY = SMOLLM2_135M | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@dataclass(frozen=True)
class Preset:
    """How long prompts and completions are.

    Attributes:
        prompt: Tokens of every prompt.
        cap: Most tokens of a completion.
        median: Of log-normal lengths; ``None``: uniform from 1 to ``cap``.
        spread: Standard deviation of the logarithm of log-normal lengths.
    """

    prompt: int
    cap: int
    median: float | None = None
    spread: float = 0.5

    def draw(self, count: int, generator: torch.Generator) -> list[int]:
        """Return lengths of completions, from 1 to ``cap``."""
        if self.median is None:
            return torch.randint(1, self.cap + 1, (count,), generator=generator).tolist()
        normal = torch.randn(count, generator=generator)
        return (self.median * (self.spread * normal).exp()).round().long().clamp(1, self.cap).tolist()

    def shrunk(self, factor: int = 8) -> "Preset":
        """Return the same shape at a fraction of the lengths."""
        median = None if self.median is None else self.median / factor
        return Preset(math.ceil(self.prompt / factor), math.ceil(self.cap / factor), median, self.spread)


PRESETS = {"short": Preset(53, 64), "long": Preset(256, 512, median=200.0)}


class Settings(Options):
    """Options, and the shapes they describe."""

    @property
    def shape(self) -> Preset:
        """Lengths of prompts and completions."""
        return PRESETS[self.preset].shrunk() if self.tiny else PRESETS[self.preset]

    @property
    def dtype(self) -> torch.dtype:
        """Of matrix products."""
        if self.precision == "auto":
            return torch.bfloat16 if has_bf16() else torch.float32
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    @property
    def device(self) -> torch.device:
        """CUDA where there is one."""
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def model_config(self) -> LlamaConfig:
        """Return the configuration of the model."""
        return LlamaConfig(**(TINY if self.tiny else SMOLLM2_135M))

    def to_plain(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        return {f.name: str(v) if isinstance(v := getattr(self, f.name), Path) else v for f in fields(self)}

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> "Settings":
        """Rebuild settings from :meth:`to_plain`."""
        json = values["json"]
        return cls(**values | {"recipe": Path(values["recipe"]), "json": None if json is None else Path(json)})


def has_bf16() -> bool:
    """Return whether this machine multiplies bf16 matrices in hardware."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    # A PyTorch that cannot tell (before 2.10) is taken for a machine without.
    capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name) for name in ("amx_bf16", "avx512_bf16", "bf16", "sve_bf16"))
