"""Small parts that tests plug into the real training path."""

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_lit.data.source import PromptSource
from grpo_lit.rewards.reward import Reward
from grpo_lit.rollout import Completion, Prompt


@dataclass
class Letters(PromptSource):
    """Prompts of different lengths: a, bb, ccc, ..."""

    size: int = 12
    heldout: bool = False

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Prompt:
        letter = chr((65 if self.heldout else 97) + index % 26)
        return Prompt(id=f"letters/{index}", question=letter * (1 + index), answer="1", domain="letters")


class EvenShare(Reward):
    """Share of even token ids: a random model has some of it in every group, and can learn more."""

    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float | None]:
        return [sum(t % 2 == 0 for t in c.token_ids) / max(len(c.token_ids), 1) for c in completions]


@dataclass
class Constant(Reward):
    """The same score for everything: no group ever has signal."""

    value: float = 0.0

    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float | None]:
        return [self.value] * len(completions)


class SomePrompts(Reward):
    """EvenShare on every second prompt, 0 on the others: groups with signal and groups without."""

    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float | None]:
        if int(prompt.id.rsplit("/", 1)[1]) % 2:
            return [0.0] * len(completions)
        return EvenShare()(prompt, completions)
