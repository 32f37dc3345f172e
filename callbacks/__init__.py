"""Lightning callbacks that observe and shape a run; grpo_lit never imports them."""

from callbacks.checkpoint import ModelCheckpoint
from callbacks.console import Console
from callbacks.entropy import EntropyTarget
from callbacks.health import Health
from callbacks.panels import Panels
from callbacks.progress import ProgressBar
from callbacks.reference import ReferenceRefresh

__all__ = ["Console", "EntropyTarget", "Health", "ModelCheckpoint", "Panels", "ProgressBar", "ReferenceRefresh"]
