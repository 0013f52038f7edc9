"""Checks before training that need the models: data, target and draft beside each other.

The target's weights are run on one sample: what draftkit reads of the model is what the model computes, in its own
runtime or, where that does not run the target, in transformers'. A draft that is to be trained on must speak its
vocabulary and turn positions as it does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from draftkit.checks.checkpoint import problems_of_map
from draftkit.checks.evidence import Data
from draftkit.checks.pair import share_vocabulary
from draftkit.checks.registry import check
from draftkit.convert.formats.vocabulary_map import mapped_tokens
from draftkit.data.states.online import AGREEMENT
from draftkit.data.states.online import final_norm as norm_of
from draftkit.finding import Finding
from draftkit.layout.architecture import Architecture
from draftkit.layout.folder import Draft
from draftkit.layout.target import default_aux_layer_ids
from draftkit.runtime.attention import NAME as ATTENTION
from draftkit.runtime.cache import SlotCache
from draftkit.targets.chat import load_tokenizer
from draftkit.targets.rope import left_out_of_drafts, said_of_plain_rope, target_rope
from draftkit.targets.states import FINAL, AuxLayers, TappedModel
from draftkit.targets.target import Target

GOOD_COVERAGE = 0.95  # the share of labels below which the missing part limits acceptance more than anything trained
MAX_TOKENS = 256  # how many tokens of the sample are run


class Reference(NamedTuple):
    """What transformers' eager attention computes: `states` by layers and `last`, after the norm, each [1, T, H];
    `logits` [1, T, V]."""

    states: list[Tensor]
    last: Tensor
    logits: Tensor


@check
def runtime(data: Data, refusal: str, model: PreTrainedModel | None = None) -> Iterator[Finding]:
    """What can be done with a target that draftkit's own runtime does not run."""
    name = data.target.name
    states = "train and data states run it in transformers" if model else "data states --vllm-python takes its states"
    yield Finding(
        "runtime",
        "note",
        f"draftkit's own engine does not run the target: {refusal}",
        name,
        "drafts for it are measured and its answers written by vLLM alone",
        f"{states}; draftkit eval --engine vllm; draftkit data regenerate --endpoint",
    )


@check
def aux_layers(data: Data, model: PreTrainedModel, architecture: Architecture | None = None) -> Iterator[Finding]:
    """The captured hidden states are those of transformers, and finite."""
    tokens, ids = _tokens(data, model), _aux_layer_ids(architecture, model)
    captured, logits = _captured(model, (*ids, FINAL), tokens)
    reference = _reference(model, tokens)
    names = [*(f"after {i} layers" for i in ids), "after the final norm", "logits"]
    mine = [*captured, logits]
    theirs = [*(reference.states[i] for i in ids), reference.last, reference.logits]
    broken = [name for name, values in zip(names, mine, strict=True) if not values.isfinite().all()]
    if broken:
        yield Finding(
            "aux-layers",
            "error",
            f"NaN or infinite values in the target's states: {', '.join(broken)}",
            f"{data.path}, {data.survey.first.id}",
            "the first step turns every weight of the draft into NaN",
            "--dtype bfloat16 or float32; float16 overflows in some targets",
        )
        return
    gaps = [_relative_difference(own, other) for own, other in zip(mine, theirs, strict=True)]
    wrong = [f"{name}: {gap:.1e}" for name, gap in zip(names, gaps, strict=True) if gap > AGREEMENT[model.dtype]]
    if wrong:
        yield Finding(
            "aux-layers",
            "error",
            f"captured states differ from those of transformers: {'; '.join(wrong)}",
            f"{data.target.name}, {type(model).__name__}",
            "the draft learns from other states than it gets in serving: high accuracy in training, acceptance near 1",
            "report this target; until then, train with hidden states from vLLM",
        )
        return
    yield Finding(
        "aux-layers", "ok", f"states after {', '.join(map(str, ids))} layers and logits agree to {max(gaps):.1e}"
    )


