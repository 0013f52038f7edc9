"""EAGLE-3 as SafeAILab publishes it.

Tensors without prefix, the one decoder layer under `midlayer.`; `fc` over three captured target states; its own head
over a reduced vocabulary with `d2t` (offsets) and `t2d` (mask). The captured layers are not in the config: the
reference hard-codes 2, N//2 and N−3. Source: SafeAILab/EAGLE `eagle/model/cnets.py`, `modeling_llama_kv.py`.
"""

from __future__ import annotations

from typing import Literal

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.decoder import check_target, read_decoder
from draftkit.convert.facts import Facts
from draftkit.convert.plan import Plan, common_dtype, make_plan, rename
from draftkit.convert.vocabulary import check_vocabulary_map
from draftkit.errors import FormatError, TargetError
from draftkit.layout.spec import DraftSpec, EagleSpec
from draftkit.layout.target import TargetFacts

NAME = "eagle3"
TITLE = "EAGLE-3 (SafeAILab layout)"


def recognise(checkpoint: Checkpoint) -> bool:
    return "midlayer.hidden_norm.weight" in checkpoint.tensors and "mask_hidden" not in checkpoint.tensors


def plan(checkpoint: Checkpoint, target: TargetFacts | None) -> Plan:
    facts = Facts(checkpoint.config, checkpoint.source.path / "config.json")
    decoder = read_decoder(checkpoint, facts, "midlayer.", num_layers=1)
    vocab_size = facts.size("vocab_size")
    draft_vocab_size = facts.size("draft_vocab_size")
    target_hidden = facts.size("target_hidden_size", decoder.hidden_size, "absent means the draft's width")
    if target is not None:
        check_target(checkpoint, target, hidden_size=target_hidden, vocab_size=vocab_size)
    facts.drop("bias", "not used by this architecture")
    _check_captured_layers(checkpoint, target_hidden)
    aux_layer_ids = _aux_layer_ids(checkpoint, facts, target)
    check_vocabulary_map(checkpoint, vocab_size, draft_vocab_size)
    embed_tokens = _embedding_owner(checkpoint, decoder.hidden_size, target_hidden)
    facts.record("embed_tokens", embed_tokens, "from tensors")
    facts.record("norm_before_residual", False, "format default", "the residual is the hidden state before its norm")
    facts.record("feedback", "pre_norm", "format default")
    spec = None
    if aux_layer_ids is not None:
        architecture = EagleSpec(
            decoder=decoder,
            vocab_size=vocab_size,
            draft_vocab_size=draft_vocab_size,
            target_hidden_size=target_hidden,
            aux_layer_ids=aux_layer_ids,
            token_entry="attention",
            concatenation="embedding_hidden",
            fusion_bias=False,
            feature_norm="none",
            embedding_norm=True,
            hidden_norm=True,
            input_norm=False,
            norm_before_residual=False,
            final_norm=True,
            feedback="pre_norm",
            logit_scale=1.0,
            embed_tokens=embed_tokens,
            lm_head="draft",
            parallel=None,
        )
        spec = DraftSpec(architecture=architecture, dtype=common_dtype(checkpoint))
    return make_plan(
        NAME,
        checkpoint,
        facts,
        spec,
        rename(checkpoint, "midlayer.", "layers.0.", _dropped(vocab_size, draft_vocab_size)),
    )


def _check_captured_layers(checkpoint: Checkpoint, target_hidden: int) -> None:
    """The width of `fc` is that of the three captured states."""
    _, columns = checkpoint.matrix("fc.weight")
    if columns != 3 * target_hidden:
        raise FormatError(
            f"fc.weight has {columns} columns, and the target's states are {target_hidden} wide",
            where=checkpoint.source.path,
            expected=f"{3 * target_hidden}: this format captures three layers",
            hint="target_hidden_size in config.json may be missing or wrong",
        )


def _aux_layer_ids(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> tuple[int, ...] | None:
    if target is None:
        facts.lack(
            "the captured target layers", "pass --target, so that they can be computed from its number of layers"
        )
        return None
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


def _embedding_owner(checkpoint: Checkpoint, hidden: int, target_hidden: int) -> Literal["draft", "target"]:
    if "embed_tokens.weight" in checkpoint.tensors:
        return "draft"
    if hidden != target_hidden:
        raise FormatError(
            f"embed_tokens.weight is missing, and the target's table is {target_hidden} wide, not {hidden}",
            where=checkpoint.source.path,
        )
    return "target"


def _dropped(vocab_size: int, draft_vocab_size: int) -> dict[str, str]:
    dropped = {"t2d": "the mask follows from d2t (checked)"}
    if vocab_size == draft_vocab_size:
        dropped["d2t"] = "all zero: the draft has the whole vocabulary"
    return dropped
