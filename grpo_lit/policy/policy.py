"""The policy: a causal language model that answers with log-prob and entropy of completion tokens."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from typing_extensions import override

from grpo_lit.batch import KeptTensors
from grpo_lit.errors import ConfigError
from grpo_lit.policy.attention import PACKED, attend_to_packs, no_mask
from grpo_lit.policy.head import Head, logprobs_and_entropy
from grpo_lit.policy.input_casts import InputCasts
from grpo_lit.policy.kernel_caches import bound_kernel_caches
from grpo_lit.policy.offload import offloaded
from grpo_lit.policy.packing import Pack
from grpo_lit.policy.precision import apply_but_keep
from grpo_lit.shapes import TokenFloat, TokenInt

#: Attention that does not see a whole sequence, or state that runs along the row.
_UNMASKABLE = ("linear_attention", "sliding_attention", "chunked_attention", "mamba", "recurrent", "conv")


@dataclass(frozen=True)
class PolicyOutput:
    """What the policy says of the completion tokens of a micro-batch.

    Attributes:
        logprobs: log p(token | before) at the sampling temperature, among the kept tokens [nats].
        entropy: Entropy of the distribution each token was drawn from [nats].
    """

    logprobs: TokenFloat
    entropy: TokenFloat


#: Answers as a policy does: one, or something that borrows one.
Scorer = Callable[..., PolicyOutput]


class OutputHead(nn.Module):
    """The chunked head as a module: who gathers weights for a module's forward and backward sees both of them here.

    It holds no weights. Those of the output layer are read in this forward, and in its backward, alone: the output
    layer's own forward, which would make [T, V], is never called.
    """

    @override
    def forward(
        self, hidden: Tensor, targets: TokenInt, output: nn.Module, settings: dict[str, Any], kept: KeptTensors | None
    ) -> tuple[TokenFloat, TokenFloat]:
        """Return log-prob and entropy of the target tokens; see :func:`logprobs_and_entropy`.

        Args:
            hidden: Last hidden states at the positions that predict the targets.
            targets: The tokens that were drawn.
            output: The output layer.
            settings: Of :class:`Head`, beside weight and bias.
            kept: The tokens that were possible at each position; ``None``: all.
        """
        layer: Any = output
        head = Head(weight=layer.weight, bias=getattr(layer, "bias", None), **settings)
        return logprobs_and_entropy(hidden, targets, head, kept)


class Policy(nn.Module):
    """Wraps a Hugging Face causal language model; one call is one micro-batch.

    Args:
        model: The model, without dropout (two forward passes must agree).
        entropy_gradient: Whether the entropy carries gradient, for an entropy bonus.

    Attributes:
        adapted: Whether what is trained of it is an adapter, whose weights stay float32.
        offloads: Whether activations wait for backward in the machine's memory.
    """

    def __init__(self, model: PreTrainedModel, entropy_gradient: bool = False) -> None:
        super().__init__()
        bound_kernel_caches()
        self.model, self.head = model, OutputHead()
        if can_share_prefix(model):
            attend_to_packs(model)
        self.input_casts = InputCasts(model)
        self.entropy_gradient = entropy_gradient
        self.adapted = self.offloads = False

    def set_entropy_gradient(self, wanted: bool) -> None:
        """Let the entropy carry gradient, or not; reaches the policy through a wrapper too, where setting would not."""
        self.entropy_gradient = wanted

    def forward(
        self, pack: Pack, targets: TokenInt, temperature: float, kept: KeptTensors | None = None
    ) -> PolicyOutput:
        """Return log-prob and entropy of the target tokens, which follow ``pack.predictor``."""
        hidden = self.last_hidden(pack).flatten(0, 1)[pack.predictor]
        settings = _head_settings(self.model.config.get_text_config())
        settings["entropy_gradient"] = self.entropy_gradient and torch.is_grad_enabled()
        output = self.model.get_output_embeddings()
        logprobs, entropy = self.head(hidden, targets, output, settings | {"temperature": temperature}, kept)
        return PolicyOutput(logprobs, entropy)

    def last_hidden(self, pack: Pack) -> Float[Tensor, "R L H"]:
        """Return what the model makes of a pack before its output layer."""
        packed = {} if pack.layout is None else {"layout": pack.layout, "attention_mask": no_mask(pack.input_ids)}
        waiting = offloaded(self.model, pack.input_ids.device) if self.offloads else nullcontext()
        with waiting, self.input_casts.shared():
            return self.model.base_model(
                input_ids=pack.input_ids, position_ids=pack.position_ids, use_cache=False, **packed
            ).last_hidden_state

    @override
    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "Policy":
        adapter = [parameter for parameter in self.parameters() if parameter.requires_grad] if self.adapted else []
        apply_but_keep(self, lambda: super(Policy, self)._apply(fn, recurse), adapter)
        return self


def _head_settings(config: PretrainedConfig) -> dict[str, Any]:
    return {"scale": _logit_scale(config), "softcap": getattr(config, "final_logit_softcapping", None)}


def _logit_scale(config: PretrainedConfig) -> float:
    if getattr(config, "logit_scale", None) is not None:  # Cohere multiplies
        return float(config.logit_scale)
    return 1.0 / float(getattr(config, "logits_scaling", None) or 1.0)  # Granite divides


@torch.no_grad()
def check_head(policy: Policy) -> None:
    """Hold the policy's log-probs of a few tokens against those of the logits that the model makes itself.

    Args:
        policy: With all of its weights.

    Raises:
        ConfigError: The architecture does more between its last hidden states and its logits than the head knows of.
    """
    model, (weight, *_) = policy.model, policy.model.get_input_embeddings().parameters()
    ids = (7919 * torch.arange(1, 9, device=weight.device) % weight.shape[0])[None]
    positions = torch.arange(ids.shape[1], device=ids.device)
    got = policy(Pack(ids, positions[None], None, positions[:-1]), ids[0, 1:], 1.0).logprobs
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].to(got.dtype)
    gap = float((logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0] - got).abs().max())
    precision = 1e-3 if weight.dtype in (torch.float32, torch.float64) else 2e-2  # logits may be in bf16
    if not gap <= precision * (1.0 + float(logits.abs().max())):
        raise ConfigError(
            "`model.checkpoint` expected logits that are the output layer's products, scaled or soft-capped, but got "
            f"{type(model).__name__}, whose log-probs are {gap:.2g} nats from those: its head is not known here"
        )


def can_share_prefix(model: PreTrainedModel) -> bool:
    """Return whether completions may share one copy of their prompt; see :func:`why_plain_rows`."""
    return why_plain_rows(model) is None


def why_plain_rows(model: PreTrainedModel) -> str | None:
    """Return why every sequence needs a row of its own; ``None``: completions may share one copy of their prompt.

    That takes full attention in every layer, and attention functions that can be exchanged for the packs' own.
    """
    config = model.config.get_text_config()
    layers = getattr(config, "layer_types", None) or ["full_attention"]
    windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    unmaskable = [layer for layer in layers if any(kind in layer for kind in _UNMASKABLE)]
    if unmaskable:
        return f"layers of {unmaskable[0].replace('_', ' ')}"
    if windowed and not getattr(config, "layer_types", None):  # the layer list is the truth where there is one
        return "sliding windows"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "soft-capped attention"
    if model._is_stateful:
        return "state that runs along the row"
    if config._attn_implementation not in ("sdpa", PACKED) or not model._can_set_attn_implementation():
        return "attention that cannot be exchanged"
    return None
