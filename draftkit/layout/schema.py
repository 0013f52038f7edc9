"""What the tensors of a draft must be, and whether those of a folder are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from draftkit.errors import LayoutError
from draftkit.io.dtypes import FLOATS
from draftkit.layout.stored_weights import plain_view

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
    """Compare tensors (name → dtype, shape) with their schema; with a `quantization`, the parts of a quantized weight
    stand for it.

    Raises one `LayoutError` that lists every mismatch.
    """
    if quantization is not None:
        found = plain_view(found, quantization)
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
