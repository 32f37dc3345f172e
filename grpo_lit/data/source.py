"""The prompt source ABC: an ordered, finite set of prompts."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Collection

from grpo_lit.rollout import Prompt


class PromptSource(ABC):
    """An ordered, finite set of prompts without token ids: the stream applies the chat template and shuffles.

    Attributes:
        domains: Every ``Prompt.domain`` there is, in any order. ``None``, the default, where that takes all prompts to
            tell: the run then knows those of the prompts that it looks at before it starts.
    """

    domains: Collection[str] | None = None

    @abstractmethod
    def __len__(self) -> int:
        """Return how many prompts there are."""

    @abstractmethod
    def __getitem__(self, index: int) -> Prompt:
        """Return prompt ``index``: always the same one, with an id that is unique in this source.

        Raises:
            IndexError: Where ``index`` is not in ``range(len(self))``, which also ends a ``for`` loop over the source.
        """

    def prompt_id(self, index: int) -> str:
        """Return the id of prompt ``index``; worth overriding where that is cheaper than making the prompt."""
        return self[index].id


def is_heldout(question: str, fraction: float) -> bool:
    """Tell whether a question belongs to the held-out split.

    The text alone decides (``blake2b(question) < fraction``), so the two splits share no question whatever the
    seeds, sizes, order or duplicates of the data. Both splits must be cut with the same fraction.

    Args:
        question: The question's exact text.
        fraction: Share of all questions that is held out, from 0 to 1.
    """
    digest = hashlib.blake2b(question.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64
