"""Several prompt sources as one."""

import itertools
import math
from bisect import bisect_right
from dataclasses import dataclass, replace

from grpo_lit.data.source import PromptSource
from grpo_lit.errors import ConfigError
from grpo_lit.rollout import Prompt


@dataclass
class MixturePart:
    """A source and its share of a mixture.

    Args:
        source: Prompts.
        weight: Its prompts' share, relative to the other parts'.
        domain: Name for per-domain KL and metrics (``reward/correct/<domain>``); each prompt's own by default.

    Raises:
        ConfigError: For a weight that is not finite and above 0.
    """

    source: PromptSource
    weight: float = 1.0
    domain: str | None = None

    def __post_init__(self) -> None:
        """Refuse a weight that is no share of anything."""
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ConfigError(f"`weight` of a mixture's part expected to be > 0, but got {self.weight}: drop the part")


class Mixture(PromptSource):
    """Prompts of several sources in fixed shares.

    Part i has a share ``weight_i / sum(weights)`` of the ``size`` prompts, to the nearest one. Order does not matter
    here: the stream shuffles.

    Args:
        parts: Sources by name; the name goes before the ids of their prompts.
        size: Prompts in all. ``null``: as many as give every part its share without asking a prompt twice. With more,
            the smaller sources start again from their first prompt; each repeat has an id, and so samples, of its own.

    Raises:
        ConfigError: Without parts, or with a size that leaves one of them without a prompt.
    """

    def __init__(self, parts: dict[str, MixturePart], size: int | None = None) -> None:
        if not parts:
            raise ConfigError("`parts` of Mixture expected at least one source, but got none")
        self.parts = parts
        total = sum(part.weight for part in parts.values())
        shares = {name: part.weight / total for name, part in parts.items()}
        if size is None:
            # The margin is for shares that rounding has made a little larger than they are.
            size = min(math.floor(len(part.source) / shares[name] + 1e-9) for name, part in parts.items())
        self.counts = _apportion(size, shares)
        for name, count in self.counts.items():
            if count < 1 or len(parts[name].source) < 1:
                raise ConfigError(
                    f"`size` of Mixture expected enough prompts for every part, but {size} give {name!r} {count} of "
                    f"its {len(parts[name].source)}: raise `size` or the part's `weight`, or drop the part"
                )
        known = [{part.domain} if part.domain else part.source.domains for part in parts.values()]
        self.domains = None if None in known else set().union(*known)
        self._ends = list(itertools.accumulate(self.counts.values()))

    def __len__(self) -> int:
        """Return how many prompts there are in all."""
        return self._ends[-1]

    def __getitem__(self, index: int) -> Prompt:
        """Return prompt ``index``: the parts lie one after the other."""
        name, position, again = self._place(index)
        part = self.parts[name]
        prompt = part.source[position]
        return replace(prompt, id=f"{name}/{prompt.id}{again}", domain=part.domain or prompt.domain)

    def prompt_id(self, index: int) -> str:
        """Return the id of prompt ``index``."""
        name, position, again = self._place(index)
        return f"{name}/{self.parts[name].source.prompt_id(position)}{again}"

    def _place(self, index: int) -> tuple[str, int, str]:
        """Return the part of prompt ``index``, its index in there, and what tells a repeat from the first."""
        if not 0 <= index < len(self):
            raise IndexError(f"`index` expected 0 to {len(self) - 1}, but got {index}")
        which = bisect_right(self._ends, index)
        name = list(self.parts)[which]
        start = self._ends[which] - self.counts[name]
        repeat, position = divmod(index - start, len(self.parts[name].source))
        return name, position, f"#{repeat}" if repeat else ""


def _apportion(size: int, shares: dict[str, float]) -> dict[str, int]:
    """Cut ``size`` into whole numbers nearest to the shares (largest remainders; ties go to the part named first)."""
    counts = {name: math.floor(size * share) for name, share in shares.items()}
    by_remainder = sorted(shares, key=lambda name: counts[name] - size * shares[name])
    for name in by_remainder[: size - sum(counts.values())]:
        counts[name] += 1
    return counts
