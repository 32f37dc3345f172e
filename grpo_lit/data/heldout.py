"""Held-out prompts: rendered once, and never trained on."""

from collections.abc import Callable, Iterable

from lightning.pytorch.utilities import rank_zero_warn
from transformers import PreTrainedTokenizerBase

from grpo_lit.data.source import PromptSource
from grpo_lit.data.tally import Tally, described
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
        problem: Returns what keeps all rewards from judging a prompt, for a warning; ``None``: nothing does.
    """

    def __init__(
        self,
        sources: dict[str, PromptSource],
        template: PromptTemplate,
        tokenizer: PreTrainedTokenizerBase,
        max_prompt_tokens: int,
        problem: Callable[[Prompt], str | None] = lambda prompt: None,
    ) -> None:
        self.prompts: dict[str, list[Prompt]] = {}
        self._set_of: dict[str, str] = {}
        for name, source in sources.items():
            rendered = [template.render(tokenizer, source[i]) for i in range(len(source))]
            kept, long, unreadable = list[Prompt](), Tally(), Tally()
            for prompt in rendered:
                if len(prompt.token_ids) > max_prompt_tokens:
                    long.add(f"more tokens than that ({max_prompt_tokens})", f"{prompt.id}: {len(prompt.token_ids)}")
                    continue
                kept.append(prompt)
                if reason := problem(prompt):
                    unreadable.add(reason, described(prompt))
            if long.total:
                rank_zero_warn(
                    f"data.val.{name}: {long.total} of {len(rendered)} prompts are longer than "
                    f"data.max_prompt_tokens ({max_prompt_tokens}) and left out: {long}"
                )
            if unreadable.total:
                rank_zero_warn(
                    f"data.val.{name}: {unreadable.total} of {len(rendered)} prompts cannot be judged and do not count "
                    f"in its accuracy: {unreadable}"
                )
            self.prompts[name] = kept
            self._set_of |= dict.fromkeys((prompt.question for prompt in kept), name)

    def domains(self, name: str) -> list[str]:
        """Return the domains of a set, in the order of their names."""
        return sorted({prompt.domain for prompt in self.prompts[name]})

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
