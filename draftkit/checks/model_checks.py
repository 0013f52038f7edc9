"""Checks of the target's weights on one document: what draftkit reads of the model is what the model computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftkit.checks.preflight import Evidence, Finding
from draftkit.layout.families.eagle import EagleSpec
from draftkit.models.target import FINAL, AuxLayers, Target
from draftkit.runtime.attention import NAME as ATTENTION
from draftkit.runtime.cache import SlotCache

MAX_TOKENS = 256  # of the document that is run
# How far two ways of computing the same may lie apart: the norm of the difference over that of the values.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}


class Reference(NamedTuple):
    """What transformers' eager attention computes: `states` n+1 times [1, T, H], the last after the norm; `logits`."""

    states: tuple[Tensor, ...]
    logits: Tensor


def aux_layers(evidence: Evidence) -> Iterator[Finding]:
    """The captured hidden states are those of transformers, and finite."""
    assert evidence.model is not None
    model, tokens = evidence.model, _tokens(evidence)
    ids = _aux_layer_ids(evidence, model)
    target = Target(model, AuxLayers((*ids, FINAL)))
    captured, logits = _captured(target, tokens)
    reference = _reference(model, tokens)
    names = [*(f"after {i} layers" for i in ids), "after the final norm", "logits"]
    mine = [*captured.split(target.hidden_size, dim=-1), logits]
    theirs = [*(reference.states[i] for i in ids), reference.states[-1], reference.logits]
    broken = [name for name, values in zip(names, mine, strict=True) if not values.isfinite().all()]
    if broken:
        yield Finding(
            "error",
            f"NaN or infinite values in the target's states: {', '.join(broken)}",
            f"{evidence.path}, {evidence.survey.first.id}",
            "the first step turns every weight of the draft into NaN",
            "--dtype bfloat16 or float32; float16 overflows in some targets",
        )
        return
    gaps = [_gap(own, other) for own, other in zip(mine, theirs, strict=True)]
    wrong = [f"{name}: {gap:.1e}" for name, gap in zip(names, gaps, strict=True) if gap > TOLERANCE[model.dtype]]
    if wrong:
        yield Finding(
            "error",
            f"captured states differ from those of transformers: {'; '.join(wrong)}",
            f"{evidence.target.name}, {type(model).__name__}",
            "the draft learns from other states than it gets in serving: high accuracy in training, acceptance near 1",
            "report this target; until then, train with hidden states from vLLM",
        )
        return
    yield Finding("ok", f"states after {', '.join(map(str, ids))} layers and logits agree to {max(gaps):.1e}")


def final_norm(evidence: Evidence) -> Iterator[Finding]:
    """The final norm multiplies by w or by 1 + w, and the head on it gives the logits."""
    assert evidence.model is not None
    model, tokens = evidence.model, _tokens(evidence)
    target = Target(model, AuxLayers((len(Target(model).layers), FINAL)))
    captured, logits = _captured(target, tokens)
    before, after = captured.split(target.hidden_size, dim=-1)
    with torch.inference_mode():
        head = model.get_output_embeddings()(after)
    kind = _norm_kind(model, before, after)
    if _gap(head, logits) > TOLERANCE[model.dtype]:
        yield Finding(
            "warning",
            "the head on the normed state is not the target's logits: the model scales or caps them afterwards",
            f"{evidence.target.name}, {type(model).__name__}",
            "a loss that recomputes the logits from stored states fits a distribution that the target never draws from",
            "train online, where the model's own logits are used",
        )
    if kind == "w":
        yield Finding("ok", "the final norm multiplies by its weight w")
    else:
        yield Finding(
            "note",
            f"the final norm multiplies by {kind}",
            f"{evidence.target.name}, {type(model).__name__}",
            "a trainer that applies w to stored states computes another distribution; draftkit uses the model's own "
            "norm",
            "keep to the model's own module in code of yours",
        )


def _norm_kind(model: PreTrainedModel, before: Tensor, after: Tensor) -> str:
    """What the normalized state is multiplied with, found by trying."""
    weight = getattr(getattr(model.get_decoder(), "norm", None), "weight", None)
    if weight is None:
        return "something that is no weight vector"
    epsilon = getattr(model.config.get_text_config(), "rms_norm_eps", 1e-6)
    plain = before.float() * (before.float().square().mean(-1, keepdim=True) + epsilon).rsqrt()
    kinds = {"w": plain * weight.float(), "1 + w": plain * (1 + weight.float())}
    best = min(kinds, key=lambda kind: _gap(kinds[kind], after))
    return best if _gap(kinds[best], after) <= TOLERANCE[model.dtype] else "neither w nor 1 + w"


def _tokens(evidence: Evidence) -> Tensor:
    """int64 [1, T]: the beginning of the first document."""
    assert evidence.model is not None
    tokens = torch.from_numpy(evidence.survey.first.tokens[:MAX_TOKENS].astype("int64"))
    return tokens[None].to(evidence.model.device)


def _aux_layer_ids(evidence: Evidence, model: PreTrainedModel) -> tuple[int, ...]:
    """The draft's layers, else those of EAGLE-3, as far as the target has them."""
    spec = evidence.draft.spec.architecture if evidence.draft is not None else None
    if isinstance(spec, EagleSpec) and spec.aux_layer_ids is not None:
        return spec.aux_layer_ids
    n = model.config.get_text_config().num_hidden_layers
    return tuple(sorted({i for i in (2, n // 2, n - 3) if 0 <= i < n}))


def _captured(target: Target, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Features [1, T, F] and logits [1, T, V] as draftkit reads them."""
    length = tokens.shape[1]
    positions = torch.arange(length, device=tokens.device)[None]
    rows = SlotCache(1, length).rows(torch.zeros_like(tokens[:, 0]), positions, length)
    output = target.forward(tokens, positions, rows)
    assert output.features is not None
    return output.features, output.logits


def _reference(model: PreTrainedModel, tokens: Tensor) -> Reference:
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            output = model(input_ids=tokens, use_cache=False, output_hidden_states=True)
    finally:
        model.set_attn_implementation(ATTENTION)
    return Reference(output.hidden_states, output.logits)


def _gap(mine: Tensor, theirs: Tensor) -> float:
    """The norm of the difference over that of the values."""
    return float((mine.float() - theirs.float()).norm() / theirs.float().norm().clamp(min=1e-12))
