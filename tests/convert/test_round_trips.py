"""Every fact that goes out comes back: each destination's files, read again, give the draft that was written.

What a destination cannot say is refused or among the losses; what it says otherwise computes the same.
"""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints import pico
from fixtures.checkpoints.published.checkpoint import randoms
from fixtures.checkpoints.published.eagle3 import YARN
from fixtures.checkpoints.published.layers import VD, H, V
from fixtures.checkpoints.unified import write_unified
from safetensors.torch import save_file

from draftkit.convert.api import convert_checkpoint, plan_conversion
from draftkit.convert.destinations import GGUF, destinations
from draftkit.engines.vllm.accepts import refusal_by_vllm
from draftkit.errors import LayoutError
from draftkit.layout.architecture import Architecture, ParallelDrafting, Rope
from draftkit.layout.block import BlockConvolution
from draftkit.layout.decoder import Decoder
from draftkit.layout.families.causal_lm import CausalLMSpec, TargetFeatures
from draftkit.layout.families.dflash import CandidateSelector, DFlashSpec, MarkovHead
from draftkit.layout.families.eagle import EagleSpec
from draftkit.layout.families.mlp_speculator import MlpSpeculatorSpec
from draftkit.layout.folder import Draft, is_unified, read_draft
from draftkit.layout.spec import DraftSpec

