"""One module for every draft that reads target hidden states: EAGLE-1/2, HASS, EAGLE-3, P-EAGLE.

Shapes: B sequences, T rows, H draft width, F = A · Ht width of the target features of one row, Vd draft vocabulary.
Row j pairs the feature of position p with the embedding of the token at p + 1, and predicts the token at p + 2.
Rotary embedding, norms and MLP are those of transformers, which the published drafts were trained with.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from draftkit.errors import LayoutError
from draftkit.layout.families.eagle import EagleSpec
from draftkit.layout.folder import Draft
from draftkit.models.chain import ChainModel, ChainOutput
from draftkit.models.decoder import DraftAttention, add_and_norm, decoder_config, rotary_embedding
from draftkit.models.weights import check_mask_token, check_sizes, load_into


class EagleModel(ChainModel):
    """A draft built from its spec; parameters carry the names of the unified layout.

    `attention` names the attention function, registered with transformers' `AttentionInterface`. Embedding or head
    that the spec borrows from the target are set by `borrow`.
    """

    def __init__(self, spec: EagleSpec, attention: str):
        super().__init__()
        self.spec = spec
        decoder = spec.decoder
        config = decoder_config(decoder, attention)
        h, eps = decoder.hidden_size, decoder.rms_norm_eps
        fusion = spec.token_entry == "fusion"
        self.embed_tokens: nn.Module | None = None
        if spec.embed_tokens == "draft":
            self.embed_tokens = nn.Embedding(spec.vocab_size, h)
        if fusion or spec.aux_layer_ids is not None:
            fused = h + spec.target_hidden_size if fusion else spec.feature_size
            self.fc = nn.Linear(fused, h, bias=spec.fusion_bias)
        self.enorm = LlamaRMSNorm(h, eps) if fusion and spec.embedding_norm else nn.Identity()
        self.hnorm = LlamaRMSNorm(spec.target_hidden_size, eps) if fusion and spec.hidden_norm else nn.Identity()
        if spec.feature_norm == "joint":
            self.input_norm = LlamaRMSNorm(spec.feature_size, eps)
        if spec.feature_norm == "per_layer":
            captured = spec.feature_size // spec.target_hidden_size
            self.fc_norm = nn.ModuleList(LlamaRMSNorm(spec.target_hidden_size, eps) for _ in range(captured))
        self.layers = nn.ModuleList(EagleLayer(spec, config, index) for index in range(decoder.num_hidden_layers))
        self.norm = LlamaRMSNorm(h, eps) if spec.final_norm else nn.Identity()
        self.lm_head: nn.Module | None = None
        if spec.lm_head == "draft":
            self.lm_head = nn.Linear(h, spec.draft_vocab_size, bias=False)
        if spec.parallel is not None and spec.parallel.mask_state:
            self.mask_hidden = nn.Parameter(torch.empty(1, 1, spec.feature_size))
        self.rotary = rotary_embedding(config)
        self.d2t: Tensor
        if spec.reduced_vocabulary:
            self.register_buffer("d2t", torch.zeros(spec.draft_vocab_size, dtype=torch.int64))

    def borrow(self, embed_tokens: nn.Module, lm_head: nn.Module) -> None:
        """Use the target's embedding and head where the spec says so."""
        if self.spec.embed_tokens == "target":
            self.embed_tokens = embed_tokens
        if self.spec.lm_head == "target":
            self.lm_head = lm_head

    def fuse(self, features: Tensor) -> Tensor:
        spec = self.spec
        if spec.token_entry == "fusion":
            return features  # fc reads them together with the embedding, at every step
        if spec.aux_layer_ids is None:
            return features  # the target's last hidden state is as wide as the draft's own
        if spec.feature_norm == "joint":
            features = self.input_norm(features)
        if spec.feature_norm == "per_layer":
            chunks = features.split(spec.target_hidden_size, dim=-1)
            features = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return self.fc(features)

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, **attention: object) -> ChainOutput:
        assert self.embed_tokens is not None, "borrow() comes first"
        embedding = self.embed_tokens(tokens).to(hidden.dtype)
        if self.spec.token_entry == "fusion":
            hidden = self.fc(self._concatenate(self.enorm(embedding), self.hnorm(hidden)))
        cos_sin = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, embedding, cos_sin, **attention)
        normed = self.norm(hidden)
        return ChainOutput(normed, normed if self.spec.feedback == "post_norm" else hidden)

    def logits(self, head_input: Tensor) -> Tensor:
        assert self.lm_head is not None, "borrow() comes first"
        logits = self.lm_head(head_input)
        return logits if self.spec.logit_scale == 1.0 else logits * self.spec.logit_scale

    @property
    def logit_scale(self) -> float:
        return self.spec.logit_scale

    @property
    def window(self) -> int | None:
        return self.spec.decoder.sliding_window

    @property
    def target_ids(self) -> Tensor | None:
        if not self.spec.reduced_vocabulary:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def _concatenate(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        pair = (embedding, hidden) if self.spec.concatenation == "embedding_hidden" else (hidden, embedding)
        return torch.cat(pair, dim=-1)


class EagleLayer(nn.Module):
    """A decoder layer. Layer 0 has the norms that the spec names and may attend over [embedding, hidden]."""

    def __init__(self, spec: EagleSpec, config: LlamaConfig, index: int):
        super().__init__()
        self.first = index == 0
        self.wide = self.first and spec.token_entry == "attention"
        self.norm_before_residual = self.first and spec.norm_before_residual
        self.embedding_first = spec.concatenation == "embedding_hidden"
        h, eps = spec.decoder.hidden_size, spec.decoder.rms_norm_eps
        has_input_norm = not self.first or (spec.embedding_norm if self.wide else spec.input_norm)
        self.input_layernorm = LlamaRMSNorm(h, eps) if has_input_norm else nn.Identity()
        self.hidden_norm = LlamaRMSNorm(h, eps) if self.wide and spec.hidden_norm else nn.Identity()
        self.self_attn = DraftAttention(spec.decoder, config, index, 2 * h if self.wide else h)
        self.post_attention_layernorm = LlamaRMSNorm(h, eps)
        self.mlp = LlamaMLP(config)

    def forward(self, hidden: Tensor, embedding: Tensor, cos_sin: tuple[Tensor, Tensor], **attention: object) -> Tensor:
        if self.wide:
            normed = self.hidden_norm(hidden)
            embedding = self.input_layernorm(embedding)
            attended = torch.cat((embedding, normed) if self.embedding_first else (normed, embedding), dim=-1)
        else:
            attended = normed = self.input_layernorm(hidden)
        residual = normed if self.norm_before_residual else hidden
        attended = self.self_attn(attended, cos_sin, **attention)
        hidden, normed = add_and_norm(attended, residual, self.post_attention_layernorm)
        return hidden + self.mlp(normed)


def load_eagle(
    draft: Draft, target: PreTrainedModel, *, attention: str, dtype: torch.dtype | None = None
) -> EagleModel:
    """An EAGLE-style draft. `attention` names the attention function; `dtype` None is the target's."""
    spec = draft.spec.architecture.expect(EagleSpec)
    if spec.parallel is not None and not spec.parallel.mask_state:
        raise LayoutError("the draft proposes in parallel and has no mask state", where=draft.path)
    check_sizes(draft, spec.target_hidden_size, target)
    check_mask_token(draft)
    with torch.device("meta"):
        model = EagleModel(spec, attention)
    load_into(model, draft, target, dtype=dtype)
    model.rotary = rotary_embedding(model.rotary.config).to(target.device)  # its frequencies are not weights
    model.borrow(target.get_input_embeddings(), target.get_output_embeddings())
    return model
