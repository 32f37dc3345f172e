"""The engine: whoever draws completions from a copy of the policy's weights of its own."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_lit.errors import ConfigError
from grpo_lit.rollout import Completion, Request, Sampling
from grpo_lit.rollouts.in_flight import InFlight, Updates


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
    at any time, twice, and from an exception handler). Calls come one at a time, though not always from the same
    thread; ``close`` alone may come while another is running, which then ends soon, by an error if need be.
    """

    #: ``global_step`` of the weights held; ``None`` until the learner has sent some.
    weight_version: int | None = None
    #: Whether the tokens that ``top_p`` or ``min_p`` leave possible can be recorded only beside a ``top_k``.
    kept_needs_top_k = False
    #: What it can do with completions in progress when new weights come.
    in_flight: tuple[InFlight, ...] = ("wait",)

    @property
    def weight_dtype(self) -> torch.dtype | None:
        """Precision in which matrices are held: a copy on their way here needs no other. ``None``: the learner's."""
        return None

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
        A request's completion depends on its own prompt and seed only. With ``min_p``, ``top_k`` or ``top_p``, applied
        in this order after the temperature, ``kept`` holds what was possible, and log-probs are normalised over it.
        """

    def generate_through(self, requests: Sequence[Request], sampling: Sampling, updates: Updates) -> list[Completion]:
        """Draw as :meth:`generate` does, and take new weights in the middle of it, as often as there are some.

        Nothing drawn is lost: completions in progress go on, each token's log-prob stays as it was when it was drawn,
        and says under which weights. An engine whose ``in_flight`` names more than ``wait`` has this method.

        Args:
            requests: What to draw.
            sampling: How.
            updates: Asked between two steps of the model, or several times a second.
        """
        raise NotImplementedError(f"{type(self).__name__} takes new weights between two calls only")

    def check_in_flight(self, how: InFlight) -> None:
        """Refuse what this engine cannot do with completions in progress.

        Raises:
            ConfigError: Names what it can.
        """
        if how not in self.in_flight:
            raise ConfigError(
                f"`data.rollout.asynchronous.in_flight` expected {' or '.join(self.in_flight)} with "
                f"{type(self).__name__}, but got {how}: it takes new weights between two calls only. Set it to wait, "
                "or sample with another engine"
            )

    def check_sampling(self, sampling: Sampling) -> None:
        """Refuse a way of sampling whose kept tokens this engine cannot record exactly.

        Raises:
            ConfigError: The learner would renormalise over something else than what was possible.
        """
        if self.kept_needs_top_k and sampling.truncates and sampling.top_k == 0:
            name = "top_p" if sampling.top_p < 1 else "min_p"
            raise ConfigError(
                f"`data.sampling.top_k` expected to be >= 1 beside `data.sampling.{name}` with {type(self).__name__}, "
                f"but got 0: what was possible is read from a list of the likeliest tokens, and {name} alone does not "
                "bound its length. Set a generous top_k (256, say), or sample with TransformersEngine"
            )

    @property
    def rests(self) -> bool:
        """Whether :meth:`rest` does anything."""
        return False

    def rest(self) -> None:  # noqa: B027 (most engines have nothing to give)
        """Give back memory that the learner can use until the engine is asked again, which wakes it; nothing is drawn.

        Afterwards ``weight_version`` is ``None`` where the weights were given up too: they must be loaded first then.
        """

    @abstractmethod
    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return log p(token_t | tokens before t) at temperature 1 for every token but the first [nats]."""

    @abstractmethod
    def close(self) -> None:
        """Free memory and end every process. Safe to call twice, and without ``start``."""
