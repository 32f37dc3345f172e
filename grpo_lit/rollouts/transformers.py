"""TransformersEngine: sampling with transformers alone, for machines without vLLM."""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from grpo_lit.errors import EngineError
from grpo_lit.policy.checkpoint import load_model, load_tokenizer
from grpo_lit.rollout import Completion, FinishReason, KeptTokens, Request, Sampling
from grpo_lit.rollouts.engine import Engine, EngineModel
from grpo_lit.rollouts.in_flight import InFlight, Updates

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TransformersEngine(Engine):
    """Samples with a copy of the model in this process. Always there; slower than vLLM.

    Requests are sampled in batches with a key-value cache, left-padded; a finished row leaves the batch. Each request
    has a random stream of its own, so that what it draws does not depend on its neighbours.

    Args:
        batch_size: Requests sampled at a time.
        dtype: Of the engine's copy of the weights.
        device: Where it lives; ``auto``: CUDA where there is one.
    """

    in_flight: tuple[InFlight, ...] = ("wait", "keep", "resume")

    def __init__(
        self,
        batch_size: int = 64,
        dtype: Literal["float32", "bfloat16"] = "float32",
        device: str = "auto",
    ) -> None:
        self.batch_size, self.dtype, self.device = batch_size, dtype, device
        self._model: PreTrainedModel | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._stops: tuple[int, ...] = ()

    @property
    def weight_dtype(self) -> torch.dtype:
        """Precision of the engine's copy."""
        return _DTYPES[self.dtype]

    def start(self, model: EngineModel) -> None:
        """Load the model."""
        device = ("cuda" if torch.cuda.is_available() else "cpu") if self.device == "auto" else self.device
        self._model = load_model(model.path, dtype=_DTYPES[self.dtype]).eval().to(device)
        self._tokenizer, self._stops = load_tokenizer(model.path), model.stop_token_ids

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy every weight in place; nothing is cached between calls of ``generate``."""
        own = self._loaded.state_dict()
        missing = set(own)
        for name, tensor in weights:
            if name not in own:
                raise EngineError(f"`weights` expected names of {type(self._model).__name__}, but got {name!r}")
            own[name].copy_(tensor)
            missing.discard(name)
        if missing:
            raise EngineError(
                f"`weights` expected every weight, but {len(missing)} are missing, {min(missing)!r} among them"
            )
        self.weight_version = version

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Draw one completion per request, in order; see :class:`Engine`."""
        return self._generated(requests, sampling, None)

    def generate_through(self, requests: Sequence[Request], sampling: Sampling, updates: Updates) -> list[Completion]:
        """Draw, and take new weights between any two tokens; see :class:`Engine`."""
        return self._generated(requests, sampling, updates)

    def _generated(self, requests: Sequence[Request], sampling: Sampling, updates: Updates | None) -> list[Completion]:
        # Prompts of one length together: less padding, and the result does not depend on the order.
        order = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt_ids))
        completions: dict[int, Completion] = {}
        for start in range(0, len(order), self.batch_size):
            chosen = order[start : start + self.batch_size]
            drawn = self._draw([requests[i] for i in chosen], sampling, updates)
            completions |= dict(zip(chosen, drawn, strict=True))
        return [completions[i] for i in range(len(requests))]

    @torch.inference_mode()
    def _draw(self, requests: Sequence[Request], sampling: Sampling, updates: Updates | None) -> list[Completion]:
        model, rows = self._loaded, list(range(len(requests)))
        tokens: list[list[int]] = [[] for _ in requests]
        logprobs: list[list[float]] = [[] for _ in requests]
        kept: list[list[list[int]]] = [[] for _ in requests]
        versions: list[list[int]] = [[] for _ in requests]
        limits = _limits(sampling)
        uniforms = torch.stack([_uniforms(request.seed, sampling.max_tokens) for request in requests])
        step_ids, mask, positions, cache = _begun(model, [request.prompt_ids for request in requests])
        for step in range(sampling.max_tokens):
            if self._model is None:
                raise EngineError("the engine was closed while it was sampling")
            if updates is not None and updates.take(self.load_weights) and updates.recompute:
                so_far = [(*requests[row].prompt_ids, *tokens[row]) for row in rows]
                step_ids, mask, positions, cache = _begun(model, so_far)
            logits = model(
                input_ids=step_ids, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1
            ).logits[:, -1]
            drawn = _draw_tokens(logits.float(), sampling.temperature, limits, uniforms[rows, step])
            for row, token, logprob in zip(rows, drawn.tokens.tolist(), drawn.logprobs.tolist(), strict=True):
                tokens[row].append(token)
                logprobs[row].append(logprob)
                versions[row].append(self.weight_version or 0)
            if drawn.possible is not None:
                for row, ids in zip(rows, _listed(drawn.possible), strict=True):
                    kept[row].append(ids)
            going = [i for i, row in enumerate(rows) if tokens[row][-1] not in self._stops]
            if not going:
                break
            step_ids, positions = drawn.tokens[:, None], positions[:, -1:] + 1
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], 1)
            if len(going) < len(rows):
                keep = torch.tensor(going, device=model.device)
                cache.batch_select_indices(keep)
                step_ids, positions, mask, rows = step_ids[keep], positions[keep], mask[keep], [rows[i] for i in going]
        masks = [KeptTokens.of(steps) if sampling.truncates else None for steps in kept]
        whole = [self._completion(*row) for row in zip(tokens, logprobs, masks, strict=True)]
        return [completion.sampled_by(by) for completion, by in zip(whole, versions, strict=True)]

    def _completion(self, tokens: list[int], logprobs: list[float], kept: KeptTokens | None) -> Completion:
        text = str(self._tokenizer.decode(tokens, skip_special_tokens=True))
        reason: FinishReason = "stop" if tokens and tokens[-1] in self._stops else "length"
        return Completion(tuple(tokens), tuple(logprobs), text, reason, self.weight_version or 0, kept)

    @torch.inference_mode()
    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return log p(token_t | tokens before t) at temperature 1 for every token but the first [nats]."""
        ids = torch.tensor([list(token_ids)], device=self._loaded.device)
        logprobs = self._loaded(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
        return logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()

    def close(self) -> None:
        """Free the model."""
        self._model, self.weight_version = None, None

    @property
    def _loaded(self) -> PreTrainedModel:
        if self._model is None:
            raise EngineError("the engine expected `start` before anything else, but it is not started")
        return self._model


class _Begun(NamedTuple):
    """What the model is called with for the next token of each row, when nothing is cached yet."""

    step_ids: Int[Tensor, "R L"]
    mask: Int[Tensor, "R L"]
    positions: Int[Tensor, "R L"]
    cache: DynamicCache


def _begun(model: PreTrainedModel, texts: Sequence[Sequence[int]]) -> _Begun:
    ids, mask = _left_padded(texts, model.device)
    return _Begun(ids, mask, (mask.cumsum(1) - 1).clamp(min=0), DynamicCache(config=model.config))


def _left_padded(
    prompts: Sequence[Sequence[int]], device: torch.device
) -> tuple[Int[Tensor, "R L"], Int[Tensor, "R L"]]:
    """Return token ids padded at the left, and the attention mask made of lengths, never of token values."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return ids.to(device), mask.to(device)