@check
def final_norm(data: Data, model: PreTrainedModel) -> Iterator[Finding]:
    """The final norm multiplies by w or by 1 + w, and the head on it gives the logits."""
    tokens = _tokens(data, model)
    (before, after), logits = _captured(model, (TappedModel(model).num_layers, FINAL), tokens)
    with torch.inference_mode():
        head = model.get_output_embeddings()(after)
    kind = _norm_kind(model, before, after)
    if _relative_difference(head, logits) > AGREEMENT[model.dtype]:
        yield Finding(
            "final-norm",
            "warning",
            "the head on the normed state is not the target's logits: the model scales or caps them afterwards",
            f"{data.target.name}, {type(model).__name__}",
            "a loss that recomputes the logits from stored states fits a distribution that the target never draws from",
            "train online, where the model's own logits are used",
        )
    if kind == "w":
        yield Finding("final-norm", "ok", "the final norm multiplies by its weight w")
    else:
        yield Finding(
            "final-norm",
            "note",
            f"the final norm multiplies by {kind}",
            f"{data.target.name}, {type(model).__name__}",
            "a trainer that applies w to stored states computes another distribution; draftkit uses the model's own "
            "norm",
            "in code of your own, call the model's norm module",
        )


def _norm_kind(model: PreTrainedModel, before: Tensor, after: Tensor) -> str:
    """The factor of a norm's output, w or 1 + w, found by trying both."""
    weight = getattr(norm_of(model), "weight", None)
    if weight is None:
        return "something that is no weight vector"
    epsilon = getattr(model.config.get_text_config(), "rms_norm_eps", 1e-6)
    plain = before.float() * (before.float().square().mean(-1, keepdim=True) + epsilon).rsqrt()
    kinds = {"w": plain * weight.float(), "1 + w": plain * (1 + weight.float())}
    best = min(kinds, key=lambda kind: _relative_difference(kinds[kind], after))
    return best if _relative_difference(kinds[best], after) <= AGREEMENT[model.dtype] else "neither w nor 1 + w"


def _tokens(data: Data, model: PreTrainedModel) -> Tensor:
    """int64 [1, T]: the beginning of the first sample."""
    tokens = torch.from_numpy(data.survey.first.tokens[:MAX_TOKENS].astype("int64"))
    return tokens[None].to(model.device)


def _aux_layer_ids(architecture: Architecture | None, model: PreTrainedModel) -> tuple[int, ...]:
    """The draft's layers, else those of EAGLE-3, as far as the target has them."""
    if architecture is not None and architecture.aux_layer_ids is not None:
        return architecture.aux_layer_ids
    n = model.config.get_text_config().num_hidden_layers
    return tuple(sorted({i for i in default_aux_layer_ids(n) if 0 <= i < n}))


def _captured(model: PreTrainedModel, states: tuple[int, ...], tokens: Tensor) -> tuple[list[Tensor], Tensor]:
    """The states, each [1, T, H], and logits [1, T, V] as draftkit reads them."""
    if model.config._attn_implementation == ATTENTION:
        length = tokens.shape[1]
        positions = torch.arange(length, device=tokens.device)[None]
        rows = SlotCache(1, length).rows(torch.zeros_like(tokens[:, 0]), positions, length, prompt=True)
        logits, features, _ = Target(model, AuxLayers(states)).forward(tokens, positions, rows)
    else:
        tapped = TappedModel(model, AuxLayers(states))
        with torch.inference_mode(), tapped.captured() as found:
            logits = model(input_ids=tokens, use_cache=False).logits
        features = tapped.features(found, tokens)
    assert features is not None
    return list(features.chunk(len(states), dim=-1)), logits


def _reference(model: PreTrainedModel, tokens: Tensor) -> Reference:
    own = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode(), TappedModel(model, AuxLayers((0,))).captured() as found:
            output = model(input_ids=tokens, use_cache=False, output_hidden_states=True)
    finally:
        model.set_attn_implementation(own)
    *states, last = output.hidden_states
    if not torch.equal(states[0], found[0]):  # Mamba's models begin with the state after the first layer
        states = [found[0], *states]
    return Reference(states, last, output.logits)


