"""`--to vllm`: the unified layout of a draft that vLLM loads, made so where it can be done without loss."""

from __future__ import annotations

from dataclasses import replace

from draftkit.convert.export import Outgoing
from draftkit.convert.operations import Move, carry_out, copy
from draftkit.convert.target_tensors import PREFIX
from draftkit.engines.vllm.accepts import refusal_by_vllm
from draftkit.errors import LayoutError
from draftkit.layout.families.eagle import EagleSpec
from draftkit.layout.families.medusa import MedusaSpec
from draftkit.layout.folder import Draft
from draftkit.layout.provenance import FactOrigin
from draftkit.layout.spec import DraftSpec
from draftkit.layout.target import TargetFacts


def for_vllm(draft: Draft, target: TargetFacts | None) -> Draft:
    """The draft as vLLM 0.32 runs it. Raises `LayoutError` when there is no such draft.

    vLLM drops `fc.bias`, so it is folded into an embedding table of the draft's own: exact but for the rounding of the
    table's dtype. Medusa heads that borrow the target's head get a copy of it.
    """
    architecture = draft.spec.architecture
    reason = refusal_by_vllm(draft.spec)
    if reason is None:
        return draft
    if isinstance(architecture, MedusaSpec) and architecture.lm_head == "target":
        return _with_head(draft, architecture, target)
    if not (isinstance(architecture, EagleSpec) and architecture.fusion_bias and architecture.token_entry == "fusion"):
        raise LayoutError(f"vLLM 0.32 cannot run this draft: {reason}", where=draft.path, hint="use --to unified")
    spec = _without_bias(draft.spec, architecture)
    if remaining := refusal_by_vllm(spec):
        raise LayoutError(f"vLLM 0.32 cannot run this draft: {remaining}", where=draft.path, hint="use --to unified")
    own = architecture.embed_tokens == "draft"
    outgoing = Outgoing(draft, target, "vllm")
    table = outgoing.tensor("embed_tokens.weight" if own else PREFIX + "embed_tokens.weight")
    sources = {**draft.tensors, table.name: table}
    folded = (table.name, "fc.weight", "fc.bias")
    moves = [copy(tensor) for name, tensor in draft.tensors.items() if name not in ("embed_tokens.weight", "fc.bias")]
    moves.append(Move("fold_bias", folded, "embed_tokens.weight", table.dtype, table.shape))
    note = "fc.bias is folded into embed_tokens for vLLM"
    facts = [
        FactOrigin(name=name, value=value, origin="from tensors", note=note)
        for name, value in (("fusion_bias", "False"), ("embed_tokens", "draft"))
    ]
    others = (fact for fact in draft.provenance.facts if fact.name not in ("fusion_bias", "embed_tokens"))
    provenance = replace(draft.provenance, facts=(*others, *facts))
    return replace(draft, spec=spec, provenance=provenance, tensors=carry_out(moves, sources))


def remedy_for_vllm(spec: DraftSpec) -> str | None:
    """What `--to vllm` does so that vLLM runs a draft which it must not load as it is; None where it cannot."""
    match spec.architecture:
        case EagleSpec(fusion_bias=True) as eagle if refusal_by_vllm(_without_bias(spec, eagle)) is None:
            return "draftkit convert --to vllm folds fc.bias into the embedding"
        case MedusaSpec(lm_head="target") as medusa if refusal_by_vllm(_sharing_head(spec, medusa)) is None:
            return "draftkit convert --to vllm copies the target's head"
    return None


def _without_bias(spec: DraftSpec, eagle: EagleSpec) -> DraftSpec:
    return replace(spec, architecture=replace(eagle, fusion_bias=False, embed_tokens="draft"))


def _sharing_head(spec: DraftSpec, medusa: MedusaSpec) -> DraftSpec:
    return replace(spec, architecture=replace(medusa, lm_head="shared"))


def _with_head(draft: Draft, medusa: MedusaSpec, target: TargetFacts | None) -> Draft:
    """Medusa heads with a copy of the target's head."""
    head = Outgoing(draft, target, "vllm").tensor(PREFIX + "lm_head.weight")
    moves = [copy(tensor) for tensor in draft.tensors.values()]
    moves.append(Move("from_target", (head.name,), "lm_head.weight", head.dtype, head.shape))
    fact = FactOrigin(name="lm_head", value="shared", origin="from target", note="a copy of the target's, for vLLM")
    others = (other for other in draft.provenance.facts if other.name != fact.name)
    return replace(
        draft,
        spec=_sharing_head(draft.spec, medusa),
        provenance=replace(draft.provenance, facts=(*others, fact)),
        tensors=carry_out(moves, {**draft.tensors, head.name: head}),
    )
