"""Silences what others print of a run and no user can act on; each has its reason."""

import logging
import sys
import warnings

from transformers.utils import logging as transformers_logging

#: How messages of Lightning begin that say nothing of the run.
_BEGINNINGS = (
    "💡 Tip",  # praise of Lightning's cloud services
    "TPU available",  # nothing here runs on one
)


class _SaysNothing(logging.Filter):
    """Drops messages by how they begin."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a message may be shown."""
        return not record.getMessage().startswith(_BEGINNINGS)


_FILTER = _SaysNothing()


def quieten() -> None:
    """Silence them in this process; again does no harm."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_FILTER)
    # Lightning warns of few dataloader workers; rollouts come from an engine, there is no worker to add.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", category=SyntaxWarning)  # of a dependency of reasoning-gym, when first compiled
    # Lightning's own use of torch's trees.
    warnings.filterwarnings("ignore", message=".*isinstance\\(treespec, LeafSpec\\).*")
    # vLLM finds a Triton that cannot compile for a CPU, and does without.
    logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)
    # bitsandbytes, which peft imports with any adapter, misses a package that would download code for 4-bit inference.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()  # a bar that is redrawn fills a log file with its copies
