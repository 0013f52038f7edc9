"""What the recipes of drafts share that feed on the target's hidden states: their start and their chains."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from draftkit.errors import DraftkitError, LayoutError
from draftkit.layout.architecture import Rope
from draftkit.layout.decoder import Decoder, rope_of_config
from draftkit.layout.families.eagle import EagleSpec
from draftkit.layout.spec import DraftSpec
from draftkit.models.eagle import EagleModel, load_eagle
from draftkit.targets.states import AuxLayers
from draftkit.train.attention import CHAIN_ATTENTION
from draftkit.train.recipes.bases.chain import ChainRecipe
from draftkit.train.recipes.recipe import Origin

INITIAL_STD = 0.02
HEAD_SIZE, KV_HEADS = 128, 8
PARTIAL = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")  # of a target's rope


class EagleFamily(ChainRecipe):
    """A recipe for an `EagleModel`."""

    draft: EagleModel

    def __init__(self, draft: EagleModel, origin: Origin, temperature: float):
        super().__init__(draft, DraftSpec(architecture=draft.spec, dtype="F32"), origin, temperature)

    def train_own(self, *, head: bool, embeddings: bool) -> None:
        """Whether the draft's head and embedding change, where they are its own."""
        if self.draft.spec.lm_head == "draft":
            assert self.draft.lm_head is not None
            self.draft.lm_head.requires_grad_(head)
        if self.draft.spec.embed_tokens == "draft":
            assert self.draft.embed_tokens is not None
            self.draft.embed_tokens.requires_grad_(embeddings)

    @property
    def aux_layers(self) -> AuxLayers | None:
        ids = self.draft.spec.aux_layer_ids
        return None if ids is None else AuxLayers(ids)


def fresh_decoder(target: PreTrainedModel, num_layers: int) -> Decoder:
    """Decoder layers with the target's sizes, rotary base and activation, whatever its own layers are."""
    config = target.config.get_text_config()
    wide = getattr(config, "intermediate_size", None)
    heads, kv_heads, head_dim = _heads(config)
    return Decoder(
        hidden_size=config.hidden_size,
        intermediate_size=wide if isinstance(wide, int) else 4 * config.hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        hidden_act="silu",
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sliding_window=None,
        rope=_rope(config.to_dict()),
    )


def _heads(config: PretrainedConfig) -> tuple[int, int, int]:
    """Heads, those of keys and values, and their width: the target's, or 128 numbers for each head and up to 8 heads of
    keys and values where it has latent attention or none (as SpecForge has them for DeepSeek V3)."""
    heads = getattr(config, "num_attention_heads", None)
    if heads is None or getattr(config, "kv_lora_rank", None) is not None:
        head_dim = min(HEAD_SIZE, config.hidden_size)
        heads = config.hidden_size // head_dim
        return heads, math.gcd(heads, KV_HEADS), head_dim
    own = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads, getattr(config, "num_key_value_heads", None) or heads, own


def _rope(config: dict[str, object]) -> Rope:
    """The target's, of several kinds of layers that of full attention; the draft rotates all of each head, on one
    axis."""
    rope = config.get("rope_parameters")
    if isinstance(rope, dict):
        rope = rope.get("full_attention", rope)
        config = config | {"rope_parameters": {key: value for key, value in rope.items() if key not in PARTIAL}}
    return replace(rope_of_config(config), declared_base=None)


def fresh_eagle(spec: EagleSpec, origin: Origin, attention: str = CHAIN_ATTENTION) -> EagleModel:
    """A new draft in float32. Its own head and embedding start as the target's where the widths agree."""
    target = origin.target
    model = EagleModel(spec, attention)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=INITIAL_STD)
    embeddings, output = target.get_input_embeddings(), target.get_output_embeddings()
    with torch.no_grad():
        if spec.reduced_vocabulary:
            assert origin.d2t_ids is not None
            model.d2t.copy_(origin.d2t_ids.cpu() - torch.arange(len(origin.d2t_ids)))
        if isinstance(model.lm_head, nn.Linear) and spec.decoder.hidden_size == spec.target_hidden_size:
            rows = output.weight if origin.d2t_ids is None else output.weight[origin.d2t_ids.to(output.weight.device)]
            model.lm_head.weight.copy_(rows)
        if isinstance(model.embed_tokens, nn.Embedding) and spec.decoder.hidden_size == spec.target_hidden_size:
            model.embed_tokens.weight.copy_(embeddings.weight)
    model = model.to(target.device)
    model.borrow(embeddings.requires_grad_(False), output.requires_grad_(False))
    return model


def eagle_draft(
    origin: Origin, recipe: str, fresh: Callable[[], EagleModel], attention: str = CHAIN_ATTENTION
) -> EagleModel:
    """The origin's draft in float32, ready to be trained further; a `fresh` one where there is none.

    Raises `DraftkitError` for a draft of another kind than the recipe trains.
    """
    if origin.draft is None:
        return fresh()
    spec = origin.draft.spec.architecture
    if spec.method != recipe:
        raise DraftkitError(
            f"the draft is of the kind {origin.draft.spec.method}",
            where=origin.draft.path,
            hint=f"recipe {recipe} trains another",
        )
    return _started(origin, attention)


def _started(origin: Origin, attention: str) -> EagleModel:
    assert origin.draft is not None
    model = load_eagle(origin.draft, origin.target, attention=attention, dtype=torch.float32)
    layers = origin.target.get_input_embeddings(), origin.target.get_output_embeddings()
    borrowed = {id(parameter) for layer in layers for parameter in layer.parameters()}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) not in borrowed)
    return model


def check_layers(ids: tuple[int, ...], target: PreTrainedModel) -> None:
    """Raise `LayoutError` for layers that the target does not have, or that are not distinct and ascending."""
    most = target.config.get_text_config().num_hidden_layers
    if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] > most:
        raise LayoutError(
            f"target layers {list(ids)}",
            expected=f"distinct ids from 0 to {most}, ascending",
            hint=f"set options.layers, as {sorted({1, most // 2, most - 1})}",
        )
