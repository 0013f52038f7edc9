"""Targets: transformers' families through draftkit's attention, hidden-state aux_layers, refusals, stale cache entries.

Every model is random and tiny; the reference is the same checkpoint loaded by transformers with eager attention.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints import pico
from fixtures.precision import LAYER, assert_close
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AttentionInterface,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.llama.modeling_llama import LlamaAttention

from draftkit.errors import DraftkitError, TargetError
from draftkit.models.eagle import EagleModel
from draftkit.requests import Request
from draftkit.runtime.architecture_check import Known
from draftkit.runtime.attention import NAME, slot_attention
from draftkit.runtime.cache import SlotCache
from draftkit.runtime.drafters.causal_lm import CausalLMDrafter
from draftkit.runtime.drafters.eagle import EagleDrafter
from draftkit.runtime.drafters.protocol import Committed, Draw, Proposal
from draftkit.runtime.engine import Engine
from draftkit.runtime.records import Generation
from draftkit.targets.footprint import footprint
from draftkit.targets.pretrained import model_class
from draftkit.targets.rope import Positions
from draftkit.targets.states import FINAL, AuxLayers, decoder_of
from draftkit.targets.target import Target, check_class, load_target

WINDOW = 8
LAYERS = 4
NEW_TOKENS = 24
SLIDING, FULL = "sliding_attention", "full_attention"

COMMON: dict[str, Any] = {
    "vocab_size": pico.VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # large, so that greedy decoding has clear winners
    "bos_token_id": 1,
    "eos_token_id": None,  # every generation runs to its length
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
EXPERTS = {"moe_intermediate_size": 48, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 24},
    "qwen3_moe": {**EXPERTS, "head_dim": 16},
    "mistral": {"sliding_window": WINDOW, "head_dim": 16},
    "mixtral": {**EXPERTS, "sliding_window": None, "head_dim": 16},
    "gemma2": {
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 10.0,
        "sliding_window": WINDOW,
        "layer_types": [SLIDING, FULL] * 2,
    },
    "gemma3_text": {"head_dim": 16, "sliding_window": WINDOW, "layer_types": [SLIDING, SLIDING, FULL, SLIDING]},
    "gemma4_text": {
        "head_dim": 16,
        "global_head_dim": 24,
        "sliding_window": WINDOW,
        "layer_types": [SLIDING, FULL] * 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": pico.VOCABULARY,
        "num_kv_shared_layers": 2,
    },
    "gpt_neox": {"initializer_range": 0.5},  # its final norm has another name
    "phi3": {"sliding_window": WINDOW, "original_max_position_embeddings": 512},
    "olmo2": {},
    "diffllama": {},  # attends twice in each layer
    "granite": {
        "attention_multiplier": 0.1,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 4.0,
    },
    "cohere2": {"sliding_window": WINDOW, "layer_types": [SLIDING, SLIDING, SLIDING, FULL], "logit_scale": 0.5},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0]},
    "afmoe": {**EXPERTS, "head_dim": 16, "sliding_window": WINDOW, "num_dense_layers": 1, "num_shared_experts": 1},
    "deepseek_v3": {**EXPERTS, **LATENT, "first_k_dense_replace": 1},
    "deepseek_v32": {
        **EXPERTS,
        **LATENT,
        "first_k_dense_replace": 1,
        "index_topk": WINDOW,
        "index_n_heads": 16,  # with fewer, scores may tie at zero
        "index_head_dim": 16,
    },
    "llama4_text": {
        **EXPERTS,
        "head_dim": 16,
        "intermediate_size_mlp": 96,
        "attention_chunk_size": WINDOW,
        "layer_types": ["chunked_attention", "chunked_attention", FULL, "chunked_attention"],
        "no_rope_layers": [1, 1, 0, 1],
        "floor_scale": WINDOW,  # from the eighth position on, queries of the layer without rope grow with it
        "attn_scale": 0.5,
    },
    "qwen2_5_vl": {
        "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}},
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "depth": 1,
            "num_heads": 2,
            "out_hidden_size": 64,
        },
    },
    "gpt_oss": {**EXPERTS, "head_dim": 16, "sliding_window": WINDOW, "layer_types": [SLIDING, FULL] * 2},
}


def config_of(family: str, **changes: Any) -> PretrainedConfig:
    """`changes` of a multi-modal one say under `text_config` what its language model has beside `COMMON`."""
    if "text_config" in changes:
        return CONFIG_MAPPING[family](**changes | {"text_config": COMMON | changes["text_config"]})
    return CONFIG_MAPPING[family](**(COMMON | changes))


def random_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return auto_class(config).from_config(config).eval().requires_grad_(False)


def auto_class(config: PretrainedConfig) -> Any:
    return AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText


def random_tokens(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(3, pico.VOCABULARY, (length,), generator=generator).tolist()


REQUESTS = [Request(str(n), tuple(random_tokens(n)), NEW_TOKENS) for n in (5, 14, 3, 9)]


def generate(
    model: PreTrainedModel, draft: PreTrainedModel | None = None, k: int = 0, num_slots: int = 3
) -> list[Generation]:
    drafter = None if draft is None else CausalLMDrafter(Target(draft))
    return Engine(Target(model), drafter, num_speculative_tokens=k, num_slots=num_slots).generate(REQUESTS)


def prefill(target: Target, prompts: list[list[int]]) -> SlotCache:
    """A cache that holds prompt b in slot 2b, and nothing in the slots between."""
    cache = SlotCache(2 * len(prompts), 64)
    for number, prompt in enumerate(prompts):
        tokens = torch.tensor([prompt])
        positions = torch.arange(len(prompt))[None]
        target.forward(tokens, positions, cache.rows(torch.tensor([2 * number]), positions, len(prompt)))
    return cache


@dataclass(frozen=True)
class Family:
    """One checkpoint twice: run by draftkit's attention function and, as the reference, by transformers' own."""

    name: str
    model: PreTrainedModel
    reference: PreTrainedModel
    output: list[list[int]]


def load_family(name: str, folder: Path) -> Family:
    config = config_of(name, **FAMILIES[name])
    random_model(config).save_pretrained(folder)
    model = load_target(folder, device="cpu", dtype=torch.float32, attention=NAME)
    reference = auto_class(config).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    output = []
    for request in REQUESTS:
        prompt = torch.tensor([request.prompt])
        ids = reference.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=NEW_TOKENS
        )
        output.append(ids[0, prompt.shape[1] :].tolist())
    return Family(name, model, reference, output)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return load_family(request.param, tmp_path_factory.mktemp(request.param))


# The families


@pytest.mark.slow
@pytest.mark.few(5)
@pytest.mark.parametrize("num_slots", [1, 3])
def test_generation_equals_transformers(family: Family, num_slots: int) -> None:
    assert all(len(set(tokens)) > NEW_TOKENS // 4 for tokens in family.output), "the reference only repeats itself"
    assert [g.tokens for g in generate(family.model, num_slots=num_slots)] == family.output


@pytest.mark.slow
@pytest.mark.few(4)
def test_own_draft_accepts_everything(family: Family) -> None:
    generations = generate(family.model, family.model, k=3)
    assert [g.tokens for g in generations] == family.output
    assert {r.accepted for g in generations for r in g.rounds} == {3}


@pytest.mark.slow
def test_entries_after_rejections_are_those_of_a_fresh_prefill(family: Family) -> None:
    """Keys and values, latents and what indexers compare."""
    texts = [[*request.prompt, *tokens] for request, tokens in zip(REQUESTS, family.output, strict=True)]
    target = Target(family.model)
    run = Engine(target, Known(texts), num_speculative_tokens=3, num_slots=len(texts))
    rounds = [r for generation in run.generate(REQUESTS) for r in generation.rounds]
    assert {r.accepted for r in rounds} == {0, 1, 2, 3}
    for slot, text in enumerate(texts):
        fresh, known = SlotCache(1, len(text)), torch.tensor([text[:-1]])
        positions = torch.arange(known.shape[1])[None]
        target.forward(known, positions, fresh.rows(positions[0, :1], positions, len(text), prompt=True))
        assert run._cache.layers.keys() == fresh.layers.keys()
        for name, pools in fresh.layers.items():
            kept, wanted = torch.cat(run._cache.layers[name], dim=-1), torch.cat(pools, dim=-1)
            read = slice(0, known.shape[1])
            assert_close(kept[slot, :, read], wanted[0, :, read], depth=LAYERS * LAYER + 1)


def verify_logits(model: PreTrainedModel, sequences: list[list[int]], rows: int) -> Tensor:
    """Logits [B, rows, V] of the last rows of sequences, after a prefill of what comes before."""
    target = Target(model)
    cache = prefill(target, [sequence[:-rows] for sequence in sequences])
    tokens = torch.tensor([sequence[-rows:] for sequence in sequences])
    starts = torch.tensor([len(sequence) - rows for sequence in sequences])
    positions = starts[:, None] + torch.arange(rows)
    slots = 2 * torch.arange(len(sequences))
    return target.forward(tokens, positions, cache.rows(slots, positions, max(map(len, sequences)))).logits


def reference_logits(model: PreTrainedModel, sequences: list[list[int]], rows: int) -> Tensor:
    return torch.cat([model(torch.tensor([sequence])).logits[:, -rows:] for sequence in sequences])


SEQUENCES = [random_tokens(15), random_tokens(29)]


@pytest.mark.slow
def test_verify_rows_equal_a_plain_forward(family: Family) -> None:
    actual = verify_logits(family.model, SEQUENCES, rows=4)
    expected = reference_logits(family.reference, SEQUENCES, rows=4)
    assert expected.std() > 0.1
    assert_close(actual, expected, depth=LAYERS * LAYER + 1)


# Hidden states


def final_norm(decoder: nn.Module) -> nn.Module:
    return decoder.get_submodule("norm" if hasattr(decoder, "norm") else "final_layer_norm")


@pytest.mark.slow
def test_taps_equal_hidden_states(family: Family) -> None:
    ids = (0, 1, LAYERS // 2, LAYERS - 1, LAYERS)
    tokens = torch.tensor([random_tokens(20)])
    inputs: list[Tensor] = []
    hook = final_norm(decoder_of(family.reference)).register_forward_pre_hook(lambda _m, a: inputs.append(a[0]))
    hidden = family.reference(tokens, output_hidden_states=True).hidden_states
    hook.remove()
    states = [*hidden[:-1], inputs[0]]

    for aux_layers, expected in (
        (AuxLayers(ids), [states[i] for i in ids]),
        (AuxLayers((FINAL,)), [hidden[-1]]),
        (AuxLayers((FINAL, LAYERS, 0, LAYERS)), [hidden[-1], states[LAYERS], states[0], states[LAYERS]]),
    ):
        target = Target(family.model, aux_layers)
        positions = torch.arange(20)[None]
        rows = SlotCache(1, 20).rows(torch.tensor([0]), positions, 20)
        features = target.forward(tokens, positions, rows, last_only=True).features
        assert features is not None
        assert features.shape == (1, 20, target.feature_size)
        assert_close(features, torch.cat(expected, dim=-1), depth=LAYERS * LAYER)


@pytest.mark.parametrize("ids", [(0, LAYERS + 1), (-2, 2)], ids=str)
def test_impossible_taps_are_refused(ids: tuple[int, ...]) -> None:
    with pytest.raises(TargetError, match=rf"ids from 0 to {LAYERS}"):
        Target(pico.llama(num_hidden_layers=LAYERS), AuxLayers(ids))


def test_states_that_are_not_one_vector_per_token_are_refused() -> None:
    """Gemma 3n's layers hand on several versions of the state."""
    model = random_model(
        config_of(
            "gemma3n_text",
            head_dim=16,
            num_hidden_layers=2,
            layer_types=[SLIDING, FULL],
            num_kv_shared_layers=0,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=pico.VOCABULARY,
            activation_sparsity_pattern=[0.0, 0.0],
        )
    )
    model.set_attn_implementation(NAME)
    with pytest.raises(TargetError, match=r"states of Gemma3nTextModel's layers have shape \[4, 1, 5, 64\]"):
        prefill(Target(model, AuxLayers((1,))), [random_tokens(5)])


