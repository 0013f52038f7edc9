"""Multi-token prediction heads as the speculators library (0.9) trains and stores them: Qwen's, under names of its own.

Source: `speculators/convert/mtp` and `speculators/models/mtp`. vLLM 0.32 does not load the library's files; its own
names are those of the target, to which the library's `stitch-mtp` goes back too.
"""

from __future__ import annotations

from dataclasses import replace

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.facts import Facts
from draftkit.convert.formats.eagle.reading import with_unified_names
from draftkit.convert.formats.mtp.heads import find_heads
from draftkit.convert.formats.mtp.mtp import plan_heads
from draftkit.convert.formats.speculators import note_target, read_kind, recognize_kinds, with_target_named
from draftkit.convert.operations import copy, drop
from draftkit.convert.plan import Plan
from draftkit.engines.speculators import LAYER_CONFIG, verifier_architectures
from draftkit.errors import FormatError
from draftkit.layout.mtp import QWEN
from draftkit.layout.target import TargetFacts

NAME = "speculators-mtp"
TITLE = "multi-token prediction head (speculators layout)"
VERBATIM = True
KINDS = ("mtp",)

RENAMES = {
    "mtp_layers.0.input_proj.": "mtp.fc.",
    "mtp_layers.0.token_layernorm.": "mtp.pre_fc_norm_embedding.",
    "mtp_layers.0.hidden_layernorm.": "mtp.pre_fc_norm_hidden.",
    "mtp_layers.0.final_layernorm.": "mtp.norm.",
    "mtp_layers.0.": "mtp.layers.0.",
}
EXPERTS = ".experts."
OF_TARGET = "verifier_lm_head.weight"  # which the library's converter leaves in the file, without the target's numbers
TRAINED_ON = "what engines feed it; the library trains it on the target's state before the final norm"


def recognize(checkpoint: Checkpoint) -> int:
    return recognize_kinds(checkpoint, KINDS)


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    read_kind(checkpoint, facts, KINDS)
    facts.names("architectures")
    facts.optional("num_nextn_predict_layers", int)  # 1, which is all that the library has
    config = _config_of_target(checkpoint, facts)
    named = note_target(facts)
    view = replace(with_unified_names(checkpoint, RENAMES), config=config)
    heads = find_heads(view)
    if heads is None or heads.kind.parts != QWEN.parts:
        raise FormatError(
            f"no engine has multi-token prediction heads of {config.get('model_type')}",
            where=checkpoint.config_path,
            expected="the head of a Qwen3-Next or Qwen3.5",
        )
    if fused := next((name for name in view.tensors if EXPERTS in name), None):
        raise FormatError(
            f"its experts are stored as one ({fused}), which targets and engines have one by one",
            where=checkpoint.source.path,
            hint="speculators stitch-mtp puts it back into a copy of its target, from which --part mtp takes it out",
        )
    facts.record("hidden_state", heads.kind.hidden_state, "format default", TRAINED_ON)
    moves = [
        drop(handle, "the target's own output layer") if name == OF_TARGET else copy(handle, name)
        for name, handle in view.tensors.items()
    ]
    return with_target_named(plan_heads(NAME, checkpoint, facts, heads, config, moves), named)


def _config_of_target(checkpoint: Checkpoint, facts: Facts) -> dict[str, object]:
    """The configuration of the target, as far as the file states it, with the number of heads under the target's own
    key."""
    config = facts.mapping(LAYER_CONFIG)
    if config is None:
        raise FormatError(f"config key {LAYER_CONFIG} is missing", where=checkpoint.config_path, expected="an object")
    return {**config, "architectures": verifier_architectures(checkpoint.config), "mtp_num_hidden_layers": 1}
