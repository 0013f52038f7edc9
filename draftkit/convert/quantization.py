"""Quantized weights on their way into the layout, and out of it: as the numbers that they stand for, or as they lie.

A format sees each quantized weight as a plain one (`with_plain_weights`), so that none has to know how it is stored;
what it plans for it is then done to the parts that lie in the file (`as_stored`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.facts import Facts
from draftkit.convert.operations import Move, copy, drop
from draftkit.convert.plan import Plan
from draftkit.engines.known import asked, known
from draftkit.errors import FormatError
from draftkit.io.dtypes import FLOATS, dtype_name, torch_dtype
from draftkit.io.handles import Chunk, TensorHandle, raw_memory
from draftkit.io.jsonfile import read_object
from draftkit.layout.folder import Draft
from draftkit.layout.quantization import MODELOPT_FILE, algorithm_of, refuse_unread
from draftkit.layout.stored_weights import Found, StoredWeight, stored_weights, weight_bits, weight_block, without_ones

if TYPE_CHECKING:
    from torch import Tensor

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # what the three lower bits of a four-bit float stand for


def refuse_unread_weights(checkpoint: Checkpoint) -> None:
    """Raise `FormatError` for weights that are quantized otherwise than draftkit reads, before anything else is judged
    of them: their names and shapes are those of no layout."""
    stated = _stated(checkpoint)
    hint = "convert the draft that was quantized" + _readers(stated or {})
    if checkpoint.adapter is not None:
        hint = "name the model that was quantized as the base, in adapter_config.json"
    refuse_unread(_found(checkpoint), stated, checkpoint.source.path, hint)


def _readers(stated: Mapping[str, object]) -> str:
    """Which releases of which is spoken read such weights, as the end of a sentence."""
    algorithm = algorithm_of(stated)
    found = [str(release) for engine in known() for release in asked(engine) if algorithm in release.quantizations]
    return f", or serve this one as it is: {', '.join(found)} reads weights of this format" if found else ""


def with_plain_weights(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with each quantized weight in the place of its parts, plain and of the dtype of the others; the
    same checkpoint where there is none."""
    stated = _stated(checkpoint)
    weights = stored_weights(_found(checkpoint), stated)
    if not weights:
        return checkpoint
    parts = {name for weight in weights.values() for name in weight.parts.values()}
    plain = {name: handle for name, handle in checkpoint.tensors.items() if name not in parts}
    dtype = _commonest(plain)
    plain |= {
        weight.name: _plain_handle(weight, checkpoint.tensors, dtype, stated or {}) for weight in weights.values()
    }
    return replace(checkpoint, tensors=plain, quantized=weights)


def plain_draft(draft: Draft) -> Draft:
    """A quantized draft with the plain weights that its own stand for, in the dtype of the others; read one by one."""
    stated = draft.spec.quantization
    if stated is None:
        return draft
    weights = stored_weights({name: (t.dtype, t.shape) for name, t in draft.tensors.items()}, stated)
    parts = {name for weight in weights.values() for name in weight.parts.values()}
    plain = {name: handle for name, handle in draft.tensors.items() if name not in parts}
    for weight in weights.values():
        plain[weight.name] = _plain_handle(weight, draft.tensors, draft.spec.dtype, stated)
    return replace(draft, spec=replace(draft.spec, quantization=None), tensors=plain)


def _commonest(tensors: Mapping[str, TensorHandle]) -> str:
    sizes: dict[str, int] = {}
    for handle in tensors.values():
        if handle.dtype in FLOATS:
            sizes[handle.dtype] = sizes.get(handle.dtype, 0) + handle.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype], default="F32")


def _plain_handle(
    weight: StoredWeight, tensors: Mapping[str, TensorHandle], dtype: str, stated: Mapping[str, object]
) -> TensorHandle:
    def numbers(size: int) -> Iterator[Chunk]:
        loaded = {part: tensors[name].load() for part, name in weight.parts.items()}
        memory = raw_memory(dequantized_weight(weight, loaded, stated).to(torch_dtype(dtype)).contiguous())
        return (memory[begin : begin + size] for begin in range(0, len(memory), size))

    origin = next(tensors[name].origin for name in weight.parts.values())
    return TensorHandle(weight.name, dtype, weight.shape, origin, numbers)


def read_quantization(checkpoint: Checkpoint, facts: Facts) -> dict[str, object] | None:
    """The `quantization_config` of a checkpoint, seen with plain weights, that has quantized ones; None where none is.

    Raises `FormatError` for fp8 weights that nothing explains, and where some lack a scale of their input.
    """
    facts.mapping("quantization_config")
    stated = _stated(checkpoint)
    if not checkpoint.quantized:
        facts.drop("quantization_config", "no weight is quantized")
        return None
    if stated is None:
        name = next(iter(checkpoint.quantized.values())).name
        raise FormatError(
            f"{name} is in fp8, and no quantization_config says how it is scaled",
            where=checkpoint.config_path,
            hint=f"fetch the checkpoint again: config.json or {MODELOPT_FILE} should say it",
        )
    _check_input_scales(checkpoint)
    method = stated.get("quant_method")
    facts.record("quantization", method if isinstance(method, str) else "modelopt", "stated")
    return stated


def quantized_plan(
    plan: Plan, quantization: dict[str, object] | None, checkpoint: Checkpoint, plain: Checkpoint
) -> Plan:
    """A plan that was made of a plain view, for the weights as they lie in the checkpoint.

    Raises `FormatError` where a quantized weight would have to become another one.
    """
    if quantization is None:
        return plan
    weights = {weight.name: weight for weight in plain.quantized.values()}
    moves = tuple(part for move in plan.moves for part in _of_parts(move, weights, checkpoint))
    return replace(plan, moves=moves, spec=plan.spec and replace(plan.spec, quantization=quantization))