# Refusals that need no weights

OWN: dict[str, dict[str, Any]] = {
    "phimoe": {"sliding_window": WINDOW, "num_local_experts": 4, "num_hidden_layers": 1},
    "nemotron": {"num_key_value_heads": 48},
}
NO_INTERFACE = "does not attend through transformers' AttentionInterface"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "message"),
    {
        "recurrent_gemma": "layer 0 of RecurrentGemmaForCausalLM keeps its state elsewhere than in transformers' cache",
        "rwkv": f"RwkvForCausalLM {NO_INTERFACE}",
        "qwen4_exp_text": "does not run layers of type indexed_attention yet (qwen4_exp_text)",
        "deepseek_v4": "does not run layers of type compressed_sparse_attention, heavily_compressed_attention yet",
        "t5": "targets with an encoder are not supported (t5)",
        "clip": "transformers has no causal language model of type clip",
        "doge": "DogeAttention passes attention_mask",
        "kosmos-2.5": "Kosmos2_5ForConditionalGeneration counts its positions itself",
        "nemotron": "NemotronAttention drops the model call's keyword arguments",
        "phimoe": "layer 0 of PhimoeForCausalLM does not tell the attention function its sliding window",
        "jetmoe": "JetMoeForCausalLM looks at values while it runs",
        "falcon": f"FalconForCausalLM {NO_INTERFACE}",
        "bloom": f"BloomForCausalLM {NO_INTERFACE}",
    }.items(),
)
def test_unsupported_architectures_are_refused_from_the_config(family: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG_MAPPING[family](**OWN.get(family, {})).to_dict()))
    with pytest.raises(TargetError, match=re.escape(message)) as refusal:
        load_target(tmp_path, device="cpu", dtype=torch.float32, attention=NAME)
    assert ("--engine vllm" in str(refusal.value)) == (family != "t5")


