"""The prompt source ABC: an ordered, finite set of prompts."""

from abc import ABC, abstractmethod

from grpo_lit.rollout import Prompt


class PromptSource(ABC):
    """An ordered, finite set of prompts without token ids: the stream applies the chat template and shuffles."""

    @abstractmethod
    def __len__(self) -> int:
        """Return how many prompts there are."""

    @abstractmethod
    def __getitem__(self, index: int) -> Prompt:
        """Return prompt ``index``: always the same one, with an id that is unique in this source."""