def _uniforms(seed: int, count: int) -> Float[Tensor, "t"]:
    """Return the numbers in [0, 1) that decide a request's tokens: its own, whatever else is in the batch."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _limits(sampling: Sampling) -> LogitsProcessorList:
    """Return what sets the logits of impossible tokens to -inf, in the order in which vLLM does."""
    if not sampling.truncates:
        return LogitsProcessorList()
    limits = LogitsProcessorList()
    limits += [MinPLogitsWarper(sampling.min_p)] if sampling.min_p > 0 else []
    limits += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k > 0 else []
    limits += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    return limits


class Drawn(NamedTuple):
    """One step of a batch.

    Attributes:
        tokens: What was drawn in each row.
        logprobs: Its log-prob, among the possible tokens.
        possible: Which tokens could have been drawn; ``None``: all.
    """

    tokens: Int[Tensor, "R"]
    logprobs: Float[Tensor, "R"]
    possible: Bool[Tensor, "R V"] | None


def _draw_tokens(
    logits: Float[Tensor, "R V"], temperature: float, limits: LogitsProcessorList, uniforms: Float[Tensor, "R"]
) -> Drawn:
    """Return a token per row and its log-prob: by inverse cumulative distribution, or the best at temperature 0."""
    if temperature == 0:
        best = logits.argmax(-1)
        return Drawn(best, torch.zeros(len(best), device=logits.device), None)
    logits = logits / temperature
    for limit in limits:
        logits = limit(None, logits)
    logprobs = torch.log_softmax(logits, -1)
    cumulative = logprobs.double().exp().cumsum(-1)
    total = cumulative[:, -1:]
    # Rounding may leave the total a hair off 1: scale to it, and stay below it, so that no number points past the last
    # possible token.
    points = torch.minimum(uniforms.to(logits.device)[:, None] * total, total.nextafter(total.new_zeros(())))
    tokens = torch.searchsorted(cumulative, points, right=True)
    return Drawn(tokens[:, 0], logprobs.gather(1, tokens)[:, 0], logprobs > -torch.inf if limits else None)


def _listed(possible: Bool[Tensor, "R V"]) -> list[list[int]]:
    """Return the ids of the possible tokens of each row, in ascending order."""
    ids = possible.nonzero()[:, 1].cpu()
    return [row.tolist() for row in ids.split(possible.sum(1).tolist())]