def test_remote_code_does_not_run(tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "foreign", "auto_map": {"AutoConfig": "foreign.Foreign"}})
    )
    (tmp_path / "foreign.py").write_text(f"open({str(trace)!r}, 'w')\nclass Foreign: pass\n")
    with pytest.raises(TargetError, match="transformers cannot load the target"):
        load_target(tmp_path, device="cpu", dtype=torch.float32, attention=NAME)
    assert not trace.exists()


def test_missing_weights_are_named(tmp_path: Path) -> None:
    weights = pico.save_llama(tmp_path) / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.layers.3.self_attn.k_proj.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(TargetError, match=r"lacks weights: model\.layers\.3\.self_attn\.k_proj\.weight"):
        load_target(tmp_path, device="cpu", dtype=torch.float32, attention=NAME)


def test_model_without_a_list_of_layers_is_refused() -> None:
    model = pico.llama()
    model.model.layers = nn.Sequential(*model.model.layers)
    with pytest.raises(TargetError, match="LlamaModel has no list of decoder layers"):
        Target(model)


def test_the_decoder_is_found_where_the_head_has_its_name() -> None:
    model = random_model(config_of("modernbert-decoder", sep_token_id=3, cls_token_id=2))
    assert model.get_decoder() is model.decoder
    assert decoder_of(model) is model.model