def _of_parts(move: Move, weights: Mapping[str, StoredWeight], checkpoint: Checkpoint) -> Iterator[Move]:
    touched = [weights[name] for name in move.sources if name in weights]
    if not touched:
        yield move
        return
    parts = {part: checkpoint.tensors[name] for part, name in touched[0].parts.items()}
    if move.operation == "drop":
        yield from (drop(handle, move.reason) for handle in parts.values())
    elif move.operation == "copy" and move.destination is not None and move.destination.endswith(".weight"):
        module = move.destination.removesuffix(".weight")
        yield from (copy(handle, f"{module}.{part}") for part, handle in parts.items())
    else:
        what = f"{touched[0].name} is quantized ({touched[0].way.name}), and the layout has it otherwise"
        hint = "convert the draft that was quantized"
        if checkpoint.adapter is not None:
            what = f"{touched[0].name} is quantized ({touched[0].way.name}), and the adapter changes it"
            hint = "name the model that was quantized as the base, in adapter_config.json"
        raise FormatError(f"{what} ({move.operation})", where=checkpoint.source.path, hint=hint)


def _found(checkpoint: Checkpoint) -> Found:
    return {name: (handle.dtype, handle.shape) for name, handle in checkpoint.tensors.items()}


def _stated(checkpoint: Checkpoint) -> dict[str, object] | None:
    """What the config, or ModelOpt's file beside it, says of quantized weights."""
    stated = checkpoint.config.get("quantization_config")
    path = checkpoint.source.path / MODELOPT_FILE
    if stated is None and path.is_file():
        return read_object(path)
    return dict(stated) if isinstance(stated, dict) else None


def _check_input_scales(checkpoint: Checkpoint) -> None:
    """Static scales of inputs are there for every weight of a kind, dynamic ones for none."""
    weights = [weight for weight in checkpoint.quantized.values() if weight.way.name == "fp8"]
    missing = [f"{weight.module}.input_scale" for weight in weights if "input_scale" not in weight.parts]
    if 0 < len(missing) < len(weights):
        raise FormatError(
            f"tensors that the other weights have are missing: {', '.join(missing)}",
            where=checkpoint.source.path,
            hint="the download may be incomplete: fetch the checkpoint again",
        )


def dequantized(tensors: Mapping[str, Tensor], quantization: Mapping[str, object] | None) -> dict[str, Tensor]:
    """The tensors with the parts of every quantized weight as that weight [out, in], in float32."""
    if quantization is None:
        return dict(tensors)
    found = {name: (dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()}
    plain = dict(tensors)
    for weight in stored_weights(found, quantization).values():
        parts = {part: plain.pop(name) for part, name in weight.parts.items()}
        plain[weight.name] = dequantized_weight(weight, parts, quantization)
    return plain


def dequantized_weight(weight: StoredWeight, parts: Mapping[str, Tensor], stated: Mapping[str, object]) -> Tensor:
    """The weight float32 [out, in] that its parts stand for: each number times its scale, in float32."""
    codes = _codes(weight, parts, weight_bits(stated, weight.module))
    return codes * _expanded(_scale(parts), codes, weight_block(stated), weight.way.group)


def _codes(weight: StoredWeight, parts: Mapping[str, Tensor], bits: int | None) -> Tensor:
    """The numbers float32 [out, in] before they are scaled."""
    import torch

    codes = parts["weight_packed"] if "weight_packed" in parts else parts["weight"]
    if weight.way.per == 2:  # two to a byte, the lower half first
        halves = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1).long()
        return torch.tensor([*FP4, *(-number for number in FP4)], device=codes.device)[halves]
    if weight.way.per is None:  # the lowest bits of 32 first, counted from the least integer
        assert bits is not None
        places = torch.arange(0, 32, bits, device=codes.device, dtype=torch.int32)
        whole = (codes.unsqueeze(-1) >> places) & (1 << bits) - 1
        return whole.flatten(1).float() - (1 << bits - 1)
    return codes.float()


def _scale(parts: Mapping[str, Tensor]) -> Tensor:
    """The scales in float32, with that of the whole weight in them."""
    import torch

    scale = parts["weight_scale_inv"] if "weight_scale_inv" in parts else parts["weight_scale"]
    if scale.dtype == torch.uint8:
        exponents = scale.int()  # of powers of two, by 127 too large
        scale = torch.where(exponents == 0, 1 << 22, exponents << 23).view(torch.float32)
    scale = scale.float()
    if "weight_global_scale" in parts:
        scale = scale / parts["weight_global_scale"].float()
    if "weight_scale_2" in parts:
        scale = scale * parts["weight_scale_2"].float()
    return scale


def _expanded(scale: Tensor, weight: Tensor, block: tuple[int, int] | None, group: int | None) -> Tensor:
    """A scale for all of the weight, for each row [out] or [out, 1], or for each block, as a factor that broadcasts."""
    if group is not None:
        return scale.repeat_interleave(group, 1)
    if scale.numel() == 1:
        return scale.view(())
    scale = scale.view(without_ones(tuple(scale.shape)))
    if scale.ndim == 1 or scale.shape == (len(weight), 1):
        return scale.view(-1, 1)
    for dim, (size, count) in enumerate(zip(weight.shape, scale.shape, strict=True)):
        rows = block[dim] if block else -(-size // count)
        scale = scale.repeat_interleave(rows, dim).narrow(dim, 0, size)
    return scale
