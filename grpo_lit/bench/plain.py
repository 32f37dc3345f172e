"""The plain learner that everyone writes first: padded rows, full logits. What ours is measured against."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from grpo_lit.batch import TokenBatch
from grpo_lit.bench.workload import with_weights
from grpo_lit.objectives import Objective
from grpo_lit.shapes import TokenFloat


@dataclass(frozen=True)
class Rows:
    """Prompt and completion of some sequences, padded at the right.

    Attributes:
        input_ids: Tokens, 0 in the padding.
        attention_mask: Where there is a token.
        is_completion: Where there is a token of a completion.
    """

    input_ids: Int[Tensor, "R L"]
    attention_mask: Int[Tensor, "R L"]
    is_completion: Bool[Tensor, "R L"]


class PlainLearner:
    """Gradients by padded rows of full sequences.

    The prompt is repeated for each completion, logits are made for every position, log-probs of the whole vocabulary
    are held for backward, and the reference sees the same rows.

    Args:
        objective: The recipe.
        rows: Sequences of a micro-batch.
        device: Where the models are.
    """

    def __init__(self, objective: Objective, rows: int, device: torch.device) -> None:
        self.objective, self.rows, self.device = objective, rows, device

    def gradient(self, policy: PreTrainedModel, batch: TokenBatch, reference: PreTrainedModel | None = None) -> float:
        """Accumulate the gradient of a fresh rollout in one optimizer step; return the loss.

        Args:
            policy: Being trained, and its own old policy.
            batch: As drawn.
            reference: For the KL.
        """
        batch, loss = with_weights(self.objective, batch), 0.0
        for sequences in torch.arange(len(batch.lengths)).split(self.rows):
            micro = batch.select(sequences).to(self.device)
            rows = pad_rows(micro)
            if reference is not None:
                with torch.no_grad():
                    scored = token_logprobs(reference, rows, micro.temperature)[0]
                micro = replace(micro, reference_logprobs=scored)
            part = self.objective.loss(micro, *token_logprobs(policy, rows, micro.temperature))
            part.loss.backward()
            loss += float(part.loss.detach())
        return loss


def pad_rows(batch: TokenBatch) -> Rows:
    """Return a row for each sequence."""
    prompts = batch.prompt_ids.split(batch.prompt_lengths.tolist())
    completions = batch.token_ids.split(batch.lengths.tolist())
    whole = [torch.cat([prompts[g], c]) for g, c in zip(batch.group.tolist(), completions, strict=True)]
    input_ids = torch.nn.utils.rnn.pad_sequence(whole, batch_first=True)
    column = torch.arange(input_ids.shape[1], device=input_ids.device)
    prompt = batch.prompt_lengths[batch.group, None]
    is_token = column < prompt + batch.lengths[:, None]
    return Rows(input_ids, is_token.long(), is_token & (column >= prompt))


def token_logprobs(model: PreTrainedModel, rows: Rows, temperature: float) -> tuple[TokenFloat, TokenFloat]:
    """Return log-prob, and entropy without gradient, of each completion token [nats]."""
    logits = model(input_ids=rows.input_ids, attention_mask=rows.attention_mask, use_cache=False).logits
    logits = logits.float() if temperature == 1.0 else logits.float() / temperature
    log_p = logits.log_softmax(-1)
    del logits
    targets, chosen = rows.input_ids[:, 1:], rows.is_completion[:, 1:]
    logprobs = log_p[:, :-1].gather(-1, targets[..., None])[..., 0]
    return logprobs[chosen], _entropy(log_p.detach()[:, :-1])[chosen]


def _entropy(log_p: Float[Tensor, "R L V"]) -> Float[Tensor, "R L"]:
    # Row by row: a second tensor as large as the log-probs would only be there to be summed.
    return torch.stack([-(row.exp() * row).sum(-1) for row in log_p])
