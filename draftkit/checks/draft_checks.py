"""Checks of a draft against its target: vocabulary map, tokenizer, rotary positions."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from draftkit.checks.preflight import Evidence, Finding
from draftkit.layout.families.causal_lm import CausalLMSpec
from draftkit.layout.families.eagle import EagleSpec
from draftkit.layout.families.medusa import MedusaSpec
from draftkit.layout.families.mlp_speculator import MlpSpeculatorSpec
from draftkit.models.chat import load_tokenizer
from draftkit.models.rope import target_rope
from draftkit.models.tokens import same_vocabulary

GOOD_COVERAGE = 0.95  # of the labels; below it the missing part limits acceptance more than anything trained


def vocabulary(evidence: Evidence) -> Iterator[Finding]:
    """Draft tokens are target tokens: the map d2t of a reduced vocabulary, or the same tokenizer."""
    assert evidence.draft is not None
    spec = evidence.draft.spec.architecture
    if spec.vocab_size != evidence.vocab_size and not isinstance(spec, CausalLMSpec):
        yield Finding(
            "error",
            f"the draft is for {spec.vocab_size} target tokens; this target has {evidence.vocab_size}",
            evidence.draft_name,
            "its proposals are other tokens than it means: nothing is accepted",
            "train a draft of this target, or pass the target that the draft is for",
        )
        return
    match spec:
        case EagleSpec(reduced_vocabulary=True):
            yield from _vocabulary_map(evidence)
        case CausalLMSpec():
            yield from _tokenizer(evidence, spec)
        case EagleSpec() | MedusaSpec() | MlpSpeculatorSpec():
            yield Finding("ok", f"the draft proposes all of the target's {spec.vocab_size} tokens")


def _vocabulary_map(evidence: Evidence) -> Iterator[Finding]:
    assert evidence.draft is not None
    d2t = evidence.draft.tensors["d2t"].load().numpy()
    ids = d2t + np.arange(len(d2t))
    inside = (ids >= 0) & (ids < evidence.vocab_size)
    problem = None
    if not inside.all():
        problem = f"d2t[{int(np.flatnonzero(~inside)[0])}] maps outside the target's {evidence.vocab_size} tokens"
    elif len(np.unique(ids)) < len(ids):
        problem = f"d2t maps {len(ids) - len(np.unique(ids))} draft tokens to a target token that another has"
    elif (np.diff(ids) < 0).any():
        problem = "d2t is not ascending"
    if problem is not None:
        yield Finding(
            "error",
            problem,
            f"{evidence.draft_name}, tensor d2t",
            "proposals are other tokens than the draft means: acceptance falls to nothing without an error",
            "fetch the draft again, or make the map anew from the data",
        )
        return
    yield _coverage(evidence, ids)


def _coverage(evidence: Evidence, ids: NDArray[np.int64]) -> Finding:
    """How many of the labels the draft can propose at all."""
    uses = evidence.survey.uses
    share = float(uses[ids].sum() / max(uses.sum(), 1))
    text = f"the draft's {len(ids)} of {evidence.vocab_size} tokens are {share:.1%} of the labels"
    if share >= GOOD_COVERAGE:
        return Finding("ok", text)
    return Finding(
        "warning",
        text,
        str(evidence.path),
        f"{1 - share:.1%} of all tokens are never proposed, which bounds the acceptance rate at every position",
        "choose the draft's vocabulary from these data, or a larger one",
    )


def _tokenizer(evidence: Evidence, spec: CausalLMSpec) -> Iterator[Finding]:
    assert evidence.draft is not None
    own = load_tokenizer(evidence.draft.path, "draft")
    if spec.vocab_size == evidence.vocab_size and same_vocabulary(evidence.target.tokenizer, own, evidence.vocab_size):
        yield Finding("ok", "draft and target have the same tokenizer")
        return
    yield Finding(
        "error",
        "draft and target have different tokenizers",
        evidence.draft_name,
        "the data's ids are other text to the draft; in serving it could only propose the tokens that both share",
        "transplant the target's vocabulary into the draft, or train a draft of the target's family",
    )


def rope(evidence: Evidence) -> Iterator[Finding]:
    """The draft's rotary positions reach as far as the target's, and turn as they do."""
    assert evidence.draft is not None
    eagle, text = evidence.draft.spec.architecture, evidence.config.get_text_config()
    if not isinstance(eagle, EagleSpec):
        yield Finding("ok", f"a {evidence.draft.spec.method} draft has positions of its own, or none")
        return
    base, scaling = target_rope(evidence.config)
    mine = eagle.decoder.rope
    fine = True
    for name, own, theirs in (("base", mine.base, base), ("scaling", mine.scaling, scaling)):
        if own != theirs:
            fine = False
            yield Finding(
                "warning",
                f"the draft's rope {name} is {own}, the target's {theirs}",
                f"{evidence.draft_name}, config.json",
                "positions that turn otherwise in serving than they did in training lose acceptance, more in longer "
                "text; trained and served with its own, the draft reaches less far than the target",
                "take over the target's value unless the draft was trained with its own",
            )
    longest = text.max_position_embeddings
    if mine.max_position_embeddings < longest:
        fine = False
        yield Finding(
            "warning",
            f"the draft ends at position {mine.max_position_embeddings}, the target at {longest}",
            f"{evidence.draft_name}, config.json",
            f"engines clamp or stop drafting there: beyond {mine.max_position_embeddings} tokens drafting costs time "
            "and gains nothing",
            f"--set max_position_embeddings={longest} when converting",
        )
    if fine:
        yield Finding("ok", f"rope as the target's: base {base:g}, {longest} positions")