# Refusals by the first forward: models that say they fit and do not


class OwnAttention(LlamaAttention):
    """Attends to itself alone, and tells nobody."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        values = self.v_proj(hidden_states).unflatten(-1, (-1, self.head_dim))
        return self.o_proj(values.repeat_interleave(self.num_key_value_groups, -2).flatten(-2)), None


class DeafAttention(LlamaAttention):
    """Keeps the keyword arguments of the model call to itself."""

    def forward(self, hidden_states: Tensor, position_embeddings: Any, **_: Any) -> tuple[Tensor, Tensor]:
        return super().forward(hidden_states, position_embeddings)


class MaskingAttention(LlamaAttention):
    """Makes a mask of its own."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        rows = hidden_states.shape[1]
        return super().forward(hidden_states, **kwargs | {"attention_mask": hidden_states.new_zeros(1, 1, rows, rows)})


class BiasedAttention(LlamaAttention):
    """Adds a position bias to the scores."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return super().forward(hidden_states, position_bias=hidden_states.new_zeros(1), **kwargs)


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        (OwnAttention, f"layer 2 of LlamaForCausalLM {NO_INTERFACE}"),
        (DeafAttention, "DeafAttention drops the model call's keyword arguments"),
        (MaskingAttention, "MaskingAttention passes attention_mask"),
        (BiasedAttention, "BiasedAttention passes position_bias"),
    ],
)
def test_attention_past_the_interface_is_refused(attention: type[nn.Module], message: str) -> None:
    model = pico.llama(num_hidden_layers=LAYERS)
    model.set_attn_implementation(NAME)
    model.model.layers[2].self_attn.__class__ = attention
    with pytest.raises(TargetError, match=message):
        generate(model)


def test_model_loaded_with_another_attention_is_refused() -> None:
    with pytest.raises(TargetError, match=f"layer 0 of LlamaForCausalLM {NO_INTERFACE}"):
        generate(pico.llama())


def test_window_that_only_the_mask_knows_is_refused() -> None:
    """Phi-3.5-MoE slides its window in the mask and does not pass it on."""
    config = config_of("phimoe", sliding_window=WINDOW, num_local_experts=4)
    model = random_model(config)
    model.set_attn_implementation(NAME)
    with pytest.raises(
        TargetError, match="layer 0 of PhimoeForCausalLM does not tell the attention function its sliding window"
    ):
        generate(model)


# Multi-modal models beside their language model


def test_what_reads_images_keeps_transformers_attention(tmp_path: Path) -> None:
    """Some know theirs by name alone."""
    random_model(config_of("qwen2_5_vl", **FAMILIES["qwen2_5_vl"])).save_pretrained(tmp_path)
    config = load_target(tmp_path, device="cpu", dtype=torch.float32, attention=NAME).config
    assert config._attn_implementation == config.text_config._attn_implementation == NAME
    assert config.vision_config._attn_implementation not in (NAME, None)


def test_wrappers_that_put_padding_in_the_place_of_images_are_run_without_memory() -> None:
    text = FAMILIES["gemma4_text"]
    alone, wrapped = config_of("gemma4_text", **text), config_of("gemma4", text_config=text)
    assert footprint(wrapped).cached == footprint(alone).cached > 0


def test_the_language_model_says_how_a_wrapper_attends() -> None:
    """DeepSeek-VL's says nothing, and holds a Llama."""
    config = config_of("deepseek_vl", text_config={})
    wrapper = model_class(config)
    assert wrapper is not None
    assert not wrapper.is_backend_compatible()
    check_class(wrapper, config)


