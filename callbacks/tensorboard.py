"""What goes to TensorBoard and is no scalar."""

import unicodedata

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.tensorboard import SummaryWriter


def tensorboards(trainer: Trainer) -> list[TensorBoardLogger]:
    """Return the loggers that write for TensorBoard."""
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]


def writers(trainer: Trainer) -> list[SummaryWriter]:
    """Return TensorBoard's writer of each logger that has one; on other ranks than the first it writes nothing."""
    return [logger.experiment for logger in tensorboards(trainer)]


def cell(text: str) -> str:
    """Return a text as one cell of a Markdown table that shows it as it is.

    Models write Markdown and HTML, and TensorBoard renders both: whatever might mean something becomes a numbered
    entity, a line break stays one, and other control characters become a replacement character.
    """
    return "".join(_shown(character) for character in text.strip())


def _shown(character: str) -> str:
    if character == "\n":
        return "<br>"
    if character.isalnum() or character in " \t":
        return character
    if unicodedata.category(character) in ("Cc", "Cs"):
        return "�"
    return f"&#{ord(character)};"


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table of cells that are safe already."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
