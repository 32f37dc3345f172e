"""The engine: whoever draws completions from a copy of the policy's weights of its own."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from grpo_lit.rollout import Completion, Request, Sampling


@dataclass(frozen=True)
class EngineModel:
    """What an engine must know of the model before its weights arrive.

    Attributes:
        path: Folder (or hub id) with config, tokenizer and weights that ``from_pretrained`` accepts.
        stop_token_ids: Every token that ends a completion.
        max_length: Most tokens of a prompt and its completion together.
    """

    path: str
    stop_token_ids: tuple[int, ...]
    max_length: int


class Engine(ABC):
    """Samples completions from its own copy of the weights: sync, staleness and mismatch mean the same everywhere.

    Life: ``start`` once, then any number of ``load_weights`` and ``generate``, then ``close`` (which may be called
    at any time, twice, and from an exception handler).
    """

    #: ``global_step`` of the weights held; ``None`` until the learner has sent some.
    weight_version: int | None = None

    @abstractmethod
    def start(self, model: EngineModel) -> None:
        """Build the model and whatever processes serve it. Called once, before anything else."""

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace every weight, drop whatever was cached from the old ones, and set ``weight_version``.

        Args:
            weights: Names and tensors as in the Hugging Face ``state_dict``; consumed once, in order, lazily.
            version: ``global_step`` of the learner these weights come from.
        """

    @abstractmethod
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Draw one completion per request, in order.

        A completion ends with the first stop token, which it includes, or at ``sampling.max_tokens``. Log-probs are
        ``log_softmax(logits / temperature)`` of the emitted token in float32, and 0 for greedy (temperature 0).
        A request's completion depends on its own prompt and seed only.
        """

    @abstractmethod
    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return log p(token_t | tokens before t) at temperature 1 for every token but the first [nats]."""

    @abstractmethod
    def close(self) -> None:
        """Free memory and end every process. Safe to call twice, and without ``start``."""
