"""Low-rank adapters: a few trained matrices beside frozen weights, which stay what they were to the last bit.

The model remains the Hugging Face model that it was; only its linear layers are wrapped. What an engine or an exported
folder gets is made tensor by tensor, under the names that the model had before::

    policy      model.layers.0.self_attn.q_proj.base_layer.weight    W, frozen
                model.layers.0.self_attn.q_proj.lora_A.default.weight, ...lora_B.default.weight
    published   model.layers.0.self_attn.q_proj.weight               W + s B A
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from grpo_lit.errors import ConfigError
from grpo_lit.policy.checkpoint import silence_modules
from grpo_lit.policy.quantization import dense_weight

#: peft names adapters; here there is one. peft takes a second to import, so only what needs it does that, and layers
#: are told by what they hold.
_NAME = "default"


@dataclass(frozen=True)
class LoRA:
    """Trains a low-rank change of each linear layer; its weights are float32, without dropout.

        lora, rslora:  W' = W + s B A,      dora:  W' = m (W + s B A) / |W + s B A|  by rows, m trained
        s = alpha / rank,  for rslora alpha / sqrt(rank)

    B begins at 0, so that the first step is the model's own. Sources: E. Hu et al. (https://arxiv.org/abs/2106.09685);
    rslora: D. Kalajdzievski (https://arxiv.org/abs/2312.03732); dora: S. Liu et al. (https://arxiv.org/abs/2402.09353).

    Args:
        rank: Rows of A.
        alpha: Scales the change.
        target_modules: Last parts of the names of the layers to adapt, or a regular expression of whole names.
            ``all-linear``: all but the output layer; of a mixture of experts the layers around them.
        modules_to_save: Last parts of the names of modules to train whole, beside the adapter.
        variant: See above.

    Raises:
        ConfigError: For a rank or an alpha that changes nothing.
    """

    rank: int = 16
    alpha: float = 32.0
    target_modules: str | tuple[str, ...] = "all-linear"
    modules_to_save: tuple[str, ...] = ()
    variant: Literal["lora", "rslora", "dora"] = "lora"

    def __post_init__(self) -> None:
        """Refuse what trains nothing."""
        if self.rank < 1:
            raise ConfigError(f"`model.adapter.rank` expected to be >= 1, but got {self.rank}")
        if not self.alpha > 0:
            raise ConfigError(f"`model.adapter.alpha` expected to be > 0, but got {self.alpha}")

    def inject(self, model: PreTrainedModel) -> None:
        """Wrap the layers of a model and freeze the rest of it.

        Args:
            model: Changed in place.

        Raises:
            ConfigError: A name that the model has not, a layer that cannot be adapted.
        """
        from peft import LoraConfig, inject_adapter_in_model

        self._check_names(model)
        targets = self.target_modules if isinstance(self.target_modules, str) else list(self.target_modules)
        if targets == "all-linear":  # peft's own goes on to experts, whose fused weights are no linear layers
            targets = _linear_layers(model)
        settings = LoraConfig(
            task_type="CAUSAL_LM",
            r=self.rank,
            lora_alpha=self.alpha,  # type: ignore[arg-type]  # peft divides it
            lora_dropout=0.0,
            target_modules=targets,
            modules_to_save=list(self.modules_to_save) or None,
            use_rslora=self.variant == "rslora",
            use_dora=self.variant == "dora",
            fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        )
        inject_adapter_in_model(settings, model, _NAME)
        self._check_layers(model)
        silence_modules(model)
        for parameter in model.parameters():
            if parameter.requires_grad:  # bf16 would not take small steps
                parameter.data = parameter.data.float()

    def _check_names(self, model: PreTrainedModel) -> None:
        paths = [path for path, _ in model.named_modules()]

        def has(name: str) -> bool:
            return any(path == name or path.endswith(f".{name}") for path in paths)

        for key in ("target_modules", "modules_to_save"):
            names = getattr(self, key)
            if isinstance(names, str):
                missing = [] if names == "all-linear" or any(re.fullmatch(names, path) for path in paths) else [names]
            else:
                missing = [name for name in names if not has(name)]
            if missing:
                known = ", ".join(sorted({path.rpartition(".")[2] for path in _linear_layers(model)}))
                raise ConfigError(
                    f"`model.adapter.{key}` expected names of modules of {type(model).__name__}, but got "
                    f"{missing[0]!r}: its linear layers are {known}"
                )

    def _check_layers(self, model: PreTrainedModel) -> None:
        for path, module in model.named_modules():
            if hasattr(module, "base_layer") and not isinstance(module.base_layer, nn.Linear | Conv1D):
                raise ConfigError(
                    f"`model.adapter.target_modules` expected linear layers, but got {path}: name it in "
                    "`model.adapter.modules_to_save` to train it whole"
                )
        output, inputs = model.get_output_embeddings(), model.get_input_embeddings()
        if _is_adapted(output):
            # The head takes the output layer's weight and never calls the layer: an adapter there would do nothing.
            raise ConfigError(
                "`model.adapter.target_modules` expected layers below the output layer, but got the output layer: name "
                "it in `model.adapter.modules_to_save` to train it whole"
            )
        tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
        if tied and (_is_trained_whole(output) or _is_trained_whole(inputs)):
            raise ConfigError(
                "`model.adapter.modules_to_save` expected no embeddings where input and output share one weight, as in "
                f"{type(model).__name__}: trained apart they would no longer be the same, and engines hold it once"
            )


def _is_adapted(module: nn.Module) -> bool:
    return hasattr(module, "lora_A")


def _is_trained_whole(module: nn.Module) -> bool:
    return hasattr(module, "modules_to_save")


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Compute with the frozen weights alone."""
    parts: list[Any] = [part for part in model.modules() if hasattr(part, "_disable_adapters")]
    # peft's own switch also sets which parameters have gradients, those of the frozen modules among them.
    for part in parts:
        part._disable_adapters = True
    try:
        yield
    finally:
        for part in parts:
            part._disable_adapters = False


def published_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's weights under the names it had before it was adapted or quantised, one at a time.

    Adapted and quantised weights come in float32, made for the occasion: nothing of the model is touched.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, tensor in model.state_dict().items():
        path, _, last = name.rpartition(".")
        parts = path.split(".")
        if path not in modules or "original_module" in parts or any(part.startswith("lora_") for part in parts):
            continue  # what is below a quantised weight are its statistics
        owner = path.removesuffix(".base_layer")
        layer = modules[owner]
        if last == "weight":
            # What state_dict gives is detached, which loses what a quantised weight stands for.
            tensor = merged_weight(layer) if _is_adapted(layer) else dense_weight(layer.weight).detach()
        yield f"{owner.removesuffix(f'.modules_to_save.{_NAME}')}.{last}", tensor


@torch.no_grad()
def merged_weight(layer: Any) -> Float[Tensor, "_ _"]:
    """Return W' of :class:`LoRA` in float32; the layer stays as it is.

    Args:
        layer: Adapted.
    """
    base = layer.get_base_layer()
    a, b = (part[_NAME].weight.float() for part in (layer.lora_A, layer.lora_B))
    weight = dense_weight(base.weight).float()
    weight = weight.T if layer.fan_in_fan_out else weight
    with torch.autocast(weight.device.type, enabled=False):
        merged = torch.addmm(weight, b, a, alpha=layer.scaling[_NAME])
    if _NAME in layer.lora_magnitude_vector:
        merged *= (layer.lora_magnitude_vector[_NAME].weight.float() / merged.norm(dim=1))[:, None]
    return merged.T.contiguous() if layer.fan_in_fan_out else merged


def base_digest(model: nn.Module) -> str:
    """Return what tells the frozen weights beside an adapter from another model's of the same shape.

    The first 64 numbers of each are enough for that, rounded to bfloat16 as some precisions hold them; weights in 4
    bits, which devices may round apart, are left out.

    Args:
        model: Adapted.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, weight in model.named_parameters():
        if not weight.requires_grad and weight.is_floating_point():
            digest.update(f"{name} {weight.detach().flatten()[:64].bfloat16().tolist()}".encode())
    return digest.hexdigest()


@torch.no_grad()
def merge(model: PreTrainedModel) -> None:
    """Make an adapted model a plain one that computes the same, in place."""
    for path, module in list(model.named_modules()):
        if path.rpartition(".")[2] != "base_layer":
            plain = _plain(module)
            if plain is not module:
                model.set_submodule(path, plain)
    del model.peft_config


def _plain(module: Any) -> nn.Module:
    if _is_trained_whole(module):
        return module.modules_to_save[_NAME]
    base = module.base_layer if _is_adapted(module) else module
    if not (_is_adapted(module) or hasattr(base, "quant_state")):
        return module
    weight = merged_weight(module) if _is_adapted(module) else dense_weight(module.weight)
    if isinstance(base, Conv1D):
        base.weight = nn.Parameter(weight)
        return base
    linear = nn.Linear(base.in_features, base.out_features, bias=base.bias is not None, device="meta")
    linear.weight, linear.bias = nn.Parameter(weight), base.bias
    return linear


def save_adapter(model: PreTrainedModel, base: str, folder: Path) -> None:
    """Write an adapter as a folder that peft and vLLM load.

    Args:
        model: Adapted.
        base: Folder or hub id of the model that it adapts.
        folder: To write.
    """
    from peft import get_peft_model_state_dict

    settings = model.peft_config[_NAME]
    settings.base_model_name_or_path, settings.inference_mode = base, True
    weights: Mapping[str, Any] = get_peft_model_state_dict(model, adapter_name=_NAME, save_embedding_layers=False)
    folder.mkdir(parents=True, exist_ok=True)
    settings.save_pretrained(folder)
    save_file(
        {f"base_model.model.{n}": t.contiguous() for n, t in weights.items()}, folder / "adapter_model.safetensors"
    )


def _linear_layers(model: PreTrainedModel) -> list[str]:
    output = model.get_output_embeddings()
    return [path for path, part in model.named_modules() if isinstance(part, nn.Linear | Conv1D) and part is not output]
