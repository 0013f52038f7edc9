"""What a draft is: every fact that decides which tokens it proposes.

The facts are orthogonal. `eagle`, `eagle3` and `p-eagle` are names for values of them, not kinds of their own. Every
fact is stated; nothing is left to a reader's default, because the defaults of engines disagree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from draftkit.errors import LayoutError
from draftkit.io.dtypes import FLOATS
from draftkit.io.records import from_dict, to_dict
from draftkit.layout.architecture import Architecture
from draftkit.layout.facts import facts_of
from draftkit.layout.families import families
from draftkit.layout.schema import Shape, TensorSchema, check_tensors

HF_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, kw_only=True)
class DraftSpec:
    """One draft: its architecture and the dtype of its weights (safetensors' name, as `F16`).

    `quantization`: the `quantization_config` of transformers, verbatim, of weights kept in another dtype (fp8).
    """

    architecture: Architecture
    dtype: str
    quantization: dict[str, object] | None = None

    @property
    def stored_as(self) -> dict[str, object] | None:
        """What says how its quantized weights are stored: its `quantization`, or of heads that are kept as they lie in
        their target, what the target's config says; None where nothing does."""
        stated = self.quantization or self.architecture.engine_config().get("quantization_config")
        return stated if isinstance(stated, dict) else None

    @property
    def method(self) -> str:
        """The published name of this combination of facts: eagle, eagle3, p-eagle, draft-model, pard, ..."""
        return self.architecture.method

    @property
    def kind(self) -> str:
        return self.architecture.family.replace("_", "-")

    def facts(self) -> dict[str, object]:
        """Every fact that decides what the draft computes, under the name that users know it by."""
        found = {"dtype": self.dtype} | facts_of(self.architecture)
        return found if self.quantization is None else found | {"quantization": self.quantization}

    def to_dict(self) -> dict[str, object]:
        """The spec as JSON values, every fact written out."""
        return {
            "kind": self.kind,
            "dtype": self.dtype,
            "quantization": self.quantization,
            "architecture": to_dict(self.architecture, brief=True),
        }

    @classmethod
    def from_dict(cls, data: dict[str, object], where: object) -> DraftSpec:
        """Read what `to_dict` wrote. Raises `LayoutError` listing every missing, unknown or ill-typed fact."""
        kind, dtype, quantization = data.get("kind"), data.get("dtype"), data.get("quantization")
        keys = {"kind", "dtype", "quantization", "architecture"}
        is_quantization = quantization is None or isinstance(quantization, dict)
        if kind not in list(families()) or dtype not in FLOATS or set(data) != keys or not is_quantization:
            raise LayoutError(
                f"not a draft spec: kind {kind!r}, dtype {dtype!r}, keys {sorted(data)}",
                where=where,
                expected=f"kind of {sorted(families())}, dtype of {list(FLOATS)}, quantization, architecture",
            )
        return cls(
            architecture=from_dict(families()[str(kind)], data["architecture"], where),
            dtype=str(dtype),
            quantization=cast("dict[str, object] | None", quantization),
        )

    def tensors(self) -> dict[str, TensorSchema]:
        """Name → schema of every tensor of the draft, its weights not quantized."""
        return self.architecture.tensors()

    def check_tensors(self, found: Mapping[str, tuple[str, Shape]], where: object, hint: str | None = None) -> None:
        """Compare tensors (name → dtype, shape) with these facts. Raises one `LayoutError` listing every mismatch."""
        check_tensors(self.tensors(), found, where, quantization=self.quantization, hint=hint)

    def engine_config(self) -> dict[str, object]:
        """The keys of `config.json` around the `draftkit` block: what engines read for this kind of draft."""
        config = self.architecture.engine_config()
        if self.quantization is not None:
            config["quantization_config"] = self.quantization
        return config | {"dtype": HF_DTYPES[self.dtype], "torch_dtype": HF_DTYPES[self.dtype]}
