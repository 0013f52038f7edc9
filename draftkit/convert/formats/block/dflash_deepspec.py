"""DSpark as DeepSpec trains and stores it, with its DFlash baseline, which has no Markov head (markov_rank 0).

All keys at the top, frozen copies of the target's embedding and head in the file; every row predicts, the anchor too.
NeMo Automodel writes the same. Source: deepseek-ai/DeepSpec `deepspec/modeling/dspark`.
"""

from __future__ import annotations

from dataclasses import replace

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.export import Export, Outgoing, kept, losses
from draftkit.convert.facts import Facts
from draftkit.convert.formats.block.dflash import plan_dflash
from draftkit.convert.formats.block.reading import BlockLayout, LastState, lift_nested
from draftkit.convert.formats.block.writing import last_state_at
from draftkit.convert.plan import Plan
from draftkit.errors import LayoutError
from draftkit.layout.families.dflash import DFlashSpec
from draftkit.layout.target import TargetFacts

NAME = "deepspec"
TITLE = "DSpark (DeepSpec layout)"
DESTINATION = "deepspec"
METHODS = ("dspark",)

TABLES = ("embed_tokens.weight", "lm_head.weight")  # frozen copies of the target's
ANCHORS = 512  # blocks of a sequence in training, without which DeepSpec's class does not load
LAYOUT = BlockLayout(NAME, slots="anchor-first", last_state="after_norm")
ARCHITECTURES = {"Qwen3DSparkModel", "DSparkDraftModel"}  # vLLM takes the second for the first beside Qwen3's layers


def recognize(checkpoint: Checkpoint) -> int:
    known = ARCHITECTURES & set(checkpoint.architectures) and "hidden_norm.weight" in checkpoint.tensors
    return 3 if known and "speculators_model_type" not in checkpoint.config else 0


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    lift_nested(facts)
    return plan_dflash(checkpoint, facts, target, LAYOUT)


def export(outgoing: Outgoing) -> Export:
    """Write the draft with copies of the target's embedding and head where the draft has none of its own."""
    draft = outgoing.draft.spec.architecture.expect(DFlashSpec)
    _refuse_inexpressible(outgoing, draft)
    runs = _deepspec_draft(draft, last_state_at(outgoing, draft, LAYOUT))
    moves = [*kept(outgoing, runs, {}, without=TABLES), *(outgoing.borrowed(name) for name in TABLES)]
    config = {
        "architectures": ["Qwen3DSparkModel"],
        **runs.body_config(),
        **draft.dspark_keys(),
        "num_anchors": ANCHORS,
        "dtype": outgoing.dtype,
    }
    if outgoing.target is not None:
        config["num_target_layers"] = outgoing.target.num_hidden_layers
    # The tables' owner is no loss: they hold the same.
    lost = losses(draft, replace(runs, embed_tokens=draft.embed_tokens, lm_head=draft.lm_head))
    return Export(config, tuple(moves), lost)


def _refuse_inexpressible(outgoing: Outgoing, draft: DFlashSpec) -> None:
    """Raise `LayoutError` for what no file in this layout can say."""
    obstacles = {
        "each row predicts the token after it, and the draft's fill in their own": draft.slots == "fill-in",
        "it has the whole vocabulary": draft.reduced_vocabulary,
    }
    if found := [reason for reason, holds in obstacles.items() if holds]:
        raise LayoutError(
            "DeepSpec's class is another: " + "; ".join(found),
            where=outgoing.draft.path,
            hint="use --to speculators or --to unified",
        )


def _deepspec_draft(draft: DFlashSpec, last_state: LastState) -> DFlashSpec:
    """The draft that DeepSpec's class makes of this one: it trains without windows, and rows see their whole block."""
    decoder = draft.decoder
    return replace(
        draft,
        decoder=replace(
            decoder,
            output_bias=decoder.qkv_bias,
            mlp_bias=False,
            qk_norm=True,
            sliding_window=None,
            full_attention_layers=(),
        ),
        target_hidden_size=decoder.hidden_size,
        last_state=last_state,
        causal_layers=(),
        window_rule="row",
        mask_embedding=False,
        attention_sinks=False,
        value_scale=1.0,
        embedding_scale=1.0,
        logit_scale=1.0,
        logit_softcap=0.0,
        embed_tokens="draft",
        lm_head="draft",
    )
