"""Reading EAGLE-3 and P-EAGLE checkpoints, which seven trainers write with small differences.

A format module states its differences as a `Dialect`; names, shapes and knobs are shared (SafeAILab/EAGLE `cnets.py`,
vLLM `llama_eagle3.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.facts import Facts
from draftkit.convert.formats.decoder import RopeSource, read_decoder, read_windows
from draftkit.convert.formats.vocabulary_map import read_vocabulary_map, with_map
from draftkit.convert.operations import Move, copy, drop
from draftkit.convert.plan import Plan, common_dtype, make_plan, renamed
from draftkit.errors import FormatError, TargetError
from draftkit.layout.architecture import ParallelDrafting
from draftkit.layout.decoder import Decoder
from draftkit.layout.families.eagle import EagleSpec
from draftkit.layout.mtp import Feedback
from draftkit.layout.spec import DraftSpec
from draftkit.layout.target import TargetFacts

FeatureNorm = Literal["none", "joint", "per_layer"]
Owner = Literal["draft", "target"]

MASK_TOKEN_KEYS = ("mask_token_id", "ptd_token_id", "pard_token")  # the order in which vLLM looks them up
EMPTY = {"pard_token": -1}  # what a trainer writes that had none


@dataclass(frozen=True)
class Dialect:
    """What one trainer's files mean where the layouts share their names.

    - `name`: the format. `renames`: the beginnings of its tensor names → those of the unified layout.
    - `rope`: what of the config's rope the trainer reads. `windows`: whether `layer_types` are the draft's own.
    - `residual_note`: why `norm_before_residual` is false where the config does not say.
    """

    name: str
    renames: Mapping[str, str] = field(default_factory=dict)
    rope: RopeSource = "config"
    windows: bool = True
    residual_note: str = "the residual is the hidden state before its norm"


def plan_eagle3(
    checkpoint: Checkpoint,
    facts: Facts,
    target: TargetFacts | None,
    dialect: Dialect,
    dropped: Mapping[str, str] | None = None,
) -> Plan:
    """Plan the conversion of an EAGLE-3-like checkpoint. `dropped`: unified names of tensors that do nothing → why."""
    view = with_unified_names(checkpoint, dialect.renames)
    _refuse_mla(view)
    num_layers = view.count_layers()
    windows = read_windows(facts, num_layers, own=dialect.windows)
    decoder = read_decoder(view, facts, "layers.0.", num_layers, dialect.rope, windows)
    _check_attention(view, decoder)
    vocab_size = facts.size("vocab_size")
    draft_vocab_size = facts.size("draft_vocab_size", *_rows_of_head(view, vocab_size))
    target_hidden = facts.size("target_hidden_size", decoder.hidden_size, "absent means the draft's width")
    if target is not None:
        checkpoint.check_target(target, hidden_size=target_hidden, vocab_size=vocab_size)
    nested = read_eagle_config(facts)
    aux_layer_ids = read_aux_layer_ids(view, facts, target, target_hidden, nested)
    vocabulary_map = read_vocabulary_map(view, facts, vocab_size, draft_vocab_size)
    feedback, final_norm = _feedback(facts), _final_norm(view, facts, nested)
    parallel = read_mask(view, facts)
    norm_before_residual = facts.stated_or("norm_before_residual", bool, False, dialect.residual_note)
    feature_norm = read_feature_norm(view, facts, nested.norm_before_fc)
    hidden_norm = _has_hidden_norm(view, facts, nested)
    logit_scale = facts.stated_or("logit_scale", float, 1.0, "none")
    embed_tokens = _owner(view, facts, "embed_tokens", decoder.hidden_size == target_hidden)
    lm_head = _owner(view, facts, "lm_head", draft_vocab_size == vocab_size)
    facts.drop("bias", "not used by this architecture")
    spec = None
    if not facts.missing:
        architecture = EagleSpec(
            decoder=decoder,
            vocab_size=vocab_size,
            draft_vocab_size=draft_vocab_size,
            target_hidden_size=target_hidden,
            aux_layer_ids=aux_layer_ids,
            token_entry="attention",
            concatenation="embedding_hidden",
            fusion_bias=False,
            feature_norm=feature_norm,
            embedding_norm=True,
            hidden_norm=hidden_norm,
            input_norm=False,
            norm_before_residual=norm_before_residual,
            final_norm=final_norm,
            feedback=feedback,
            logit_scale=logit_scale,
            embed_tokens=embed_tokens,
            lm_head=lm_head,
            parallel=parallel,
        )
        spec = DraftSpec(architecture=architecture, dtype=common_dtype(checkpoint))
    unused = _redundant(vocab_size, draft_vocab_size)
    if not final_norm:
        unused["norm.weight"] = "the head reads the output before it"
    if not nested.use_aux_hidden_state:
        unused["fc.weight"] = "no layers are captured, and engines leave it out"
    moves = with_map(_moves(view, unused | dict(dropped or {})), view, vocabulary_map)
    return make_plan(dialect.name, checkpoint, facts, spec, moves)


def with_unified_names(checkpoint: Checkpoint, renames: Mapping[str, str]) -> Checkpoint:
    """A checkpoint whose tensors stand under the names of the layout; their handles keep those of the file."""
    tensors = {renamed(name, renames): handle for name, handle in checkpoint.tensors.items()}
    if len(tensors) < len(checkpoint.tensors):
        twice = sorted(name for name, handle in checkpoint.tensors.items() if tensors[renamed(name, renames)] != handle)
        raise FormatError(
            f"tensors that the file has under two names: {', '.join(twice)}",
            where=checkpoint.source.path,
            hint="fetch the checkpoint again",
        )
    return replace(checkpoint, tensors=tensors)


def norms_of_deeper_layers(checkpoint: Checkpoint, prefix: str) -> dict[str, str]:
    """Renames for trainers that call the first norm of every layer `hidden_norm`, not of layer 0 only."""
    count = checkpoint.count_layers(re.escape(prefix) + r"(\d+)\.")
    return {f"{prefix}{i}.hidden_norm.": f"layers.{i}.input_layernorm." for i in range(1, count + 1)}


def read_mask(view: Checkpoint, facts: Facts) -> ParallelDrafting | None:
    """Parallel drafting where the file has `mask_hidden`; the mask token, where the config has none, is missing."""
    flag = facts.optional("parallel_drafting", bool)
    named = {key: facts.optional(key, int) for key in MASK_TOKEN_KEYS}
    if "mask_hidden" not in view.tensors:
        if flag:
            raise FormatError("parallel_drafting is true and there is no mask_hidden", where=view.source.path)
        facts.record("parallel", "None", "from tensors", "the file has no mask_hidden")
        return None
    facts.record("mask_state", True, "from tensors", "the file has mask_hidden")
    token = next((value for key, value in named.items() if value is not None and value != EMPTY.get(key)), None)
    if token is not None:
        facts.record("mask_token_id", token, "stated")
        return ParallelDrafting(mask_token_id=token, mask_state=True)
    hint = "ask its author for the mask token of the training and pass --set mask_token_id=…"
    given = facts.require("mask_token_id", hint)
    if given is None:
        return None
    return ParallelDrafting(mask_token_id=facts.as_integers("mask_token_id", [given])[0], mask_state=True)


def read_feature_norm(view: Checkpoint, facts: Facts, joint: bool = False) -> FeatureNorm:
    """The norm before `fc`, which the tensors tell; the config must not contradict them."""
    joint = bool(facts.optional("norm_before_fc", bool)) or joint
    per_layer = bool(facts.optional("fc_norm", bool))
    found = {"joint": "input_norm.weight" in view.tensors, "per_layer": "fc_norm.0.weight" in view.tensors}
    for kind, said, tensor in (("joint", joint, "input_norm.weight"), ("per_layer", per_layer, "fc_norm.0.weight")):
        if said and not found[kind]:
            raise FormatError(
                f"config.json asks for a norm before fc, and {tensor} is missing",
                where=view.source.path,
                hint="a converter may have dropped it: fetch the original checkpoint",
            )
    if all(found.values()):
        raise FormatError("both input_norm and fc_norm are there", where=view.source.path)
    kinds: dict[FeatureNorm, bool] = {"joint": found["joint"], "per_layer": found["per_layer"], "none": True}
    norm = next(norm for norm, there in kinds.items() if there)
    facts.record("feature_norm", norm, "from tensors")
    return norm


def _feedback(facts: Facts) -> Feedback:
    """What the next step gets: with `norm_output` (EAGLE-3.1) the output after its norm, else the one before it."""
    said = facts.optional("norm_output", bool)
    feedback: Feedback = "post_norm" if said else "pre_norm"
    if said is None:
        facts.record("feedback", feedback, "format default", "EAGLE-3's; EAGLE-3.1 says norm_output true")
    else:
        facts.record("feedback", feedback, "stated", f"norm_output is {said}")
    return feedback


def _final_norm(view: Checkpoint, facts: Facts, nested: EagleConfig) -> bool:
    """Whether there is a norm before the head. The user may deny it: SpecForge has trained drafts without."""
    if nested.last_norm is False:
        return facts.record("final_norm", "norm.weight" in view.tensors, "from tensors", "use_last_layernorm is false")
    facts.record("final_norm", True, "format default" if nested.last_norm is None else "stated", "EAGLE-3 has it")
    return facts.set_by_user("final_norm") is not False


def _has_hidden_norm(view: Checkpoint, facts: Facts, nested: EagleConfig) -> bool:
    """Whether layer 0 norms its hidden input; without a word of the config it must."""
    if nested.first_norm is False or not nested.use_aux_hidden_state:
        return facts.record("hidden_norm", "layers.0.hidden_norm.weight" in view.tensors, "from tensors")
    return facts.record("hidden_norm", True, "format default" if nested.first_norm is None else "stated")


def _rows_of_head(view: Checkpoint, vocab_size: int) -> tuple[int, str]:
    """The size of the draft vocabulary where the config says nothing."""
    if "lm_head.weight" in view.tensors:
        return view.matrix("lm_head.weight")[0], "rows of lm_head.weight"
    return vocab_size, "the head is the target's"


def _owner(view: Checkpoint, facts: Facts, module: str, target_fits: bool) -> Owner:
    """Whose embedding or head the draft uses: its own where the file has one."""
    tensor = f"{module}.weight"
    if tensor not in view.tensors and not target_fits:
        raise FormatError(
            f"{tensor} is missing, and this draft cannot take the target's",
            where=view.source.path,
            expected="a table of the draft's own width"
            if module == "embed_tokens"
            else "a row for each token of the draft vocabulary",
            hint="ask the author for a file that holds it",
        )
    owner: Owner = "draft" if tensor in view.tensors else "target"
    facts.record(module, owner, "from tensors")
    return owner


def _refuse_mla(view: Checkpoint) -> None:
    if "layers.0.self_attn.kv_a_proj_with_mqa.weight" in view.tensors:
        raise FormatError(
            "this EAGLE-3 draft has multi-head latent attention (DeepSeek), which the layout does not describe",
            where=view.source.path,
            hint="vLLM loads the checkpoint as it is, as Eagle3DeepseekV2ForCausalLM",
        )


def _check_attention(view: Checkpoint, decoder: Decoder) -> None:
    """Raise `FormatError` where layer 0 attends over the hidden state alone."""
    if view.matrix("layers.0.self_attn.q_proj.weight")[1] == decoder.hidden_size:
        raise FormatError(
            "layer 0 reads the hidden state alone: the draft never sees the token that it continues",
            where=view.source.path,
            expected=f"projections of {2 * decoder.hidden_size} columns, embedding and hidden state",
            hint="no engine runs ModelOpt's drafts that were exported with use_aux_hidden_state false",
        )


def _redundant(vocab_size: int, draft_vocab_size: int) -> dict[str, str]:
    dropped = {"t2d": "the mask follows from d2t (checked)"}
    if vocab_size == draft_vocab_size:
        dropped["d2t"] = "all zero: the draft has the whole vocabulary"
    return dropped


def _moves(view: Checkpoint, dropped: Mapping[str, str]) -> list[Move]:
    moves = []
    for name, handle in view.tensors.items():
        if name in dropped:
            moves.append(drop(handle, dropped[name]))
        elif name == "mask_hidden" and len(handle.shape) == 2:
            moves.append(Move("reshape", (handle.name,), name, handle.dtype, (1, *handle.shape)))
        else:
            moves.append(copy(handle, name))
    return moves


IDS = "eagle_aux_hidden_state_layer_ids"
NESTED_IDS = f"eagle_config.{IDS}"
PARALLEL_HEADS = {"parallel_draft_heads_num_layers", "parallel_draft_step"}


class EagleConfig(NamedTuple):
    """The nested `eagle_config` of ModelOpt, SpecForge and their descendants.

    `layer_ids`: as stated, numbering layer outputs. The norms are those of layer 0's hidden state and of the output;
    `paired_norms` those of embedding and hidden state before EAGLE-1's `fc`. None: not stated.
    """

    layer_ids: object
    use_aux_hidden_state: bool
    norm_before_fc: bool
    first_norm: bool | None
    last_norm: bool | None
    paired_norms: bool | None


def read_eagle_config(facts: Facts) -> EagleConfig:
    """The nested `eagle_config`. Raises `FormatError` for keys whose effect is unknown."""
    nested = facts.mapping("eagle_config") or {}
    if facts.optional("next_layer_regular", bool, inside=nested) is False:
        raise FormatError("eagle_config.next_layer_regular is false, a variant that no engine runs")
    nested.pop("next_layer_regular", None)
    for key in sorted(PARALLEL_HEADS & nested.keys()):
        facts.dropped[f"eagle_config.{key}"] = "their tensors, where there are any, are dropped with a reason"
        del nested[key]
    flags = {
        key: facts.optional(key, bool, inside=nested)
        for key in (
            "use_aux_hidden_state",
            "norm_before_fc",
            "use_input_layernorm_in_first_layer",
            "use_last_layernorm",
            "use_mtp_layernorm",
        )
    }
    layer_ids = nested.pop(IDS, None)
    if layer_ids and flags["use_aux_hidden_state"] is False:
        raise FormatError(f"{NESTED_IDS} is {layer_ids!r}, and use_aux_hidden_state is false")
    facts.refuse_unknown({f"eagle_config.{key}": value for key, value in nested.items() if key not in flags})
    return EagleConfig(
        layer_ids=layer_ids or None,
        use_aux_hidden_state=flags["use_aux_hidden_state"] is not False,
        norm_before_fc=flags["norm_before_fc"] is True,
        first_norm=flags["use_input_layernorm_in_first_layer"],
        last_norm=flags["use_last_layernorm"],
        paired_norms=flags["use_mtp_layernorm"],
    )


def read_aux_layer_ids(
    view: Checkpoint, facts: Facts, target: TargetFacts | None, target_hidden: int, nested: EagleConfig
) -> tuple[int, ...] | None:
    """The captured layers in convention S; None when the draft reads the last hidden state, or they are missing.

    The top-level key says it in convention S; the nested one numbers layer *outputs*, one less. Without either, the
    reference's 2, N//2, N−3 of the target hold.
    """
    top = facts.integers(IDS)
    facts.drop("num_aux_hidden_states", "the columns of fc tell")
    facts.drop("num_aux_layers", "the columns of fc tell")
    if not nested.use_aux_hidden_state:
        facts.record("aux_layer_ids", "None", "stated", "use_aux_hidden_state is false: the last hidden state")
        return None
    _, columns = view.matrix("fc.weight")
    count, rest = divmod(columns, target_hidden)
    if rest or not count:
        raise FormatError(
            f"fc.weight has {columns} columns, no multiple of the target's width {target_hidden}",
            where=view.source.path,
            hint="target_hidden_size in config.json may be missing or wrong",
        )
    if top is not None:
        ids: tuple[int, ...] | None = top
        facts.record("aux_layer_ids", str(list(top)), "stated", key=IDS)
    elif nested.layer_ids is not None:
        ids = _nested_ids(facts, target, nested)
    elif target is not None and count == 3:
        ids = _default_ids(view, facts, target)
    else:
        hint = (
            f"fc.weight has {columns} columns, {count} states of {target_hidden}: pass --set aux_layer_ids= with "
            f"{count} layers, or correct target_hidden_size"
        )
        hint = "pass --target, so that they can be computed from its number of layers" if count == 3 else hint
        given = facts.require("aux_layer_ids", hint)
        given = [given] if isinstance(given, int) else given
        ids = None if given is None else facts.as_integers("aux_layer_ids", given)
    if ids is not None and len(ids) != count:
        raise FormatError(
            f"{len(ids)} captured layers are named, {list(ids)}, and fc.weight reads {count}",
            where=view.source.path,
            hint="set the right ones with --set aux_layer_ids=…",
        )
    return ids


def _nested_ids(facts: Facts, target: TargetFacts | None, nested: EagleConfig) -> tuple[int, ...]:
    """The states after the layers whose outputs `eagle_config` numbers.

    Some NVIDIA files number states there (sgl-project/sglang #32334), which an output beyond the last layer gives away.
    """
    said = facts.as_integers(NESTED_IDS, nested.layer_ids)
    if target is not None and max(said) == target.num_hidden_layers:
        note = f"eagle_config says {list(said)}: states, as layer {max(said)} has no output"
        facts.record("aux_layer_ids", str(list(said)), "stated", note, NESTED_IDS)
        return said
    ids = tuple(i + 1 for i in said)
    note = f"eagle_config says {list(said)}: layer outputs"
    facts.record("aux_layer_ids", str(list(ids)), "stated", note, NESTED_IDS)
    return ids


def _default_ids(view: Checkpoint, facts: Facts, target: TargetFacts) -> tuple[int, ...]:
    ids = target.default_aux_layer_ids()
    if list(ids) != sorted(set(ids)):
        raise TargetError(
            f"{target.name} has {target.num_hidden_layers} layers, too few for the three that EAGLE-3 captures",
            where=view.source.path,
            expected="at least 7",
            hint="pass the target that the draft was trained for with --target",
        )
    facts.record("aux_layer_ids", str(list(ids)), "from target", f"2, N//2, N-3 for N = {target.num_hidden_layers}")
    return ids
