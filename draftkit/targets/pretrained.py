"""Causal language models as transformers reads, builds and loads them, the text side of multi-modal ones among them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AutoHfQuantizer, AutoQuantizationConfig
from transformers.utils import logging, quantization_config

from draftkit.errors import TargetError, UnsupportedTarget
from draftkit.io.handles import TensorHandle
from draftkit.io.jsonfile import read_object
from draftkit.io.tensors import gguf_file, open_checkpoint
from draftkit.layout.mtp import head_patterns
from draftkit.layout.quantization import MODELOPT_FILE
from draftkit.layout.target import require_whole_model
from draftkit.targets.device_map import map_layers, room_from
from draftkit.targets.devices import use_device
from draftkit.targets.finite import require_finite
from draftkit.targets.text_alone import text_alone


def read_config(folder: Path) -> PretrainedConfig:
    """The configuration of a model. Raises `TargetError` for one that transformers cannot read, `UnsupportedTarget`
    where that is because it does not know the architecture."""
    require_whole_model(folder)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trusts_remote_code())
    except ValueError as error:
        hint = remote_code_hint(error)
        raise UnsupportedTarget(_said(error), where=folder, hint=hint) from error
    except OSError as error:
        raise TargetError(_said(error), where=folder) from error
    if trusts_remote_code():
        _register_own_class(config, folder)
    if type(config) is LlamaConfig:
        _without_windows(config)
    return config


def _without_windows(config: LlamaConfig) -> None:
    """Take away what vLLM reads windows from: of Llama, transformers' cache knows of it, and attention does not."""
    for name in {"layer_types", "sliding_window"} & vars(config).keys():
        delattr(config, name)


IMAGES = "_reads_images"  # the attribute of a configuration


