"""A target's multi-token prediction head: two norms, a projection, a decoder layer like the target's own, a last norm.

Shapes: B sequences, T rows, H the target's width, V its vocabulary. Row j pairs the target's state at position p with
the embedding of the token at p + 1, and predicts the token at p + 2. The decoder layer, its rotary positions and the
norms are of the target's own class in transformers. Source: the `*_mtp.py` of vLLM 0.32's models.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from draftkit.errors import TargetError
from draftkit.layout.families.mtp import MtpSpec
from draftkit.layout.folder import Draft
from draftkit.models.attention import compresses
from draftkit.models.chain import ChainModel, ChainOutput
from draftkit.models.recurrent import attends
from draftkit.models.rope import give_rows_their_rope
from draftkit.models.states import decoder_of
from draftkit.models.weights import check_sizes, load_weights


class MtpModel(ChainModel):
    """A head in its target's dtype and on its device; the embedding and the output layer are the target's.

    `decoder`: a model of the target's class with the head's one layer, without embedding and norm.
    """

    def __init__(self, spec: MtpSpec, decoder: Any, norm: type[nn.Module], target: PreTrainedModel):
        super().__init__()
        self.spec = spec
        h, eps = spec.target_hidden_size, target.config.get_text_config().rms_norm_eps
        self.embedding_norm, self.hidden_norm, self.final_norm = (norm(h, eps=eps) for _ in range(3))
        self.projection = nn.Linear(2 * h, h, bias=False)
        self.decoder = decoder
        self.embed_tokens = target.get_input_embeddings()
        self.lm_head = target.get_output_embeddings()
        self._compresses = compresses(decoder)

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, **attention: Any) -> ChainOutput:
        embedding = self.embed_tokens(tokens).to(hidden.dtype)
        if self.spec.zero_first_embedding:
            embedding = embedding * (positions != 0)[..., None]
        pair = self.embedding_norm(embedding), self.hidden_norm(hidden)
        ordered = pair if self.spec.concatenation == "embedding_hidden" else pair[::-1]
        output = self.decoder(
            inputs_embeds=self.projection(torch.cat(ordered, dim=-1)),
            position_ids=positions,
            past_key_values=attention["kv"].latents if self._compresses else None,
            use_cache=False,
            **attention,
        ).last_hidden_state
        normed = self.final_norm(output)
        return ChainOutput(normed, normed if self.spec.feedback == "post_norm" else output)

    def logits(self, head_input: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(head_input)
        return logits

    @property
    def target_ids(self) -> None:
        """It drafts in the target's vocabulary."""


def load_mtp(draft: Draft, target: PreTrainedModel, *, attention: str) -> MtpModel:
    """A target's head. `attention` names the attention function.

    Raises `TargetError` for the head of another target, for several heads, and for a kind that draftkit does not run.
    """
    spec = draft.spec.architecture.expect(MtpSpec)
    check_sizes(draft, spec.target_hidden_size, target)
    parts = spec.parts
    if parts is None or spec.num_modules > 1:
        kind = spec.config.get("model_type")
        what = f"the multi-token prediction heads of {kind}" if parts is None else f"{spec.num_modules} heads in turn"
        raise TargetError(f"draftkit does not run {what} yet", where=draft.path, hint="vLLM does: eval --engine vllm")
    prefix = spec.prefixes[0]
    block = prefix + parts.block.format(index=0)
    weights = load_weights(draft, target, prefix)
    outer = {
        "embedding_norm": parts.embedding_norm,
        "hidden_norm": parts.hidden_norm,
        "final_norm": parts.final_norm,
        "projection": parts.projection,
    }
    own = {f"{part}.weight": weights.pop(f"{name}.weight", None) for part, name in outer.items()}
    if missing := [outer[part.removesuffix(".weight")] for part, weight in own.items() if weight is None]:
        raise TargetError(f"the head lacks {', '.join(missing)}", where=draft.path, hint="draftkit inspect the target")
    trunk: Any = decoder_of(target)
    layer = {
        name.removeprefix(block.removeprefix(prefix)): weight
        for name, weight in weights.items()
        if name.startswith(block.removeprefix(prefix)) and not name.endswith(("embed_tokens.weight", "head.weight"))
    }
    decoder = _decoder(trunk, layer, attention, draft)
    with torch.device(target.device):
        model = MtpModel(spec, decoder, type(trunk.norm), target).to(target.dtype)
    model.load_state_dict(own, strict=False)
    return model.eval().requires_grad_(False)


def _decoder(trunk: Any, weights: Mapping[str, Tensor], attention: str, draft: Draft) -> PreTrainedModel:
    """A model of the target's class with one layer of these weights, by their names in a checkpoint."""
    config = one_layer(trunk.config)
    named = {f"layers.0.{name}": weight for name, weight in weights.items()}
    named |= {"embed_tokens.weight": torch.zeros(1, config.hidden_size), "norm.weight": torch.zeros(config.hidden_size)}
    model, info = type(trunk).from_pretrained(
        None,
        config=config,
        state_dict=named,
        dtype=trunk.dtype,
        attn_implementation=attention,
        output_loading_info=True,
    )
    if wrong := sorted(info["missing_keys"] | info["unexpected_keys"]):
        raise TargetError(f"the head's layer does not fit the target's class: {', '.join(wrong[:5])}", where=draft.path)
    model.embed_tokens, model.norm = nn.Identity(), nn.Identity()  # the target's, and the head's
    give_rows_their_rope(model)
    moved: PreTrainedModel = model.to(trunk.device)
    return moved


def one_layer(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration of a target with one layer, like the last of its own that attends: what a head has."""
    text = deepcopy(config.get_text_config())
    count = text.num_hidden_layers
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * count
    last = max(layer for layer, kind in enumerate(kinds) if attends(kind))
    for name, value in list(text.to_dict().items()):
        if isinstance(value, list) and len(value) == count:
            setattr(text, name, [value[last]])
    if getattr(text, "first_k_dense_replace", None):
        text.first_k_dense_replace = int(last < text.first_k_dense_replace)
    if getattr(text, "decoder_sparse_step", None):
        sparse = last not in text.mlp_only_layers and (last + 1) % text.decoder_sparse_step == 0
        text.decoder_sparse_step, text.mlp_only_layers = 1, [] if sparse else [0]
    text.num_hidden_layers, text.vocab_size = 1, 1  # the embedding is the target's
    text.pad_token_id = None
    return text
