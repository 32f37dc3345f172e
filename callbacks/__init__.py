"""Lightning callbacks that observe and shape a run; grpo_lit never imports them."""

from callbacks.checkpoint import ModelCheckpoint
from callbacks.clip import ClipSchedule
from callbacks.compiling import CompileNorms
from callbacks.console import Console
from callbacks.early_stop import EarlyStop
from callbacks.entropy import EntropyTarget
from callbacks.health import Health
from callbacks.histograms import Histograms
from callbacks.mismatch import MismatchByPosition
from callbacks.noise import GradientNoiseScale
from callbacks.overlong import SoftOverlong
from callbacks.panels import Panels
from callbacks.progress import ProgressBar
from callbacks.reference import ReferenceRefresh
from callbacks.samples import Samples
from callbacks.schedules import Constant, Cosine, EntropyLoop, Linear, Schedule, Step

__all__ = [
    "ClipSchedule",
    "CompileNorms",
    "Console",
    "Constant",
    "Cosine",
    "EarlyStop",
    "EntropyLoop",
    "EntropyTarget",
    "GradientNoiseScale",
    "Health",
    "Histograms",
    "Linear",
    "MismatchByPosition",
    "ModelCheckpoint",
    "Panels",
    "ProgressBar",
    "ReferenceRefresh",
    "Samples",
    "Schedule",
    "SoftOverlong",
    "Step",
]
