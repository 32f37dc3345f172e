"""What the commands under ``scripts/`` have in common; light, so that their ``--help`` is there at once."""

import argparse
from collections.abc import Callable

from jsonargparse import DefaultHelpFormatter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TextColumn, TimeElapsedColumn

from grpo_lit.errors import ConfigError


class HelpFormatter(DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Types and defaults in the help, paragraphs of the description kept."""


def progress_columns() -> list[ProgressColumn]:
    """Return the columns of a bar that counts runs."""
    return [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]


def exit_status(work: Callable[[], int], errors: Console) -> int:
    """Return the status of some work, and say in a line what a user can mend, or that it was interrupted.

    Args:
        work: Returns its own status.
        errors: Where to say it.
    """
    try:
        return work()
    except ConfigError as error:
        errors.print(f"error: {error}", markup=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        errors.print("interrupted: nothing is written")
        return 130
