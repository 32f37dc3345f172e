"""Lightning callbacks that observe and shape a run; grpo_lit never imports them."""

from callbacks.console import Console

__all__ = ["Console"]
