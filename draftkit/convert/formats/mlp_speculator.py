"""IBM's MLP speculator, as fms-extras saves it through transformers.

`speculator.{emb,proj,ln,head}.{step}`; `ln0` of `scale_input` has no weights. With `tie_weights` the steps share all
but the first projection, and the file may hold the copies or not: loaders (fms, TGI, ArcticInference) take both.
Source: foundation-model-stack/fms-extras `fms_extras/models/speculator.py`, `models/hf/modeling_mlp_speculator.py`.
"""

from __future__ import annotations

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.export import Export, Outgoing
from draftkit.convert.facts import Facts
from draftkit.convert.operations import Move, copy, drop
from draftkit.convert.plan import Plan, common_dtype, make_plan
from draftkit.errors import FormatError
from draftkit.layout.families.mlp_speculator import MlpSpeculatorSpec
from draftkit.layout.spec import DraftSpec
from draftkit.layout.target import TargetFacts

NAME = "mlp-speculator"
TITLE = "MLP speculator (IBM, fms layout)"

DESTINATION = "mlp-speculator"
METHODS = ("mlp-speculator",)

DEFAULT = "default of the reference's config class"
# ArcticInference's own architectures, and tensors that only its LSTM has.
ARCTIC = {
    "ArcticLSTMSpeculatorPreTrainedModel": "its steps are LSTM cells, which no other loader computes",
    "MLPVariantSpeculatorPreTrainedModel": "its steps may be LSTM cells or several layers deep",
    "ArcticMLPSpeculatorPreTrainedModel": "ArcticInference scores its heads in fp8, so that others draft other tokens",
}
LSTM_TENSORS = ("forget_emb.", "forget_proj.", "projs.", "cell_ln.")
ALL, NONE = "all", "none"  # which copies of tied weights a file holds; in between, their names


def recognize(checkpoint: Checkpoint) -> int:
    ours = any(name.startswith(("speculator.emb.", "speculator.head.")) for name in checkpoint.tensors)
    return 2 if ours or _arctic(checkpoint) else 0


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    if reason := _arctic(checkpoint):
        raise FormatError(
            f"this is a speculator of ArcticInference: {reason}",
            where=checkpoint.source.path,
            hint="serve it with ArcticInference: vLLM with method arctic",
        )
    hidden = facts.size("emb_dim", 4096, DEFAULT, "target_hidden_size")
    architecture = MlpSpeculatorSpec(
        target_hidden_size=hidden,
        inner_size=_inner_size(facts, hidden),
        vocab_size=facts.size("vocab_size", 32000, DEFAULT),
        num_heads=facts.size("n_predict", 3, DEFAULT, "num_heads"),
        tied=facts.stated_or("tie_weights", bool, False, DEFAULT, "tied"),
        scale_input=facts.stated_or("scale_input", bool, False, DEFAULT),
        top_k_per_head=_top_k(facts),
        num_candidates=facts.size("n_candidates", 5, DEFAULT, "num_candidates"),
    )
    _check_steps(checkpoint, architecture)
    if target is not None:
        checkpoint.check_target(target, hidden_size=hidden, vocab_size=architecture.vocab_size)
    spec = DraftSpec(architecture=architecture, dtype=common_dtype(checkpoint))
    return make_plan(NAME, checkpoint, facts, spec, _moves(checkpoint, facts, architecture))


def export(outgoing: Outgoing) -> Export:
    """Copies of tied weights are written where they came in, and for a draft of other origin: all loaders take them."""
    draft = outgoing.draft
    mlp = draft.spec.architecture.expect(MlpSpeculatorSpec)
    known = {fact.name: fact.value for fact in draft.provenance.facts}
    present = known.get("tied_copies", ALL)
    copies = {
        name: original for name, original in copies_of(mlp).items() if present == ALL or name in present.split(", ")
    }
    moves = outgoing.renamed({}) + [copy(draft.tensors[original], name) for name, original in copies.items()]
    return Export(config=draft.spec.engine_config(), moves=tuple(moves))


