"""Errors that a user can mend, shown by the command line without a traceback."""


class ConfigError(ValueError):
    """A setting, or a combination of settings, that cannot work: the message names the key and the fix."""


class EngineError(RuntimeError):
    """The rollout engine could not start, answer, or take the weights."""


class TrainingError(RuntimeError):
    """The run cannot go on in a way that makes sense, and says why."""


class SaveError(TrainingError):
    """A checkpoint could not be written; those before it are whole."""


class RewardError(RuntimeError):
    """A reward failed, or returned what is not one finite number or ``None`` per completion."""
