"""Held-out prompts: rendered once, and never trained on."""

from collections.abc import Iterable

from lightning.pytorch.utilities import rank_zero_warn
from transformers import PreTrainedTokenizerBase

from grpo_lit.data.source import PromptSource
from grpo_lit.data.template import PromptTemplate
from grpo_lit.errors import ConfigError
from grpo_lit.rollout import Prompt


class HeldOut:
    """The prompts of every held-out set that are short enough.

    Args:
        sources: Prompts by the name of the set.
        template: How a question becomes a prompt.
        tokenizer: Of the policy.
        max_prompt_tokens: Longer prompts are left out, with a warning.
    """

    def __init__(
        self,
        sources: dict[str, PromptSource],
        template: PromptTemplate,
        tokenizer: PreTrainedTokenizerBase,
        max_prompt_tokens: int,
    ) -> None:
        self.prompts: dict[str, list[Prompt]] = {}
        self._set_of: dict[str, str] = {}
        for name, source in sources.items():
            rendered = [template.render(tokenizer, source[i]) for i in range(len(source))]
            kept = [prompt for prompt in rendered if len(prompt.token_ids) <= max_prompt_tokens]
            if len(kept) < len(rendered):
                rank_zero_warn(
                    f"data.val.{name}: {len(rendered) - len(kept)} of {len(rendered)} prompts are longer than "
                    f"data.max_prompt_tokens ({max_prompt_tokens}) and left out"
                )
            self.prompts[name] = kept
            self._set_of |= dict.fromkeys((prompt.question for prompt in kept), name)

    def refuse(self, prompts: Iterable[Prompt]) -> None:
        """Refuse to train on a question that accuracy is measured on.

        Raises:
            ConfigError: One of the prompts is held out.
        """
        for prompt in prompts:
            if prompt.question in self._set_of:
                raise ConfigError(
                    f"`data.train` expected no question of `data.val`, but got {prompt.id}, which is also in "
                    f"`data.val.{self._set_of[prompt.question]}`: give both splits the same `heldout_fraction`"
                )
