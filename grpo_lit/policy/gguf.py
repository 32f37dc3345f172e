"""GGUF files: converted once into the Hugging Face folder that the learner, the engines and the export all read.

A GGUF file cannot be trained as it is: transformers marks what it reads from one as quantised, which refuses
``save_pretrained``, and vLLM would read the file its own way. One conversion gives every part the same weights.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from gguf import GGUFReader
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase


def model_cache() -> Path:
    """Return where fetched and converted models lie: ``$GRPO_LIT_MODELS``, else ``.cache/models`` of the clone."""
    if chosen := os.environ.get("GRPO_LIT_MODELS"):
        return Path(chosen).expanduser()
    clone = Path(__file__).resolve().parents[2]
    home = clone / ".cache" if (clone / "pyproject.toml").is_file() else Path.home() / ".cache" / "grpo_lit"
    return home / "models"


def converted_gguf(file: Path) -> Path:
    """Return the folder made of a GGUF file; it is made again only when the file changes."""
    file = file.resolve()
    state = file.stat()
    mark = hashlib.sha256(f"{file}\x1f{state.st_size}\x1f{state.st_mtime_ns}".encode()).hexdigest()[:12]
    folder = model_cache() / f"{file.stem}-{mark}"
    if not folder.exists():
        with new_folder(folder) as unfinished:
            convert_gguf(file, unfinished)
    return folder


def convert_gguf(file: Path, folder: Path) -> None:
    """Write a GGUF file as a Hugging Face folder: float32 weights, tokenizer, chat template, generation config.

    Args:
        file: Of any quantisation and architecture that transformers reads.
        folder: Where to write; exists.
    """
    model = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
    plain = _without_quantization(model)
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    if _text_field(file, "tokenizer.ggml.pre") == "smollm":
        _split_digits(tokenizer)
    # Unset in the file, where a number beyond every model stands for "unknown".
    tokenizer.model_max_length = plain.config.max_position_embeddings
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _without_quantization(model: PreTrainedModel) -> PreTrainedModel:
    """Rebuild the model without the mark of a quantised one, which would refuse to train and to be saved."""
    settings = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    plain = AutoModelForCausalLM.from_config(type(model.config).from_dict(settings), dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
    )
    return plain


def _split_digits(tokenizer: PreTrainedTokenizerBase) -> None:
    """Cut before and after every digit first, as SmolLM's own tokenizer does.

    GGUF names this rule without spelling it out, and transformers reads such a file with GPT-2's rule alone, under
    which a run of spaces before a number becomes other tokens than those the model was trained on.
    """
    digits = Digits(individual_digits=True)
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence([digits, ByteLevel(add_prefix_space=False)])


def _text_field(file: Path, name: str) -> str | None:
    field = GGUFReader(file).get_field(name)
    return None if field is None else str(field.contents())


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a scratch folder that becomes ``folder`` at the end, whole or not at all.

    Two processes may make the same one: the first to finish wins, and the other's is thrown away.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        unfinished = Path(scratch) / folder.name
        unfinished.mkdir()
        yield unfinished
        try:
            unfinished.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():
                raise