def _relative_difference(mine: Tensor, theirs: Tensor) -> float:
    """The norm of the difference over that of the values."""
    return float((mine.float() - theirs.float()).norm() / theirs.float().norm().clamp(min=1e-12))


@check
def vocabulary(data: Data, draft: Draft, draft_name: str) -> Iterator[Finding]:
    """Draft tokens are target tokens: the map of a reduced vocabulary, or the same tokenizer."""
    architecture = draft.spec.architecture
    if architecture.own_model:
        yield _same_tokenizer(data, draft, draft_name)
    elif architecture.vocab_size != data.vocab_size:
        yield Finding(
            "vocabulary",
            "error",
            f"the draft is for {architecture.vocab_size} target tokens; this target has {data.vocab_size}",
            draft_name,
            "its proposals are other tokens than it means: nothing is accepted",
            "train a draft of this target, or pass the target that the draft is for",
        )
    elif problems := list(problems_of_map(draft.tensors, data.vocab_size)):
        yield from (replace(problem, where=f"{draft_name}, {problem.where}") for problem in problems)
    elif "d2t" in draft.tensors:
        yield _coverage(data, mapped_tokens(draft.tensors["d2t"]))
    else:
        yield Finding("vocabulary", "ok", f"the draft proposes all of the target's {data.vocab_size} tokens")


def _coverage(data: Data, ids: Sequence[int]) -> Finding:
    """The share of the labels that the draft's vocabulary has."""
    uses = data.survey.uses
    share = float(uses[ids].sum() / max(uses.sum(), 1))
    text = f"the draft's {len(ids)} of {data.vocab_size} tokens are {share:.1%} of the labels"
    if share >= GOOD_COVERAGE:
        return Finding("vocabulary", "ok", text)
    return Finding(
        "vocabulary",
        "warning",
        text,
        str(data.path),
        f"{1 - share:.1%} of all tokens are never proposed, which bounds the acceptance rate at every position",
        "choose the draft's vocabulary from these data, or a larger one",
    )


def _same_tokenizer(data: Data, draft: Draft, draft_name: str) -> Finding:
    if share_vocabulary(draft, load_tokenizer(draft.path, "draft"), data.target.tokenizer, data.vocab_size):
        return Finding("vocabulary", "ok", "draft and target have the same tokenizer")
    return Finding(
        "vocabulary",
        "error",
        "draft and target have different tokenizers",
        draft_name,
        "the data's ids are other text to the draft; in serving it could only propose the tokens that both share",
        "transplant the target's vocabulary into the draft, or train a draft of the target's family",
    )


@check
def rope(draft: Draft, draft_name: str, target_config: PretrainedConfig) -> Iterator[Finding]:
    """The draft's rotary positions reach as far as the target's, and turn as they do."""
    mine = draft.spec.architecture.rope
    if mine is None:
        yield Finding("rope", "ok", f"a {draft.spec.method} draft has positions of its own, or none")
        return
    base, scaling = target_rope(target_config)
    if left_out := left_out_of_drafts(target_config):
        yield Finding("rope", "note", said_of_plain_rope(left_out))
    fine = True
    for name, own, theirs in (("base", mine.base, base), ("scaling", mine.scaling, scaling)):
        if own != theirs:
            fine = False
            yield Finding(
                "rope",
                "warning",
                f"the draft's rope {name} is {own}, the target's {theirs}",
                f"{draft_name}, config.json",
                "a draft that is served with other rotary positions than it was trained with accepts less, most of all "
                "in long text; trained and served with its own, it only reaches less far than the target",
                "take over the target's value unless the draft was trained with its own",
            )
    longest = target_config.get_text_config().max_position_embeddings
    if mine.max_position_embeddings < longest:
        fine = False
        yield Finding(
            "rope",
            "warning",
            f"the draft ends at position {mine.max_position_embeddings}, the target at {longest}",
            f"{draft_name}, config.json",
            f"engines clamp or stop drafting there: beyond {mine.max_position_embeddings} tokens drafting costs time "
            "and gains nothing",
            f"--set max_position_embeddings={longest} when converting",
        )
    if fine:
        yield Finding("rope", "ok", f"rope as the target's: base {base:g}, {longest} positions")