def reading_images(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration of the model with its vision tower, which is left out otherwise."""
    config = deepcopy(config)
    setattr(config, IMAGES, True)
    return config


def _is_causal(config: PretrainedConfig) -> bool:
    """Whether its model is one of transformers' causal language models."""
    whole = getattr(config, IMAGES, False) and type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING
    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and not whole


def model_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """The class of transformers with the language model of `config` and its output layer; None where it has none."""
    known = MODEL_FOR_CAUSAL_LM_MAPPING if _is_causal(config) else MODEL_FOR_MULTIMODAL_LM_MAPPING
    found: type[PreTrainedModel] | None = known.get(type(config), None)
    return found


def as_asked(config: PretrainedConfig) -> AbstractContextManager[None]:
    """In the body, what is built of the configuration is so without what reads images, but for `reading_images`."""
    return text_alone(None if getattr(config, IMAGES, False) else model_class(config))


def auto_class(config: PretrainedConfig) -> Any:
    """The class of transformers that builds and loads models of the configuration."""
    return AutoModelForCausalLM if _is_causal(config) else AutoModelForMultimodalLM


def read_model_config(folder: Path, config: PretrainedConfig | None = None, *, whole: bool = True) -> PretrainedConfig:
    """The configuration of a language model that transformers can build; `config` is the same as transformers has read
    it, where it has. Raises `TargetError` for any other.

    Not `whole`: where parts of it are read that are seldom quantized, whatever becomes of the others.
    """
    try:
        config = read_config(folder) if config is None else deepcopy(config)
        if config.is_encoder_decoder:
            raise TargetError(f"{config.model_type} is an encoder-decoder", where=folder, expected="a decoder alone")
        if model_class(config) is None:
            raise UnsupportedTarget(
                f"transformers has no causal language model of type {config.model_type}", where=folder
            )
    except UnsupportedTarget as refusal:
        raise refusal.otherwise("a newer release of transformers may know it") from refusal.__cause__
    if whole:
        settle_quantization(config, folder)
    return config


def empty_model(config: PretrainedConfig, dtype: torch.dtype, attention: str | None = None) -> PreTrainedModel:
    """A model of the configuration without memory for its weights, on torch's meta device; tied weights are one.

    `attention`: the name of its attention function, None for transformers' choice.
    """
    with torch.device("meta"), as_asked(config):
        model: PreTrainedModel = auto_class(config).from_config(
            deepcopy(config),  # which keeps the name of its attention
            dtype=dtype,
            attn_implementation=of_language_model(config, attention),
            trust_remote_code=trusts_remote_code(),
        )
        model.tie_weights()
    return model


def stored_names(model: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """The names that a checkpoint's tensors have in it, by those that transformers gives them in the model."""
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    prefix, own = model.base_model_prefix, model.state_dict()
    return {rename_source_key(name, renamings, converters, prefix, own)[0]: name for name in sorted(names)}


def load_pretrained(
    folder: Path,
    config: PretrainedConfig,
    *,
    device: str,
    dtype: torch.dtype,
    attention: str | None,
    spread: bool = False,
) -> PreTrainedModel:
    """Load a model for inference; `device` becomes the current one. `attention` as in `empty_model`. Each weight goes
    straight to a GPU, and is looked at for NaN there.

    `spread`: over all devices from `device` on, as `map_layers` says.
    Raises `TargetError` for what cannot be loaded, for weights that are missing from the checkpoint and for quantized
    ones that its configuration does not tell of, and `NonFiniteError` for weights with NaN or infinity.
    """
    use_device(device)
    places: dict[str, str] | None = None
    if device != "cpu" or stays_quantized(config):  # the latter are not moved later
        places = {"": device}
    if spread:
        room = room_from(device, disk=gguf_file(folder) is None)  # transformers keeps nothing of those on the disk
        places = map_layers(empty_model(config, dtype, attention), room)
    try:
        with _without_heads(config), as_asked(config), _without_bars():
            model, info = auto_class(config).from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=of_language_model(config, attention),
                device_map=places,
                output_loading_info=True,
                trust_remote_code=trusts_remote_code(),
                **_dequantizing(gguf_file(folder)),
            )
    except torch.OutOfMemoryError as error:
        hint = "spread it over several GPUs (--device-map auto), or take a smaller --dtype"
        raise TargetError(f"the target's weights do not fit on {device}", where=folder, hint=hint) from error
    except (OSError, ValueError, SafetensorError) as error:
        raise TargetError(_said(error), where=folder, hint=remote_code_hint(error)) from error
    except RuntimeError as error:  # of tensors in the file that do not become the model's, which its report lists
        raise UnsupportedTarget(_said(error), where=folder) from error
    if info["missing_keys"]:
        raise TargetError(f"the target lacks weights: {', '.join(sorted(info['missing_keys'])[:5])}", where=folder)
    if scales := [name for name in info["unexpected_keys"] if name.endswith(SCALES)]:
        raise UnsupportedTarget(
            f"its weights are quantized ({min(scales)}), and its configuration does not say how", where=folder
        )
    here = ((name, tensor) for name, tensor in model.state_dict().items() if not tensor.is_meta)  # not on the disk
    require_finite(here, folder)
    loaded: PreTrainedModel = (model if places else model.to(device)).requires_grad_(False)
    return loaded.eval()


@contextmanager
def _without_bars() -> Iterator[None]:
    """Without transformers' own bars: what loads a model shows how far it is."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def _without_heads(config: PretrainedConfig) -> Iterator[None]:
    """Let transformers leave out the target's own multi-token prediction heads without a word: its classes have no
    place for them, and draftkit loads them apart. Whatever else is unexpected is reported as ever."""
    known, patterns = model_class(config), head_patterns(config.to_dict())
    if known is None or not patterns:
        yield
        return
    usual = known._keys_to_ignore_on_load_unexpected
    known._keys_to_ignore_on_load_unexpected = [*(usual or ()), *patterns]
    try:
        yield
    finally:
        known._keys_to_ignore_on_load_unexpected = usual


def _dequantizing(file: Path | None) -> dict[str, Any]:
    """How `from_pretrained` is asked for plain weights from a GGUF file."""
    if file is None:
        return {}
    settings = getattr(quantization_config, "GgufConfig", None)  # releases without it know plain weights alone
    return {"gguf_file": file.name} | ({} if settings is None else {"quantization_config": settings(dequantize=True)})


def of_language_model(config: PretrainedConfig, attention: str | None) -> dict[str, str] | None:
    """An attention function for the language model alone: what reads images may know none but transformers' own."""
    if attention is None:
        return None
    text = config.get_text_config()
    parts = {name: getattr(config, name, None) for name in config.sub_configs}
    return {"": attention} | {
        name: attention for name, part in parts.items() if part is not None and part.get_text_config() is text
    }


def _register_own_class(config: PretrainedConfig, folder: Path) -> None:
    """Make the causal LM that a model brings as code known to transformers, as loading it would."""
    name = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    if name is not None and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        AutoModelForCausalLM.register(type(config), get_class_from_dynamic_module(name, folder), exist_ok=True)


def _said(error: Exception) -> str:
    first_line = str(error).strip().split("\n", 1)[0]
    return f"transformers cannot load the target: {first_line}"


def load_modules(
    folder: Path, choose: Callable[[PreTrainedModel], Sequence[nn.Module]], dtype: torch.dtype
) -> Sequence[nn.Module]:
    """The modules that `choose` finds in the target, on the CPU; only their weights are read.

    Raises `TargetError` where the checkpoint lacks one of them, `UnsupportedTarget` for quantized ones and
    `NonFiniteError` for weights with NaN or infinity.
    """
    model = empty_model(read_model_config(folder, whole=False), dtype)
    tensors = open_checkpoint(folder)
    stored = stored_names(model, tensors)
    names = {part: name for name, part in model.named_modules()}
    parts = choose(model)
    for part in parts:
        found = {}
        for own in part.state_dict():
            name = f"{names[part]}.{own}"
            if name not in stored:
                raise TargetError(f"the target's checkpoint has no tensor {name}", where=folder)
            found[own] = tensors[stored[name]]
        require_plain(found.values(), tensors, folder)
        weights = {own: handle.load().to(dtype) for own, handle in found.items()}
        require_finite(((found[own].name, weight) for own, weight in weights.items()), folder)
        part.load_state_dict(weights, strict=True, assign=True)
        part.eval().requires_grad_(False)
    return parts


def require_plain(weights: Iterable[TensorHandle], names: Iterable[str], folder: Path) -> None:
    """Raise `UnsupportedTarget` for quantized weights, whose scales are stored beside them."""
    modules = tuple(f"{handle.name.rpartition('.')[0]}." for handle in weights)
    if scales := [name for name in names if name.startswith(modules) and name.endswith(SCALES)]:
        raise UnsupportedTarget(f"a weight of it that is needed is quantized ({min(scales)})", where=folder)


_trusted: ContextVar[bool] = ContextVar("trust_remote_code", default=False)


@contextmanager
def trust_remote_code(trusted: bool = True) -> Iterator[None]:
    """Let models and tokenizers that are loaded in the body run the Python code of their repository."""
    token = _trusted.set(trusted)
    try:
        yield
    finally:
        _trusted.reset(token)


def trusts_remote_code() -> bool:
    """The value for transformers' `trust_remote_code`."""
    return _trusted.get()


def remote_code_hint(error: Exception) -> str | None:
    """A hint for an error of transformers that says a model's own code was not run; None for other errors."""
    if "trust_remote_code" not in str(error):
        return None
    return "it brings Python code of its own: read that code, and pass --trust-remote-code to run it"


UNPACKED = ("int-quantized", "naive-quantized")  # formats of compressed-tensors
SCALES = ("_scale", "_scale_inv", ".scales", ".qzeros", ".weight_packed")  # how tensors of quantized weights end


def settle_quantization(config: PretrainedConfig, folder: Path) -> None:
    """Have the quantized model in a folder be loaded with plain weights, where transformers can do that.

    Raises `UnsupportedTarget` for a kind that transformers does not know, and for one that needs a package or a device
    which is not there.
    """
    stated = _stated(config, folder)
    if stated is None:
        return
    kind = stated.get("quant_method")
    known = kind == "bitsandbytes" or kind in AUTO_QUANTIZATION_CONFIG_MAPPING
    if not known:
        raise UnsupportedTarget(f"its weights are quantized ({kind}) as transformers does not know", where=folder)
    try:
        settings = AutoQuantizationConfig.from_dict(stated)
        if hasattr(settings, "dequantize"):
            settings.dequantize = True
            config.quantization_config = stated | {"dequantize": True}
        AutoHfQuantizer.from_config(settings, pre_quantized=True).validate_environment(device_map=None)
    except (ImportError, RuntimeError, TypeError, ValueError) as error:
        first_line = str(error).strip().split("\n", 1)[0]
        raise UnsupportedTarget(f"its weights are quantized ({kind}): {first_line}", where=folder) from error
    if kind == "compressed-tensors" and _has_integer_experts(config, stated):
        raise UnsupportedTarget(
            "its experts are stored as integers that are not packed (compressed-tensors), and transformers makes plain "
            "weights of packed and of FP8 experts alone",
            where=folder,
        )


def _has_integer_experts(config: PretrainedConfig, stated: dict[str, Any]) -> bool:
    """Whether a model quantized by compressed-tensors has joined experts of integers that are not packed, for which
    transformers 5.23 (`integrations/compressed_tensors.py`) has no way."""
    groups = (stated.get("config_groups") or {}).values()
    integers = any(
        isinstance(group, dict)
        and (group.get("weights") or {}).get("type") == "int"
        and (group.get("format") or stated.get("format")) in UNPACKED
        for group in groups
    )
    if not integers or any("expert" in pattern for pattern in stated.get("ignore") or ()):
        return False
    weights = empty_model(config, torch.bfloat16).named_parameters()
    return any(".experts." in name and weight.dim() == 3 for name, weight in weights)


def stays_quantized(config: PretrainedConfig) -> bool:
    """Whether a model with a settled configuration computes with quantized weights."""
    stated = getattr(config, "quantization_config", None)
    return stated is not None and not stated.get("dequantize", False)


def _stated(config: PretrainedConfig, folder: Path) -> dict[str, Any] | None:
    stated = getattr(config, "quantization_config", None)
    if stated is None and (folder / MODELOPT_FILE).is_file():
        done = read_object(folder / MODELOPT_FILE).get("quantization")
        return {"quant_method": f"modelopt {done.get('quant_algo') if isinstance(done, dict) else ''}".strip()}
    return stated if stated is None or isinstance(stated, dict) else stated.to_dict()