MASK = ParallelDrafting(mask_token_id=7, mask_state=True)
LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": V, "hidden_size": H,
    "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "dtype": "float16", "torch_dtype": "float16",
}  # fmt: skip
N = pico.llama_config().num_hidden_layers
DFLASH = DFlashSpec(
    decoder=replace(pico.EAGLE3_SPEC.decoder, num_hidden_layers=2, qk_norm=True),
    vocab_size=V, draft_vocab_size=V, target_hidden_size=H, aux_layer_ids=(2, 5, 7), last_state="before_norm",
    slots="fill-in", block_size=5, parallel=ParallelDrafting(mask_token_id=7, mask_state=False), causal_layers=(),
    window_rule="row", embed_tokens="target", lm_head="target", mask_embedding=False, attention_sinks=False,
    value_scale=1.0, markov=None, confidence="none", convolution=None, selector=None, embedding_scale=1.0,
    logit_scale=1.0, logit_softcap=0.0,
)  # fmt: skip
MARKOV = MarkovHead(markov_type="vanilla", markov_rank=8)
BASES: dict[str, Architecture] = {
    "eagle": pico.EAGLE_SPEC,
    "eagle3": pico.EAGLE3_SPEC,
    "p-eagle": replace(pico.EAGLE3_SPEC, parallel=MASK, embed_tokens="draft"),
    "draft-model": CausalLMSpec(config=LLAMA, vocab_size=V, parallel=None, target_features=None),
    "pard": CausalLMSpec(config=LLAMA, vocab_size=V, parallel=replace(MASK, mask_state=False), target_features=None),
    "pard-2": CausalLMSpec(
        config=LLAMA, vocab_size=V, parallel=replace(MASK, mask_state=False),
        target_features=TargetFeatures(layer_ids=(-1, 3), size=2 * H, scale=0.02, projection_bias=False),
    ),
    "mlp-speculator": MlpSpeculatorSpec(
        target_hidden_size=H, inner_size=32, vocab_size=V, num_heads=3, tied=False, scale_input=False,
        top_k_per_head=(5, 4, 3), num_candidates=5,
    ),
    "dflash": DFLASH,
    "dspark": replace(DFLASH, slots="anchor-first", markov=MARKOV, confidence="hidden_and_token"),
    "dflash2": replace(
        DFLASH, convolution=BlockConvolution(conv_taps=2, conv_group_size=16),
        selector=CandidateSelector(selector_rank=8, selector_top_k=4),
    ),
}  # fmt: skip
# Fact → other values than those above. `decoder.` and `rope.` name where a fact lies.
EAGLE_VALUES: dict[str, list[Any]] = {
    "decoder.intermediate_size": [32], "decoder.num_hidden_layers": [2], "decoder.num_key_value_heads": [4],
    "decoder.head_dim": [32], "decoder.hidden_act": ["gelu"], "decoder.rms_norm_eps": [1e-6],
    "decoder.qkv_bias": [True], "decoder.output_bias": [True], "decoder.mlp_bias": [True], "decoder.qk_norm": [True],
    "decoder.sliding_window": [64], "decoder.full_attention_layers": [(0,)], "decoder.sink_tokens": [4],
    "rope.base": [5e5], "rope.max_position_embeddings": [512],
    "rope.scaling": [
        {"rope_type": "linear", "factor": 2.0}, YARN,
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 256},
        {"rope_type": "default", "mrope_section": [4, 2, 2]},
    ],
    "draft_vocab_size": [VD, V], "aux_layer_ids": [(1, 3, 4), (2, 4), None], "fusion_bias": [True],
    "concatenation": ["hidden_embedding"], "feature_norm": ["joint", "per_layer"], "embedding_norm": [True, False],
    "hidden_norm": [True, False], "input_norm": [True], "norm_before_residual": [True], "final_norm": [True, False],
    "feedback": ["post_norm"], "logit_scale": [0.5], "embed_tokens": ["draft", "target"],
    "lm_head": ["draft", "target"], "parallel.mask_token_id": [9], "parallel.mask_state": [False],
}  # fmt: skip
BLOCK_VALUES: dict[str, list[Any]] = {
    name: values for name, values in EAGLE_VALUES.items() if name.startswith(("decoder.", "rope."))
} | {
    "decoder.num_hidden_layers": [3], "decoder.qk_norm": [False], "aux_layer_ids": [(0, 3), (1, 8)],
    "slots": ["fill-in", "anchor-first"], "block_size": [9], "parallel.mask_token_id": [9],
    "causal_layers": [(0, 1), (0,)], "mask_embedding": [True], "attention_sinks": [True], "value_scale": [0.5],
    "markov": [None, MARKOV, replace(MARKOV, markov_type="gated"), replace(MARKOV, markov_type="rnn", markov_rank=4)],
    "confidence": ["none", "hidden", "hidden_and_token"], "convolution": [None],
    "convolution.conv_taps": [3], "convolution.conv_group_size": [8], "selector": [None],
    "selector.selector_rank": [4], "selector.selector_top_k": [2], "embedding_scale": [2.0], "logit_scale": [0.5],
    "logit_softcap": [30.0], "embed_tokens": ["draft"], "lm_head": ["draft"],
}  # fmt: skip
WINDOWS = {"sliding_window": 8}
# Facts that make a draft only together, of each base that is a block drafter.
TOGETHER: dict[str, dict[str, Any]] = {
    "fewer tokens": {"draft_vocab_size": VD, "lm_head": "draft"},
    "the last state after the norm": {"aux_layer_ids": (1, N), "last_state": "after_norm"},
    "the last state before the norm": {"aux_layer_ids": (1, N)},
    "windows, causal": {"decoder": WINDOWS, "causal_layers": (0, 1)},
    "windows and first tokens": {"decoder": WINDOWS | {"sink_tokens": 4}},
    "windows of the anchor": {"decoder": WINDOWS, "causal_layers": (0, 1), "window_rule": "anchor"},
    "a window in one layer": {"decoder": WINDOWS | {"full_attention_layers": (1,)}},
    "a causal window in one layer": {"decoder": WINDOWS | {"full_attention_layers": (1,)}, "causal_layers": (0,)},
    "causal, a window in one layer": {"decoder": WINDOWS | {"full_attention_layers": (1,)}, "causal_layers": (0, 1)},
}
# The sizes that the target and the tensors share, and what makes one method another.
FIXED = {
    "decoder.hidden_size", "decoder.num_attention_heads", "decoder.rope", "rope.declared_base", "decoder", "vocab_size",
    "target_hidden_size", "token_entry", "parallel",
}  # fmt: skip
VALUES: dict[str, dict[str, list[Any]]] = dict.fromkeys(("dflash", "dspark", "dflash2"), BLOCK_VALUES) | {
    "draft-model": {"head_ids": [(1, 5, 8)], "sliding_window": [8]},
    "pard": {"head_ids": [(1, 5, 8)], "parallel.mask_token_id": [9], "sliding_window": [8]},
    "pard-2": {
        "parallel.mask_token_id": [9], "target_features.layer_ids": [(-1, -2)], "target_features.scale": [0.5],
        "target_features.projection_bias": [True],
    },
    "mlp-speculator": {
        "inner_size": [H], "num_heads": [2], "tied": [True], "scale_input": [True], "top_k_per_head": [(1, 1, 1)],
        "num_candidates": [2],
    },
}  # fmt: skip


