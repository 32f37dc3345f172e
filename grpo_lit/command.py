"""What the commands under ``scripts/`` have in common; light, so that their ``--help`` is there at once."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from jsonargparse import DefaultHelpFormatter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TextColumn, TimeElapsedColumn

from grpo_lit.errors import ConfigError


class HelpFormatter(DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Types and defaults in the help, paragraphs of the description kept."""


def own_and_passed_on(args: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """Return a command's own words, and those after ``--``, which go to every run that it starts."""
    words = list(sys.argv[1:] if args is None else args)
    cut = words.index("--") if "--" in words else len(words)
    return words[:cut], words[cut + 1 :]


def progress_columns() -> list[ProgressColumn]:
    """Return the columns of a bar that counts runs."""
    return [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]


def check_folder(file: Path | None, option: str) -> None:
    """Refuse a file to write in a folder that does not exist, before the work that is to be written there.

    Args:
        file: ``None``: nothing is to be written.
        option: That names it.

    Raises:
        ConfigError: There is no such folder.
    """
    if file is not None and not file.absolute().parent.is_dir():
        raise ConfigError(f"`{option}` expected a file in a folder that exists, but got {file}: make the folder")


def wide_console(columns: int) -> Console:
    """Return a console for a table that needs so many columns: a pipe is taken to have 80, which would cut its cells.

    Args:
        columns: The fewest; a wider terminal is used as it is.
    """
    console = Console()
    console.width = max(console.width, columns)
    return console


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
