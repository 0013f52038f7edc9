"""Quantized targets: with plain weights where transformers can make them so, and otherwise as it runs them.

Plain weights compute the same on every device. Engines also round the inputs of quantized layers, so that their
acceptance may differ a little from the one measured here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PretrainedConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AutoHfQuantizer, AutoQuantizationConfig

from draftkit.errors import UnsupportedTarget
from draftkit.io.jsonfile import read_object

BESIDE = "hf_quant_config.json"  # where ModelOpt says what it has done, if not in the configuration
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


def stays_quantized(config: PretrainedConfig) -> bool:
    """Whether a model with a settled configuration computes with quantized weights."""
    stated = getattr(config, "quantization_config", None)
    return stated is not None and not stated.get("dequantize", False)


def _stated(config: PretrainedConfig, folder: Path) -> dict[str, Any] | None:
    stated = getattr(config, "quantization_config", None)
    if stated is None and (folder / BESIDE).is_file():
        done = read_object(folder / BESIDE).get("quantization")
        return {"quant_method": f"modelopt {done.get('quant_algo') if isinstance(done, dict) else ''}".strip()}
    return stated if stated is None or isinstance(stated, dict) else stated.to_dict()
