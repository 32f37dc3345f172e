"""What the lab can be asked for; imports nothing, so that its help is there at once."""

from dataclasses import dataclass
from pathlib import Path


@dataclass
class Options:
    """Settings of the command line.

    Attributes:
        vocabulary: Tokens, the end token included.
        max_length: Most tokens of a completion.
        prompts: Prompts, each harder than the last.
        group_size: G, the completions of a group.
        logit_scale: Standard deviation of the policy's logits.
        staleness: Standard deviation of the old policy's logits around the current one's.
        mismatch: Standard deviation of the engine's logits around the learner's.
        reference_distance: Standard deviation of the reference's logits around the policy's, in the KL table.
        dynamic_sampling: Replace groups whose rewards are all equal by groups of a newly drawn prompt.
        seed: Seed of all logits.
        json: File to write settings and rows to.
        csv: File to write rows to.
        plot: Image to draw (png, svg, pdf).
    """

    vocabulary: int = 3
    max_length: int = 3
    prompts: int = 2
    group_size: int = 4
    logit_scale: float = 1.0
    staleness: float = 0.3
    mismatch: float = 0.3
    reference_distance: float = 0.5
    dynamic_sampling: bool = False
    seed: int = 0
    json: Path | None = None
    csv: Path | None = None
    plot: Path | None = None
