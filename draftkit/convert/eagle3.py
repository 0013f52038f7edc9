"""Reading EAGLE-3 and P-EAGLE checkpoints with a flat config, which six trainers write with small differences.

A format module states its differences as a `Dialect`; names, shapes and knobs are shared (formats.md 5 to 8 and 10 in
the project's notes; SafeAILab/EAGLE `cnets.py`, vLLM `llama_eagle3.py`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, cast

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.decoder import RopeBase, check_target, read_decoder
from draftkit.convert.facts import Facts
from draftkit.convert.operations import Move, copy, drop
from draftkit.convert.plan import Plan, common_dtype, make_plan, renamed
from draftkit.convert.vocabulary import check_vocabulary_map
from draftkit.errors import FormatError, TargetError
from draftkit.layout.spec import DraftSpec, EagleSpec, ParallelDrafting
from draftkit.layout.target import TargetFacts

MASK_TOKEN_KEYS = ("mask_token_id", "ptd_token_id", "pard_token")  # the order in which vLLM looks them up
EMPTY = {"pard_token": -1}  # what a trainer writes that had none


@dataclass(frozen=True)
class Dialect:
    """What one trainer's files mean where the layouts share their names.

    - `name`: the format. `prefix`: of the first decoder layer's tensors; deeper ones are `layers.i.` in all.
    - `rope_base`: where the trainer takes the rope base from.
    - `norm_output`: what that key means. `feedback`: the next step gets the normed output (vLLM, speculators).
      `logits`: whether the head reads the normed output (SpecForge); the feedback is not normed in either case.
    - `residual_note`: why `norm_before_residual` is false where the config does not say.
    """

    name: str
    prefix: str
    rope_base: RopeBase = "reference"
    norm_output: Literal["feedback", "logits"] = "feedback"
    residual_note: str = "the residual is the hidden state before its norm"


def plan_eagle3(
    checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None, dialect: Dialect, dropped: dict[str, str]
) -> Plan:
    """Plan the conversion of an EAGLE-3-like checkpoint. `dropped`: tensors the trainer left that do nothing → why."""
    _refuse_mla(checkpoint, dialect.prefix)
    decoder = read_decoder(
        checkpoint, facts, dialect.prefix, _count_layers(checkpoint, dialect.prefix), dialect.rope_base
    )
    vocab_size = facts.size("vocab_size")
    draft_vocab_size = facts.size("draft_vocab_size", *_rows_of_head(checkpoint, vocab_size))
    target_hidden = facts.size("target_hidden_size", decoder.hidden_size, "absent means the draft's width")
    if target is not None:
        check_target(checkpoint, target, hidden_size=target_hidden, vocab_size=vocab_size)
    eagle_config = _EagleConfig(facts)
    aux_layer_ids = read_aux_layer_ids(checkpoint, facts, target, target_hidden, eagle_config)
    check_vocabulary_map(checkpoint, vocab_size, draft_vocab_size)
    feedback, final_norm = _output_norm(facts, dialect)
    parallel, knows_mask = read_mask(checkpoint, facts)
    architecture = None
    if knows_mask and aux_layer_ids != ():
        architecture = EagleSpec(
            decoder=decoder,
            vocab_size=vocab_size,
            draft_vocab_size=draft_vocab_size,
            target_hidden_size=target_hidden,
            aux_layer_ids=aux_layer_ids,
            token_entry="attention",
            concatenation="embedding_hidden",
            fusion_bias=False,
            feature_norm=read_feature_norm(checkpoint, facts, eagle_config.norm_before_fc),
            embedding_norm=True,
            hidden_norm=f"{dialect.prefix}hidden_norm.weight" in checkpoint.tensors,
            input_norm=False,
            norm_before_residual=facts.stated_or("norm_before_residual", bool, False, dialect.residual_note),
            final_norm=final_norm,
            feedback=feedback,
            logit_scale=facts.stated_or("logit_scale", float, 1.0, "none"),
            embed_tokens=_owner(checkpoint, facts, "embed_tokens", decoder.hidden_size == target_hidden),
            lm_head=_owner(checkpoint, facts, "lm_head", draft_vocab_size == vocab_size),
            parallel=parallel,
        )
    quantization = facts.mapping("quantization_config")
    facts.drop("bias", "not used by this architecture")
    spec = None
    if architecture is not None:
        spec = DraftSpec(architecture=architecture, dtype=common_dtype(checkpoint), quantization=quantization)
    reasons = dropped | _redundant(vocab_size, draft_vocab_size) | ({} if final_norm else {"norm.weight": "unused"})
    return make_plan(dialect.name, checkpoint, facts, spec, _moves(checkpoint, dialect.prefix, reasons))


class _EagleConfig:
    """The nested `eagle_config` of ModelOpt, SpecForge and their descendants; every key of it is looked at."""

    def __init__(self, facts: Facts):
        nested = facts.mapping("eagle_config") or {}
        self.layer_outputs = nested.pop("eagle_aux_hidden_state_layer_ids", None) or nested.pop("layer_ids", None)
        self.use_aux_hidden_state = nested.pop("use_aux_hidden_state", True) is not False
        self.norm_before_fc = nested.pop("norm_before_fc", None) is True
        for key in ("use_input_layernorm_in_first_layer", "use_last_layernorm", "next_layer_regular"):
            if nested.pop(key, True) is False:
                raise FormatError(f"eagle_config.{key} is false, a variant that no engine runs")
        for key in ("use_mtp_layernorm", "parallel_draft_heads_num_layers", "parallel_draft_step"):
            nested.pop(key, None)  # their tensors, where there are any, are dropped with a reason
        if nested:
            raise FormatError(f"eagle_config has keys whose effect is unknown: {', '.join(map(str, nested))}")


def read_aux_layer_ids(
    checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None, target_hidden: int, nested: _EagleConfig
) -> tuple[int, ...] | None:
    """The captured layers in convention S; None when the draft reads the last hidden state; () while unknown.

    The top-level key says it in convention S; the nested one numbers layer *outputs*, one less. Without either, the
    reference's 2, N//2, N−3 of the target hold.
    """
    top = facts.integers("eagle_aux_hidden_state_layer_ids")
    facts.drop("num_aux_hidden_states", "the columns of fc tell")
    facts.drop("num_aux_layers", "the columns of fc tell")
    if "fc.weight" not in checkpoint.tensors and not nested.use_aux_hidden_state:
        facts.record("aux_layer_ids", "none: the last hidden state", "stated", "use_aux_hidden_state is false")
        return None
    _, columns = checkpoint.matrix("fc.weight")
    count, rest = divmod(columns, target_hidden)
    if rest or not count:
        raise FormatError(
            f"fc.weight has {columns} columns, no multiple of the target's width {target_hidden}",
            where=checkpoint.source.path,
            hint="target_hidden_size in config.json may be missing or wrong",
        )
    if top is not None:
        ids = top
        facts.record("aux_layer_ids", str(list(ids)), "stated")
    elif nested.layer_outputs is not None:
        outputs = facts.as_integers("eagle_config.eagle_aux_hidden_state_layer_ids", nested.layer_outputs)
        ids = tuple(i + 1 for i in outputs)
        facts.record("aux_layer_ids", str(list(ids)), "stated", f"eagle_config says {list(outputs)}: layer outputs")
    elif target is not None and count == 3:
        ids = _default_ids(checkpoint, facts, target)
    else:
        hint = (
            f"fc.weight has {columns} columns, {count} states of {target_hidden}: pass --set aux_layer_ids= with "
            f"{count} layers, or correct target_hidden_size"
        )
        hint = "pass --target, so that they can be computed from its number of layers" if count == 3 else hint
        given = facts.require("aux_layer_ids", hint)
        ids = () if given is None else facts.as_integers("aux_layer_ids", given)
    if ids and len(ids) != count:
        raise FormatError(
            f"{len(ids)} captured layers are named, {list(ids)}, and fc.weight reads {count}",
            where=checkpoint.source.path,
            hint="set the right ones with --set aux_layer_ids=…",
        )
    return ids


def read_mask(checkpoint: Checkpoint, facts: Facts) -> tuple[ParallelDrafting | None, bool]:
    """Parallel drafting where the file has `mask_hidden`, and whether the mask token is known."""
    flag = facts.optional("parallel_drafting", bool)
    named = {key: facts.optional(key, int) for key in MASK_TOKEN_KEYS}
    if "mask_hidden" not in checkpoint.tensors:
        if flag:
            raise FormatError("parallel_drafting is true and there is no mask_hidden", where=checkpoint.source.path)
        return None, True
    token = next((value for key, value in named.items() if value is not None and value != EMPTY.get(key)), None)
    if token is not None:
        facts.record("mask_token_id", token, "stated")
        return ParallelDrafting(mask_token_id=token, mask_state=True), True
    given = facts.require("mask_token_id", "ask the author for the mask token and pass --set mask_token_id=…")
    if given is None:
        return None, False
    return ParallelDrafting(mask_token_id=facts.as_integers("mask_token_id", [given])[0], mask_state=True), True


def read_feature_norm(
    checkpoint: Checkpoint, facts: Facts, joint: bool = False
) -> Literal["none", "joint", "per_layer"]:
    """The norm before `fc`, which the tensors tell; the config must not contradict them."""
    joint = bool(facts.optional("norm_before_fc", bool)) or joint
    per_layer = bool(facts.optional("fc_norm", bool))
    found = {"joint": "input_norm.weight" in checkpoint.tensors, "per_layer": "fc_norm.0.weight" in checkpoint.tensors}
    for kind, said, tensor in (("joint", joint, "input_norm.weight"), ("per_layer", per_layer, "fc_norm.0.weight")):
        if said and not found[kind]:
            raise FormatError(
                f"config.json asks for a norm before fc, and {tensor} is missing",
                where=checkpoint.source.path,
                hint="a converter may have dropped it: fetch the original checkpoint",
            )
    if all(found.values()):
        raise FormatError("both input_norm and fc_norm are there", where=checkpoint.source.path)
    kind = next((kind for kind, there in found.items() if there), "none")
    return cast(Literal["none", "joint", "per_layer"], facts.record("feature_norm", kind, "from tensors"))


def _rows_of_head(checkpoint: Checkpoint, vocab_size: int) -> tuple[int, str]:
    """The size of the draft vocabulary where the config says nothing."""
    if "lm_head.weight" in checkpoint.tensors:
        return checkpoint.matrix("lm_head.weight")[0], "rows of lm_head.weight"
    return vocab_size, "the head is the target's"


def _output_norm(facts: Facts, dialect: Dialect) -> tuple[Literal["pre_norm", "post_norm"], bool]:
    """What is fed back, and whether there is a norm before the head."""
    said = facts.optional("norm_output", bool)
    if dialect.norm_output == "logits":
        note = "SpecForge's norm_output is about the head, and its feedback is the state before the norm"
        facts.record("feedback", "pre_norm", "format default", note)
        return "pre_norm", said is not False
    feedback: Literal["pre_norm", "post_norm"] = "post_norm" if said else "pre_norm"
    facts.record("feedback", feedback, "format default" if said is None else "stated")
    return feedback, True


def _owner(checkpoint: Checkpoint, facts: Facts, module: str, target_fits: bool) -> Literal["draft", "target"]:
    """Whose embedding or head the draft uses: its own where the file has one."""
    tensor = f"{module}.weight"
    if tensor not in checkpoint.tensors and not target_fits:
        raise FormatError(
            f"{tensor} is missing, and the target's has another shape than this draft needs",
            where=checkpoint.source.path,
            hint="ask the author for a file that holds it",
        )
    owner: Literal["draft", "target"] = "draft" if tensor in checkpoint.tensors else "target"
    facts.record(module, owner, "from tensors")
    return owner


def _default_ids(checkpoint: Checkpoint, facts: Facts, target: TargetFacts) -> tuple[int, ...]:
    ids = target.default_aux_layer_ids()
    if list(ids) != sorted(set(ids)):
        raise TargetError(
            f"{target.name} has {target.num_hidden_layers} layers, too few for the three that EAGLE-3 captures",
            where=checkpoint.source.path,
            expected="at least 7",
            hint="pass the target that the draft was trained for with --target",
        )
    facts.record("aux_layer_ids", str(list(ids)), "from target", f"2, N//2, N-3 for N = {target.num_hidden_layers}")
    return ids


def _count_layers(checkpoint: Checkpoint, prefix: str) -> int:
    """Layers by their tensor names; `midlayer.` is the first of them, beside deeper `layers.i.`."""
    numbered = {match[1] for name in checkpoint.tensors if (match := re.match(r"layers\.(\d+)\.", name))}
    return len(numbered | {"0"}) if prefix == "midlayer." else len(numbered)


def _refuse_mla(checkpoint: Checkpoint, prefix: str) -> None:
    if f"{prefix}self_attn.kv_a_proj_with_mqa.weight" in checkpoint.tensors:
        raise FormatError(
            "this EAGLE-3 draft has multi-head latent attention (DeepSeek), which the layout does not describe",
            where=checkpoint.source.path,
            hint="vLLM loads the checkpoint as it is, as Eagle3DeepseekV2ForCausalLM",
        )


def _redundant(vocab_size: int, draft_vocab_size: int) -> dict[str, str]:
    dropped = {"t2d": "the mask follows from d2t (checked)"}
    if vocab_size == draft_vocab_size:
        dropped["d2t"] = "all zero: the draft has the whole vocabulary"
    return dropped


def _moves(checkpoint: Checkpoint, prefix: str, dropped: dict[str, str]) -> list[Move]:
    moves = []
    for name, handle in checkpoint.tensors.items():
        if name in dropped:
            moves.append(drop(handle, dropped[name]))
        elif name == "mask_hidden" and len(handle.shape) == 2:
            moves.append(Move("reshape", (name,), name, handle.dtype, (1, *handle.shape)))
        else:
            moves.append(copy(handle, renamed(name, {prefix: "layers.0."})))
    return moves
