"""PARD-2: PARD whose input embeddings carry a projection of the target's hidden states, kept in `warp_model.bin`.

The projection reads `pard2_target_layers` of transformers' `hidden_states`, in the order given (-1 is after the final
norm). Keys had other names before. Source: AMD-AGI/PARD `pard/pard2_infer.py`, `pard/pard2_train.py`.
"""

from __future__ import annotations

from draftkit.convert.checkpoint import PROJECTION_FILE, Checkpoint
from draftkit.convert.export import Export, Outgoing
from draftkit.convert.facts import Facts
from draftkit.convert.formats.causal_lm.causal_lm import (
    exported_config,
    exported_losses,
    plan_causal_lm,
    read_mask_token,
)
from draftkit.convert.plan import Plan
from draftkit.errors import FormatError, TargetError
from draftkit.layout.families.causal_lm import CausalLMSpec, TargetFeatures
from draftkit.layout.target import TargetFacts

NAME = "pard2"
TITLE = "PARD-2 (AMD)"

DESTINATION = "pard"
METHODS = ("pard-2",)

# Fact → its keys, the ones that later versions of the reference prefer first.
LAYERS = ("pard2_target_layers", "target_layers")
SIZE = ("pard2_target_dim", "pard_target_dim")
SCALE = ("pard2_scale", "pard_scale", "feat_scale")
BIAS = ("pard2_proj_bias", "proj_bias")
DEFAULTS = {"pard2_target_dim": 4096, "pard2_scale": 0.02, "pard2_proj_bias": False}
WEIGHT, BIAS_TENSOR = "target_proj.weight", "target_proj.bias"


def recognize(checkpoint: Checkpoint) -> int:
    config = checkpoint.config
    marked = config.get("spd_type") == "pard2" or config.get("pard2") is True or WEIGHT in checkpoint.tensors
    return 3 if marked and checkpoint.is_causal_lm else 0


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    features = _read_features(checkpoint, facts, target)
    dropped = {}
    if features is not None and not features.projection_bias:
        dropped[BIAS_TENSOR] = "the config says that the projection has no bias, and the reference does not load it"
    parallel = read_mask_token(checkpoint, facts)
    return plan_causal_lm(NAME, checkpoint, facts, target, parallel, features, dropped)


def export(outgoing: Outgoing) -> Export:
    """The config is the one that came, where a fact was overridden with its new value under the key it had."""
    model = outgoing.draft.spec.architecture.expect(CausalLMSpec)
    assert model.parallel is not None
    assert model.target_features is not None
    features = model.target_features
    values: dict[tuple[str, ...], object] = {
        LAYERS: list(features.layer_ids),
        SIZE: features.size,
        SCALE: features.scale,
        BIAS: features.projection_bias,
        ("pard_token",): model.parallel.mask_token_id,
    }
    stated = {_stated_key(model.config, keys): value for keys, value in values.items()}
    unsaid = {key for key, value in DEFAULTS.items() if key not in model.config and stated.get(key) == value}
    config = exported_config(outgoing.draft) | {key: value for key, value in stated.items() if key not in unsaid}
    projection = tuple(name for name in (WEIGHT, BIAS_TENSOR) if name in outgoing.draft.tensors)
    losses = exported_losses(outgoing.draft)
    return Export(config, tuple(outgoing.renamed({})), losses, torch_files={PROJECTION_FILE: projection})


def _read_features(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> TargetFeatures | None:
    """The features that are added to the embeddings; None while the layers are missing, which `facts` then say."""
    if WEIGHT not in checkpoint.tensors:
        raise FormatError(
            f"tensor {WEIGHT} is missing",
            where=checkpoint.source.path,
            expected=f"the target's projection in {PROJECTION_FILE}",
            hint="the download may be incomplete: fetch the checkpoint again",
        )
    _, size = checkpoint.matrix(WEIGHT)
    said = facts.optional(_stated_key(checkpoint.config, SIZE), int)
    facts.record("size", size, "from tensors", f"columns of {WEIGHT}; the config says {said or 'nothing'}")
    layers = _layer_ids(checkpoint, facts, size, target)
    scale = facts.optional(_stated_key(checkpoint.config, SCALE), float)
    bias = facts.optional(_stated_key(checkpoint.config, BIAS), bool)
    default = DEFAULTS["pard2_scale"]
    scale = facts.record("scale", default if scale is None else scale, "format default" if scale is None else "stated")
    bias = facts.record("projection_bias", bool(bias), "format default" if bias is None else "stated")
    if layers is None:
        return None
    return TargetFeatures(layer_ids=layers, size=size, scale=scale, projection_bias=bias)


def _layer_ids(checkpoint: Checkpoint, facts: Facts, size: int, target: TargetFacts | None) -> tuple[int, ...] | None:
    key = _stated_key(checkpoint.config, LAYERS)
    layers = facts.integers(key)
    if layers is not None:
        facts.record("layer_ids", str(list(layers)), "stated", key)
    else:
        given = facts.require("layer_ids", "ask the author for the captured layers and pass --set layer_ids=-1,-8,…")
        if given is None:
            return None
        layers = facts.as_integers("layer_ids", given if isinstance(given, list) else [given])
    if not layers or size % len(layers):
        raise FormatError(
            f"{WEIGHT} reads {size} features, which are not those of the {len(layers)} layers {list(layers)}",
            where=checkpoint.source.path,
        )
    if target is not None:
        _check_target(checkpoint, target, layers, size // len(layers))
    return layers


def _check_target(checkpoint: Checkpoint, target: TargetFacts, layers: tuple[int, ...], width: int) -> None:
    count = target.num_hidden_layers + 1
    outside = [layer for layer in layers if not -count <= layer < count]
    if target.hidden_size != width or outside:
        raise TargetError(
            f"{checkpoint.source.name} reads layers {list(layers)} of {width} features, {target.name} has "
            f"{count} hidden states of {target.hidden_size}",
            where=checkpoint.source.path,
            hint="pass the target that the draft was trained for with --target",
        )


def _stated_key(config: dict[str, object], keys: tuple[str, ...]) -> str:
    """The key under which this config says a fact; the first when it does not."""
    return next((key for key in keys if config.get(key) is not None), keys[0])