# Rope that depends on the length

TURN = 32
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0 + i for i in range(8)],
    "original_max_position_embeddings": TURN,
    "factor": 4.0,
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
VARYING: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": ("llama", {"rope_parameters": LONGROPE}),
    "longrope, Phi-3": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": TURN}),
    "longrope in some layers": (
        "gemma3_text",
        {
            "rope_parameters": {FULL: LONGROPE, SLIDING: PLAIN},
            "layer_types": [SLIDING, FULL] * 2,
            "sliding_window": WINDOW,
        },
    ),
    "dynamic": ("llama", {"rope_parameters": PLAIN | {"rope_type": "dynamic", "factor": 4.0}}),
}
SIDES = [  # of the turn
    Request("short", tuple(random_tokens(5)), 20),
    Request("long", tuple(random_tokens(60)), 20),
    Request("up to it", tuple(random_tokens(15)), TURN + 1 - 15),
    Request("just beyond", tuple(random_tokens(TURN + 1)), 20),
]


def varying(name: str) -> PretrainedConfig:
    family, changes = VARYING[name]
    return config_of(family, head_dim=16, max_position_embeddings=128, **copy.deepcopy(changes))


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", VARYING)
def test_no_sequence_has_the_rope_of_its_neighbors(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_model(varying(name)).save_pretrained(tmp_path)
    alone = []
    for request in SIDES:  # a new model each time: transformers' rope remembers the last call
        reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
        ids = reference.generate(
            torch.tensor([request.prompt]), do_sample=False, max_new_tokens=request.max_new_tokens, pad_token_id=0
        )
        alone.append(ids[0, len(request.prompt) :].tolist())
    model = load_target(tmp_path, device="cpu", dtype=torch.float32, attention=NAME)
    for drafter in (None, CausalLMDrafter(Target(model))):
        k = 0 if drafter is None else 3
        engine = Engine(Target(model), drafter, num_speculative_tokens=k, num_slots=4, prefill_chunk=7)
        together = engine.generate(SIDES)
        assert [g.tokens for g in together] == alone
        assert {r.accepted for g in together for r in g.rounds if not r.beyond} <= {k}
        if name == "dynamic":
            assert not any(r.beyond for g in together for r in g.rounds)
    # Such a draft stops at its turn, and with it the whole batch, as in vLLM. It would not have to: beside longer
    # sequences a short one is drafted as it is alone.
    monkeypatch.setattr(drafter, "max_positions", None)
    short = engine.generate(SIDES)[0]
    assert {r.accepted for r in short.rounds} == {k}


@pytest.mark.parametrize("name", VARYING)
def test_a_plan_needs_no_positions(name: str) -> None:
    assert footprint(varying(name)).cached == LAYERS * 2 * 2 * 16


def test_a_draft_has_each_sequence_rotate_by_itself() -> None:
    rope = replace(pico.EAGLE_SPEC.decoder.rope, scaling=LONGROPE | {"rope_theta": None}, max_position_embeddings=128)
    draft = EagleModel(replace(pico.EAGLE_SPEC, decoder=replace(pico.EAGLE_SPEC.decoder, rope=rope)), NAME)
    hidden, short, long = torch.zeros(1, 4, 64), torch.arange(4)[None], 60 + torch.arange(4)[None]
    together = draft.rotary(hidden.repeat(2, 1, 1), torch.cat((short, long)))
    for row, positions in enumerate((short, long)):
        alone = draft.rotary(hidden, positions)
        assert all(torch.equal(a[row], b[0]) for a, b in zip(together, alone, strict=True))


def test_frequencies_made_in_the_forward_are_refused() -> None:
    """Phi-3.5-MoE's, and they are those of the longest sequence."""
    rope = LONGROPE | {"short_mscale": 1.0, "long_mscale": 1.5}
    model = random_model(config_of("phimoe", head_dim=16, num_local_experts=4, rope_parameters=rope))
    with pytest.raises(TargetError, match="PhimoeRotaryEmbedding derives its longrope frequencies from a batch"):
        Target(model)


# What a request may ask for


@pytest.mark.parametrize(
    ("name", "prompt", "new", "problem"),
    [
        (
            "dynamic",
            100,
            29,
            "prompt a: 100 tokens and up to 29 new ones; the target has 128 positions\n  next: ask for at ",
        ),
        ("dynamic", 200, 1, "the target has 128 positions\n  next: leave it out"),
        (
            "longrope",
            30,
            4,
            "rope changes beyond 32 tokens (longrope), and no text may cross that\n  next: ask for at most 3",
        ),
    ],
)
def test_more_tokens_than_there_is_room_for_are_refused(name: str, prompt: int, new: int, problem: str) -> None:
    model = random_model(varying(name))
    model.set_attn_implementation(NAME)
    with pytest.raises(DraftkitError, match=re.escape(problem)):
        Engine(Target(model), None, num_speculative_tokens=0, num_slots=1).generate(
            [Request("a", tuple(random_tokens(prompt)), new)]
        )


def test_linear_rope_stretches_the_positions() -> None:
    rope = PLAIN | {"rope_type": "linear", "factor": 4.0}
    assert Positions.of(config_of("llama", rope_parameters=rope)).most == 4 * 512
    assert Positions.of(config_of("llama")).most == 512
    assert Positions.of(CONFIG_MAPPING["mpt"]()).room(10**6) > 10**6


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        (Request("a", (5, pico.VOCABULARY), 4), "token 1 of the prompt has the id 320\n  expected: ids from 0 to 319"),
        (Request("a", (-1, 5), 4), "token 0 of the prompt has the id -1"),
        (Request("a", (5,), 0), "max_new_tokens is 0\n  expected: 1 or more"),
    ],
)
def test_a_request_that_cannot_be_run_is_refused(request_: Request, problem: str) -> None:
    model = pico.llama(attn_implementation=NAME)
    with pytest.raises(DraftkitError, match=re.escape(f"request a: {problem}")):
        Engine(Target(model), None, num_speculative_tokens=0, num_slots=1).generate([request_])


