"""Rotary position embedding as a trainer has used it, which is not always what its config says."""

from __future__ import annotations

from typing import Literal

from draftkit.convert.facts import Facts
from draftkit.errors import FormatError
from draftkit.layout.decoder import Rope

# Where a trainer takes the rope base from. `config`: the config, 10000 without one. `reference`: the same, but always
# 10000 beside linear or dynamic scaling (SafeAILab). `multimodal`: 10000, but for multimodal rope (AngelSlim).
# `unscaled`: as `config`, with no kind of scaling (SpecForge's P-EAGLE).
RopeSource = Literal["config", "reference", "multimodal", "unscaled"]
SCALED = ("linear", "dynamic")  # kinds whose formula has nothing but a factor
SCALED_KEYS = {"rope_type", "factor", "original_max_position_embeddings"}
MULTIMODAL = "mrope_section"  # rope over three positions of a token; they are equal, and it is plain rope, for text


def read_rope(facts: Facts, source: RopeSource = "reference") -> Rope:
    """Rope facts, with the base that a trainer which follows `source` has used. The target's plays no part."""
    scaling = dict(facts.mapping("rope_scaling") or {}) | dict(facts.mapping("rope_parameters") or {})
    nested = facts.optional("rope_theta", float, inside=scaling)
    stated = facts.optional("rope_theta", float)
    declared = nested if stated is None else stated
    scaling.pop("rope_theta", None)
    if "type" in scaling:
        scaling.setdefault("rope_type", scaling.pop("type"))
    kind = scaling.get("rope_type", "default")
    _check_scaling(facts, scaling)
    ignored = (source == "reference" and kind in SCALED) or (source == "multimodal" and MULTIMODAL not in scaling)
    if declared is not None and not ignored:
        base = facts.record("rope_theta", declared, "stated")
    else:
        said = "nothing" if declared is None else declared
        base = facts.record("rope_theta", 10000.0, "format default", f"the trainer's base; the config says {said}")
    if source == "unscaled" and kind != "default":
        facts.record("rope_scaling", "default", "format default", f"the config says {kind}, and its trainer ignores it")
        for key in ("rope_scaling", "rope_parameters"):
            facts.drop(key, "the trainer ignores it")
        scaling = {}
    else:
        note = _without_effect(scaling) if scaling else "none given"
        facts.record("rope_scaling", str(kind), "stated" if scaling else "format default", note)
    return Rope(
        base=base,
        declared_base=declared,
        scaling=_effective_scaling(scaling),
        max_position_embeddings=facts.size("max_position_embeddings", 2048, "the reference's default"),
    )


def _check_scaling(facts: Facts, scaling: dict[str, object]) -> None:
    """Raise `FormatError` for parameters that are missing, or that the layout cannot say."""
    if scaling.get("rope_type") in SCALED:
        facts.need("factor", scaling)
    if scaling.get("rope_type") == "mrope" and MULTIMODAL not in scaling:
        raise FormatError(f"rope_scaling is mrope without {MULTIMODAL}")
    if facts.optional("partial_rotary_factor", float, inside=scaling) not in (None, 1.0):
        raise FormatError("rope turns a part of each head only (partial_rotary_factor), which the layout cannot say")
    if any(isinstance(value, dict) for value in scaling.values()):
        raise FormatError(f"rope has different parameters for {', '.join(scaling)}: the layers of a draft must agree")


def _without_effect(scaling: dict[str, object]) -> str:
    """What `_effective_scaling` leaves out, in words."""
    kept = _effective_scaling(scaling) or {}
    left_out = [f"{key} {value!r}" for key, value in scaling.items() if key not in kept and key != "rope_type"]
    return f"without effect: {', '.join(left_out)}" if left_out else ""


def _effective_scaling(scaling: dict[str, object]) -> dict[str, object] | None:
    """What of the parameters enters the formula, in the spelling of transformers 5; None for plain rope."""
    kind = scaling.get("rope_type", "default")
    if kind in SCALED:
        return {key: value for key, value in scaling.items() if key in SCALED_KEYS}
    if kind == "mrope":
        return scaling | {"rope_type": "default"}
    return scaling if kind != "default" or scaling.keys() - {"rope_type"} else None
