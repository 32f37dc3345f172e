"""New weights that come in the middle of a generation when a test says so."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from grpo_lit.rollouts.in_flight import Load, Updates


@dataclass(frozen=True)
class ScriptedUpdates(Updates):
    """Hands weights over when it is asked for the n-th time.

    Attributes:
        script: The n, and the weights with their version, in order.
        asked: How often it was asked, one entry each: whether there were some.
    """

    script: dict[int, tuple[Iterable[tuple[str, Tensor]], int]] = field(default_factory=dict)
    asked: list[bool] = field(default_factory=list)

    def take(self, load: Load) -> bool:
        self.asked.append(len(self.asked) in self.script)
        if self.asked[-1]:
            load(*self.script[len(self.asked) - 1])
        return self.asked[-1]


def logprobs_across(
    old: PreTrainedModel, new: PreTrainedModel, prompt: tuple[int, ...], tokens: tuple[int, ...], first: int, keep: bool
) -> tuple[Tensor, Tensor]:
    """Log-probs of the tokens before ``first`` by the old model, and of the others by the new one.

    With ``keep`` the new model goes on behind the keys and values that the old one had made when the update came: of
    the prompt and all tokens but the last that it drew, which is the new one's first input.
    """
    ids = torch.tensor([prompt + tokens])
    there = len(prompt) + first - 1  # texts whose keys and values are there
    with torch.no_grad():
        before = old(ids).logits[0, len(prompt) - 1 : there].log_softmax(-1)
        if keep:
            cache: Any = DynamicCache(config=old.config)
            old(ids[:, :there], past_key_values=cache)
            rows = new(ids[:, there:], past_key_values=cache).logits[0, :-1]
        else:
            rows = new(ids).logits[0, there:-1]
    taken = torch.tensor(tokens)[:, None]
    return before.gather(1, taken[:first])[:, 0], rows.log_softmax(-1).gather(1, taken[first:])[:, 0]