def changed(architecture: Any, path: str, value: Any) -> Any:
    """The architecture with another value of one fact."""
    holder, _, name = path.rpartition(".")
    if holder == "rope":
        return changed(architecture, "decoder.rope", replace(architecture.decoder.rope, **{name: value}))
    if holder:
        value = replace(getattr(architecture, holder), **{name: value})
    return replace(architecture, **{holder or name: value})


def test_the_values_are_of_every_fact_of_the_eagle_family() -> None:
    named = {f.name for f in fields(EagleSpec)} | {f"decoder.{f.name}" for f in fields(Decoder)}
    named |= {f"rope.{f.name}" for f in fields(Rope)} | {f"parallel.{f.name}" for f in fields(ParallelDrafting)}
    assert named - FIXED == EAGLE_VALUES.keys()


def test_the_values_are_of_every_fact_of_block_drafters() -> None:
    parts = {"decoder": Decoder, "rope": Rope, "parallel": ParallelDrafting, "convolution": BlockConvolution}
    named = {f.name for f in fields(DFlashSpec)}
    named |= {f"{part}.{f.name}" for part, kind in parts.items() for f in fields(kind)}
    named |= {f"selector.{f.name}" for f in fields(CandidateSelector)}
    together = {name for facts in TOGETHER.values() for name in facts}
    assert named - FIXED - {"parallel.mask_state"} == BLOCK_VALUES.keys() | together - {"decoder"}


def _drafts() -> dict[str, Architecture]:
    """The drafts to send round: every method as it is, and with each fact changed."""
    found = dict(BASES)
    decoder = replace(pico.EAGLE3_SPEC.decoder, num_hidden_layers=2, sliding_window=64, full_attention_layers=(1,))
    found["eagle3, a window in one layer"] = replace(pico.EAGLE3_SPEC, decoder=decoder)
    found["eagle3, that and first tokens"] = replace(pico.EAGLE3_SPEC, decoder=replace(decoder, sink_tokens=4))
    for method, base in BASES.items():
        if isinstance(base, DFlashSpec):
            for name, facts in TOGETHER.items():
                decoder = replace(base.decoder, **facts.get("decoder", {}))
                found[f"{method}, {name}"] = replace(base, **facts | {"decoder": decoder})
        for path, values in VALUES.get(method, EAGLE_VALUES).items():
            holder, dot, _ = path.partition(".")
            if dot and holder != "rope" and getattr(base, holder, None) is None:
                continue
            for value in values:
                try:
                    other = changed(base, path, value)
                    DraftSpec(architecture=other, dtype="F16").tensors()
                except LayoutError:  # no such draft: the target's head over a reduced vocabulary
                    continue
                if path == "num_heads" and method == "mlp-speculator":
                    other = replace(other, top_k_per_head=(5,) * value)
                if other != base:
                    found[f"{method}, {path} {value}"] = other
    return found


DRAFTS = _drafts()


def spec_of(name: str) -> DraftSpec:
    return DraftSpec(architecture=DRAFTS[name], dtype="F16")


@pytest.fixture(scope="module")
def whole_target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The pico target with the two tensors that exporters copy."""
    folder = pico.save_target_config(tmp_path_factory.mktemp("target"))
    tables = {"model.embed_tokens.weight": (V, H), "lm_head.weight": (V, H)}
    save_file(randoms(tables, torch.float16, seed=5), folder / "model.safetensors")
    pico.save_tokenizer(folder, ("a", "b"))
    return str(folder)


BIASES = {"fusion_bias": r"^fc\.bias$", "qkv_bias": r"[qkv]_proj\.bias$", "output_bias": r"o_proj\.bias$"}


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Every draft as a unified folder, by name."""
    folder = tmp_path_factory.mktemp("sent")
    return {name: write_unified(folder / str(i), draft) for i, (name, draft) in enumerate(DRAFTS.items())}