# The attention function


@contextmanager
def attention_without(argument: str) -> Iterator[None]:
    """Draftkit's attention function, deaf to one of its arguments."""

    def deaf(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return slot_attention(*args, **kwargs | {argument: None})

    AttentionInterface.register(NAME, deaf)
    try:
        yield
    finally:
        AttentionInterface.register(NAME, slot_attention)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "argument"), [("gemma2", "softcap"), ("gpt_oss", "s_aux"), ("granite", "scaling")])
def test_the_reference_notices_a_dropped_argument(name: str, argument: str, tmp_path: Path) -> None:
    """The comparisons above would fail if the attention function ignored what a family passes."""
    family = load_family(name, tmp_path)
    expected = reference_logits(family.reference, SEQUENCES, rows=4)
    with attention_without(argument):
        actual = verify_logits(family.model, SEQUENCES, rows=4)
    assert (actual - expected).abs().max() > 0.01


def test_keys_and_values_may_differ_in_width() -> None:
    """As in MiMo-V2-Flash."""
    keys, values = torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 24)
    rows = SlotCache(1, 8).rows(torch.tensor([0]), torch.arange(3)[None], 3)
    stored = rows.update(0, keys, values, None)
    assert torch.equal(stored[0], keys)
    assert torch.equal(stored[1], values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_latents_are_cached_instead_of_keys_and_values(dtype: torch.dtype, tmp_path: Path) -> None:
    config = config_of("deepseek_v3", **FAMILIES["deepseek_v3"])
    random_model(config).save_pretrained(tmp_path)
    target = Target(load_target(tmp_path, device="cpu", dtype=dtype, attention=NAME))
    cache = prefill(target, [random_tokens(5)])
    assert {tuple(pool.shape) for pools in cache.layers.values() for pool in pools} == {
        (2, 1, 64, 24 + 8),
        (2, 1, 64, 0),
    }
    assert target.slot_bytes(64, 0) == 64 * LAYERS * (24 + 8) * dtype.itemsize


@pytest.mark.few(5)
def test_caches_take_what_was_planned(family: Family) -> None:
    """Keys and values, latents and what indexers compare, of all layers."""
    target = Target(family.model)
    cache = prefill(target, [random_tokens(5)])
    kept = sum(pool.nbytes for pools in cache.layers.values() for pool in pools)
    assert kept == cache.num_slots * target.slot_bytes(cache.capacity, 0) > 0


# Stale entries


def random_draft(target: LlamaForCausalLM) -> CausalLMDrafter:
    return CausalLMDrafter(Target(pico.llama(seed=1, num_hidden_layers=2, attn_implementation=NAME)))


def noisy_draft(target: LlamaForCausalLM) -> CausalLMDrafter:
    """The target with noise on its weights: right now and then."""
    torch.manual_seed(1)
    model = copy.deepcopy(target)
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * parameter.std() * 0.1)
    return CausalLMDrafter(Target(model))