def copies_of(mlp: MlpSpeculatorSpec) -> dict[str, str]:
    """The name of every tensor that repeats another with tied weights → that other."""
    if not mlp.tied:
        return {}
    copies = {}
    for step in range(1, mlp.num_heads):
        for module in ("emb.{}.weight", "head.{}.weight", "ln.{}.weight", "ln.{}.bias"):
            copies[f"speculator.{module.format(step)}"] = f"speculator.{module.format(0)}"
    for step in range(2, mlp.num_heads):
        copies[f"speculator.proj.{step}.weight"] = "speculator.proj.1.weight"
    return copies


def _moves(checkpoint: Checkpoint, facts: Facts, mlp: MlpSpeculatorSpec) -> list[Move]:
    """One move for every weight, from all the copies of it, which are dropped."""
    copies = {name: original for name, original in copies_of(mlp).items() if name in checkpoint.tensors}
    if mlp.tied:
        present = ALL if len(copies) == len(copies_of(mlp)) else ", ".join(copies) or NONE
        facts.record("tied_copies", present, "from tensors", "the copies of shared weights that the file holds")
    repeats: dict[str, list[str]] = {}
    for name, original in copies.items():
        repeats.setdefault(original, []).append(name)
    moves = []
    for name, handle in checkpoint.tensors.items():
        if name in copies:
            moves.append(drop(handle, f"a copy of {copies[name]} (compared while that is read)"))
        elif name in repeats:
            moves.append(_merged(checkpoint, name, repeats[name]))
        else:
            moves.append(copy(handle))
    return moves


def _merged(checkpoint: Checkpoint, name: str, copies: list[str]) -> Move:
    handle = checkpoint.tensors[name]
    for other in (checkpoint.tensors[other] for other in copies):
        if (other.dtype, other.shape) != (handle.dtype, handle.shape):
            raise FormatError(
                f"tensor {other.name} is {other.dtype} {list(other.shape)}, and {name}, which tie_weights says it "
                f"repeats, {handle.dtype} {list(handle.shape)}",
                where=checkpoint.source.path,
            )
    return Move("merge_copies", (name, *copies), name, handle.dtype, handle.shape)


def _inner_size(facts: Facts, hidden: int) -> int:
    inner = facts.optional("inner_dim", int)
    if inner:
        return facts.size("inner_dim", hidden, fact="inner_size")
    facts.drop("inner_dim", "0 means emb_dim")
    return facts.record("inner_size", hidden, "format default", f"inner_dim is {inner}: emb_dim")


def _top_k(facts: Facts) -> tuple[int, ...]:
    stated = facts.integers("top_k_tokens_per_head")
    widths = (5, 4, 3) if stated is None else stated
    facts.record("top_k_per_head", str(list(widths)), "format default" if stated is None else "stated")
    return widths


def _check_steps(checkpoint: Checkpoint, mlp: MlpSpeculatorSpec) -> None:
    """Raise `FormatError` where the reference's classes would stop."""
    if len(mlp.top_k_per_head) != mlp.num_heads:
        raise FormatError(
            f"top_k_tokens_per_head has {len(mlp.top_k_per_head)} entries, n_predict is {mlp.num_heads}",
            where=checkpoint.config_path,
            expected="one entry for each step",
        )
    if mlp.tied and mlp.num_heads == 1:
        raise FormatError("tie_weights is true, and there is one step only", where=checkpoint.config_path)


def _arctic(checkpoint: Checkpoint) -> str | None:
    """Why only ArcticInference runs this speculator, or None."""
    if any(name.removeprefix("speculator.").startswith(LSTM_TENSORS) for name in checkpoint.tensors):
        return ARCTIC["ArcticLSTMSpeculatorPreTrainedModel"]
    return next((reason for name, reason in ARCTIC.items() if name in checkpoint.architectures), None)
