"""What the tensors of a draft must be, and whether those of a folder are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from draftkit.errors import LayoutError
from draftkit.io.dtypes import FLOATS, QUANTIZED
from draftkit.layout.quantization import SCALES, scales_fit, weight_block

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorSchema:
    """What one tensor must be. `dtypes`: the safetensors dtypes it may have."""

    shape: Shape
    dtypes: tuple[str, ...] = FLOATS
    required: bool = True


def of_shapes(shapes: Mapping[str, Shape]) -> dict[str, TensorSchema]:
    """The schema of floating-point tensors, all required, by their shapes."""
    return {name: TensorSchema(shape) for name, shape in shapes.items()}


def check_tensors(
    schema: Mapping[str, TensorSchema],
    found: Mapping[str, tuple[str, Shape]],
    where: object,
    *,
    quantization: Mapping[str, object] | None = None,
    hint: str | None = None,
) -> None:
    """Compare tensors (name → dtype, shape) with their schema; with a `quantization`, they may lie in fp8, with scales
    beside them.

    Raises one `LayoutError` that lists every mismatch.
    """
    if quantization is not None:
        schema = {**schema, **_quantized(schema, found, weight_block(quantization))}
    problems = [f"missing: {name} {list(s.shape)}" for name, s in schema.items() if s.required and name not in found]
    problems += [f"unexpected: {name} {list(found[name][1])}" for name in found if name not in schema]
    for name in schema.keys() & found.keys():
        dtype, shape = found[name]
        if shape != schema[name].shape:
            problems.append(f"wrong shape: {name} is {list(shape)}, expected {list(schema[name].shape)}")
        if dtype not in schema[name].dtypes:
            problems.append(f"wrong dtype: {name} is {dtype}, expected one of {', '.join(schema[name].dtypes)}")
    if problems:
        listing = "\n    ".join(sorted(problems))
        raise LayoutError(f"the tensors do not fit the draft's spec:\n    {listing}", where=where, hint=hint)


def _quantized(
    schema: Mapping[str, TensorSchema], found: Mapping[str, tuple[str, Shape]], block: tuple[int, int] | None
) -> dict[str, TensorSchema]:
    """Weights that lie in fp8, and the scales beside them: for the tensor, its rows, or its blocks."""
    tensors: dict[str, TensorSchema] = {}
    for name, tensor in schema.items():
        module = name.removesuffix(".weight")
        if found.get(name, ("", ()))[0] in QUANTIZED and module != name:
            tensors[name] = TensorSchema(tensor.shape, QUANTIZED)
            for scale in (f"{module}.{suffix}" for suffix in SCALES):
                if scale in found:
                    shape = found[scale][1]
                    tensors[scale] = TensorSchema(shape if scales_fit(tensor.shape, shape, block) else ())
            if not any(scale.startswith(f"{module}.weight_scale") for scale in tensors):
                tensors[f"{module}.{SCALES[0]}"] = TensorSchema(())
    return tensors