def differences(before: DraftSpec, back: Draft) -> set[str]:
    """The facts that differ in effect.

    A copy of the target's table, a bias of zeros, feedback before or after a norm that is not there, and EAGLE-1's norm
    of layer 0 in an EAGLE-3 change nothing.
    """
    was, has = before.facts(), back.spec.facts()
    was, has = ({n: _compared(value) for n, value in facts.items()} for facts in (was, has))
    found = {name for name in was.keys() | has.keys() if was.get(name) != has.get(name)}
    copied = {name for name in found & {"embed_tokens", "lm_head"} if was[name] == "target" and name in has}
    zeros = {name for name in found & BIASES.keys() if has[name] and not _any(back, BIASES[name])}
    unread = {"feedback"} if was.get("final_norm") is False else set()
    unread |= {"input_norm"} if was.get("token_entry") == "attention" else set()
    return found - copied - zeros - unread


def _compared(value: object) -> object:
    """A config without the keys that state other facts."""
    if not isinstance(value, dict):
        return value
    return {k: v for k, v in value.items() if not ("pard" in k or "sliding_window" in k or k == "layer_types")}


def _any(draft: Draft, names: str) -> bool:
    return any(bool(tensor.load().any()) for name, tensor in draft.tensors.items() if re.search(names, name))


TAKEN = {
    "eagle": {"eagle", "sglang", "vllm"}, "eagle3": {"eagle", "gguf", "sglang", "speculators", "vllm"},
    "p-eagle": {"speculators", "vllm"}, "draft-model": {"gguf", "hf", "vllm"}, "pard": {"pard", "vllm"},
    "pard-2": {"pard"},
    "mlp-speculator": {"mlp-speculator"}, "dflash": {"dflash", "gguf", "speculators", "vllm"},
    "dspark": {"deepspec", "gguf", "speculators", "vllm"}, "dflash2": {"dflash", "gguf", "speculators", "vllm"},
}  # fmt: skip


FOLDED = {"fusion_bias"}  # `--to vllm` makes it part of the embedding: test_destinations.py


@pytest.mark.long
@pytest.mark.parametrize("destination", sorted(set(destinations()) - {"unified"}))
def test_every_fact_comes_back_or_is_said_to_be_lost(
    destination: str, sent: dict[str, str], whole_target: str, tmp_path: Path
) -> None:
    exact = set()
    for number, (name, source) in enumerate(sent.items()):
        to: dict[str, Any] = {"to": destination, "target": whole_target}
        try:
            losses = plan_conversion(source, **to).losses
            name_of_file = f"{number}.gguf" if destination == GGUF else str(number)
            out = convert_checkpoint(source, tmp_path / name_of_file, **to, allow_lossy=True)
        except LayoutError:
            continue
        back = read_draft(out) if is_unified(out) else plan_conversion(str(out), target=whole_target).require_draft()
        found = differences(spec_of(name), back) - (FOLDED if destination == "vllm" else set())
        assert found <= {loss.partition(" is ")[0] for loss in losses}, name
        if not losses:
            exact.add(name)
    assert exact & BASES.keys() == {name for name, taken in TAKEN.items() if destination in taken}


@pytest.mark.slow
def test_what_vllm_reads_of_a_unified_draft_is_the_draft(sent: dict[str, str], whole_target: str) -> None:
    """The keys beside the `draftkit` block say all of it, or the folder is marked so that vLLM refuses it."""
    read = set()
    for name, source in sent.items():
        if refusal_by_vllm(spec_of(name)) is not None:
            continue
        path = Path(source) / "config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps({key: value for key, value in config.items() if key != "draftkit"}))
        back = plan_conversion(source, target=whole_target).require_draft()
        path.write_text(json.dumps(config))
        # Readers of the layouts that the keys resemble take the last state after the norm; vLLM takes it before.
        assert differences(spec_of(name), back) <= {"head_ids", "last_state"}, name
        read.add(name)
    assert read & BASES.keys() == BASES.keys() - {"pard-2", "mlp-speculator"}