def eagle_draft(target: LlamaForCausalLM) -> EagleDrafter:
    torch.manual_seed(1)
    model = EagleModel(pico.EAGLE_SPEC, NAME)
    model.borrow(target.model.embed_tokens, target.lm_head)
    return EagleDrafter(model.eval().requires_grad_(False))


def poison(cache: SlotCache, lengths: Tensor) -> None:
    """Overwrite what lies at or beyond each slot's length."""
    stale = torch.arange(cache.capacity) >= lengths[:, None]
    for pools in cache.layers.values():
        for pool in pools:
            pool.masked_fill_(stale[:, None, :, None], 1e4)


MakeDrafter = Callable[[LlamaForCausalLM], CausalLMDrafter | EagleDrafter]


@dataclass(frozen=True)
class Trace:
    """What a run did: every draft token, every generated token, and the numbers accepted in a round."""

    proposals: list[list[int]]
    tokens: list[list[int]]
    accepted: set[int]


def run_poisoned(target: LlamaForCausalLM, make: MakeDrafter, poisoned: tuple[int, int] | None) -> Trace:
    """Generate with cache entries of target and drafter overwritten between rounds.

    `poisoned` (0, 0) spares exactly the committed ones of either; −1 takes the last committed one as well.
    """
    drafter = make(target)
    engine = Engine(Target(target, drafter.aux_layers), drafter, num_speculative_tokens=4, num_slots=3)
    propose, proposals = drafter.propose, []

    def recorded(committed: Committed, k: int, draw: Draw) -> Proposal:
        proposal = propose(committed, k, draw)
        proposals.extend(proposal.tokens.tolist())
        return proposal

    def between_rounds(_: list[Generation]) -> None:
        if poisoned is not None:
            anchor, last = engine._state.position[:-1], engine._state.counts[:-1]
            poison(engine._cache, anchor + poisoned[0])
            # A drafter has yet to see the last round's tokens; EAGLE's rows are one position earlier than tokens.
            poison(drafter.cache, anchor - last + isinstance(drafter, CausalLMDrafter) + poisoned[1])

    drafter.propose = recorded
    generations = engine.generate(REQUESTS, on_round=between_rounds)
    return Trace(proposals, [g.tokens for g in generations], {r.accepted for g in generations for r in g.rounds})


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("make", [random_draft, noisy_draft, eagle_draft], ids=lambda make: make.__name__)
def test_rollback_by_length_is_exact(make: MakeDrafter) -> None:
    """Nothing past a sequence's length is ever read: neither output nor drafts change when all of it is poisoned."""
    target = pico.llama(num_hidden_layers=LAYERS, eos_token_id=None)
    target.set_attn_implementation(NAME)
    clean = run_poisoned(target, make, None)
    assert clean.tokens == [g.tokens for g in generate(target)]
    assert clean.accepted >= ({0, 1, 2, 3} if make is noisy_draft else {0})
    assert run_poisoned(target, make, (0, 0)) == clean
    # The poison works: one entry more, and the target's output changes, or the drafts do and the output does not.
    assert run_poisoned(target, make, (-1, 0)).tokens != clean.tokens
    spoiled = run_poisoned(target, make, (0, -1))
    assert spoiled.proposals != clean.proposals
    assert spoiled.tokens == clean.tokens


# Devices


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_bfloat16(device: str, tmp_path: Path) -> None:
    """Rounding may turn ties, so almost everything is accepted, and every request ends as it should."""
    folder = pico.save_llama(tmp_path, eos_token_id=None)
    model = load_target(folder, device=device, dtype=torch.bfloat16, attention=NAME)
    generations = generate(model, model, k=3)
    assert [len(g.tokens) for g in generations] == [NEW_TOKENS] * len(REQUESTS)
    rounds = [r for g in generations for r in g.rounds]
    assert sum(r.accepted for r in rounds) >= 0.8 * sum(r.drafted for r in rounds)
