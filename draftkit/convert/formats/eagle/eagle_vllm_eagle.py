"""EAGLE-1 as it was converted for the first engine of vLLM, V0.

SafeAILab's tensors with a copy of the target's head, under any of the prefixes that V0 stripped; the config nests the
original one in `model`. `token_map` numbers the target tokens of a reduced draft vocabulary; `add_para_norm`,
`skip_prenorm` and `skip_output_norm` state norms that EAGLE-1 does not have.
Source: vllm-project/vllm v0.9 `model_executor/models/eagle.py`.
"""

from __future__ import annotations

from dataclasses import replace

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.facts import Facts
from draftkit.convert.formats.decoder import has_bias, read_decoder
from draftkit.convert.formats.eagle.eagle import fusion_spec
from draftkit.convert.formats.eagle.reading import with_unified_names
from draftkit.convert.formats.vocabulary_map import read_vocabulary_map
from draftkit.convert.operations import Move, carry_out, copy, drop, integers
from draftkit.convert.plan import Plan, common_dtype, make_plan, renamed
from draftkit.errors import FormatError
from draftkit.layout.spec import DraftSpec
from draftkit.layout.target import TargetFacts

NAME = "vllm-eagle"
TITLE = "EAGLE-1 converted for vLLM V0"

PREFIXES = {"model.model.": "", "model.lm_head.": "lm_head.", "model.": ""}
INPUT_NORM, OUTPUT_NORM, HEAD = "layers.0.input_layernorm.weight", "norm.weight", "lm_head.weight"


def recognize(checkpoint: Checkpoint) -> int:
    """The nested config, or EAGLE-1 with a head."""
    if checkpoint.config.get("model_type") == "eagle" and isinstance(checkpoint.config.get("model"), dict):
        return 3
    fc = checkpoint.tensors["fc.weight"].shape if "fc.weight" in checkpoint.tensors else ()
    names = {renamed(name, PREFIXES) for name in checkpoint.tensors}
    fuses = len(fc) == 2 and fc[1] == 2 * fc[0] and {HEAD, "layers.0.self_attn.q_proj.weight"} <= names
    return int(fuses and not names & {"layers.0.hidden_norm.weight", INPUT_NORM})


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    if "model" in checkpoint.config:
        facts.lift("model")
    facts.drop("bias", "fc.bias itself tells")
    facts.drop("num_lookahead_tokens", "chosen when serving")
    view = with_unified_names(checkpoint, PREFIXES)
    decoder = read_decoder(view, facts, "layers.0.", view.count_layers())
    vocab_size = facts.size("vocab_size")
    if target is not None:
        checkpoint.check_target(target, hidden_size=decoder.hidden_size, vocab_size=vocab_size)
    truncated = facts.optional("truncated_vocab_size", int) or vocab_size
    draft_vocab_size = min(truncated, vocab_size)
    facts.record_from("truncated_vocab_size", {"draft_vocab_size": draft_vocab_size})
    for name in ("token_map", HEAD):
        if draft_vocab_size < vocab_size and name not in view.tensors:
            raise FormatError(f"truncated_vocab_size is {truncated}, and {name} is missing", where=view.source.path)
    paired = facts.optional("add_para_norm", bool) is True
    unused = {
        INPUT_NORM: facts.optional("skip_prenorm", bool) is not False,
        OUTPUT_NORM: facts.optional("skip_output_norm", bool) is not False,
        "token_map": draft_vocab_size == vocab_size,
    }
    _check_reduction(view, vocab_size, draft_vocab_size)
    moves = _moves(view, decoder.hidden_size, draft_vocab_size, {name for name, skipped in unused.items() if skipped})
    read_vocabulary_map(_with_offsets(view, moves), facts, vocab_size, draft_vocab_size)
    input_norm, final_norm = not unused[INPUT_NORM], not unused[OUTPUT_NORM]
    facts.record_from("add_para_norm", {"embedding_norm": paired, "hidden_norm": paired})
    facts.record_from("skip_prenorm", {"input_norm": input_norm})
    facts.record_from("skip_output_norm", {"final_norm": final_norm})
    facts.record("feedback", "post_norm" if final_norm else "pre_norm", "format default", "what V0 feeds back")
    for module in ("embed_tokens", "lm_head"):
        facts.record(module, "draft" if f"{module}.weight" in view.tensors else "target", "from tensors")
    architecture = fusion_spec(
        decoder,
        vocab_size,
        draft_vocab_size=draft_vocab_size,
        fusion_bias=has_bias(view, facts, "fusion_bias", "fc.bias", key="eagle_fc_bias"),
        embedding_norm=paired,
        hidden_norm=paired,
        input_norm=input_norm,
        final_norm=final_norm,
        feedback="post_norm" if final_norm else "pre_norm",
        logit_scale=facts.stated_or("logit_scale", float, 1.0, "none"),
        embed_tokens="draft" if "embed_tokens.weight" in view.tensors else "target",
        lm_head="draft" if HEAD in view.tensors else "target",
    )
    spec = DraftSpec(architecture=architecture, dtype=common_dtype(checkpoint))
    return make_plan(NAME, checkpoint, facts, spec, moves)


def _check_reduction(view: Checkpoint, vocab_size: int, draft_vocab_size: int) -> None:
    """Raise `FormatError` unless `token_map` names tokens of the target, and the head has rows for it or for all."""
    where = view.source.path
    if "token_map" in view.tensors:
        handle = view.tensors["token_map"]
        if handle.dtype not in ("I64", "I32") or len(handle.shape) != 1:
            raise FormatError(
                f"token_map is {handle.dtype} {list(handle.shape)}", where=where, expected="a list of I64"
            )
        outside = [index for index in integers(handle) if not 0 <= index < vocab_size]
        if outside:
            raise FormatError(f"token_map names token {outside[0]}, outside 0…{vocab_size - 1}", where=where)
    if HEAD in view.tensors and view.matrix(HEAD)[0] not in (draft_vocab_size, vocab_size):
        raise FormatError(
            f"{HEAD} has {view.matrix(HEAD)[0]} rows", where=where, expected=f"{draft_vocab_size} or {vocab_size}"
        )


def _moves(view: Checkpoint, hidden: int, draft_vocab_size: int, unused: set[str]) -> list[Move]:
    """`view` has the unified names, its handles those of the file."""
    moves = []
    for name, handle in view.tensors.items():
        if name in unused:
            moves.append(drop(handle, "config.json says that it is not applied"))
        elif name == "token_map":
            moves.append(Move("index_to_offset", (handle.name,), "d2t", "I64", handle.shape))
        elif name == HEAD and "token_map" in view.tensors and view.matrix(HEAD)[0] > draft_vocab_size:
            sources = (handle.name, view.tensors["token_map"].name)
            moves.append(Move("select_rows", sources, HEAD, handle.dtype, (draft_vocab_size, hidden)))
        else:
            moves.append(copy(handle, name))
    return moves


def _with_offsets(view: Checkpoint, moves: list[Move]) -> Checkpoint:
    """The checkpoint with `d2t` in place of `token_map`."""
    offsets = [move for move in moves if move.destination == "d2t"]
    return replace(view, tensors=view.tensors | carry_out(offsets, view.tensors))
