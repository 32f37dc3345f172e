"""Lightning strategies that need nothing but their name."""

from grpo_lit.strategies.deepspeed import DeepSpeed
from grpo_lit.strategies.fsdp import FSDP
from grpo_lit.strategies.fsdp2 import FSDP2

__all__ = ["FSDP", "FSDP2", "DeepSpeed"]
