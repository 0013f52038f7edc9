"""How the weights of a checkpoint are quantized, verbatim; the layout passes them through with their scales."""

from __future__ import annotations

from collections.abc import Mapping

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.facts import Facts
from draftkit.engines.known import asked, known
from draftkit.errors import FormatError
from draftkit.io.dtypes import QUANTIZED
from draftkit.io.jsonfile import read_object
from draftkit.layout.quantization import MODELOPT_FILE, algorithm_of, refuse_unread


def refuse_unread_weights(checkpoint: Checkpoint) -> None:
    """Raise `FormatError` for weights that are quantized otherwise than draftkit reads, before anything else is judged
    of them: their names and shapes are those of no layout."""
    tensors = {name: (handle.dtype, handle.shape) for name, handle in checkpoint.tensors.items()}
    stated = _stated(checkpoint)
    hint = "convert the draft that was quantized" + _readers(stated or {})
    if checkpoint.adapter is not None:
        hint = "name the model that was quantized as the base, in adapter_config.json"
    refuse_unread(tensors, stated, checkpoint.source.path, hint)


def _readers(stated: Mapping[str, object]) -> str:
    """Which releases of which is spoken read such weights, as the end of a sentence."""
    algorithm = algorithm_of(stated)
    found = [str(release) for engine in known() for release in asked(engine) if algorithm in release.quantizations]
    return f", or serve this one as it is: {', '.join(found)} reads weights of this format" if found else ""


def read_quantization(checkpoint: Checkpoint, facts: Facts) -> dict[str, object] | None:
    """The `quantization_config` of a checkpoint with fp8 weights, None for one without any.

    Raises `FormatError` for fp8 weights that nothing explains, and where some lack a scale of their input.
    """
    facts.mapping("quantization_config")
    stated = _stated(checkpoint)
    weights = [name for name, handle in checkpoint.tensors.items() if handle.dtype in QUANTIZED]
    if not weights:
        facts.drop("quantization_config", "no weight is in fp8")
        return None
    if stated is None:
        raise FormatError(
            f"{weights[0]} is in fp8, and no quantization_config says how it is scaled",
            where=checkpoint.config_path,
            hint=f"fetch the checkpoint again: config.json or {MODELOPT_FILE} should say it",
        )
    _check_input_scales(checkpoint, weights)
    method = stated.get("quant_method")
    facts.record("quantization", method if isinstance(method, str) else "modelopt", "stated")
    return stated


def _stated(checkpoint: Checkpoint) -> dict[str, object] | None:
    """What the config, or ModelOpt's file beside it, says of quantized weights."""
    stated = checkpoint.config.get("quantization_config")
    path = checkpoint.source.path / MODELOPT_FILE
    if stated is None and path.is_file():
        return read_object(path)
    return dict(stated) if isinstance(stated, dict) else None


def _check_input_scales(checkpoint: Checkpoint, weights: list[str]) -> None:
    """Static activation scales are there for every weight, dynamic ones for none."""
    scales = [f"{name.removesuffix('.weight')}.input_scale" for name in weights]
    missing = [scale for scale in scales if scale not in checkpoint.tensors]
    if 0 < len(missing) < len(scales):
        raise FormatError(
            f"tensors that the other weights have are missing: {', '.join(missing)}",
            where=checkpoint.source.path,
            hint="the download may be incomplete: fetch the checkpoint again",
        )
