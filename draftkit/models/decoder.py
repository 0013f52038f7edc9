"""The attention of a draft's decoder layers, and what these take from transformers. B sequences, T rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    eager_attention_forward,
)

from draftkit.layout.decoder import Decoder
from draftkit.targets.rope import give_rows_their_rope

CosSin = tuple[Tensor, Tensor]  # cosines and sines [B, T, head_dim] of the rows' positions


class DraftAttention(nn.Module):
    """Grouped-query attention whose q, k and v read `input_size` features; keys and values are kept by the function.

    `sinks`: one more score per head, `attention_sink_bias` [N], which takes weight and gives no value.
    """

    def __init__(
        self,
        decoder: Decoder,
        config: LlamaConfig,
        index: int,
        input_size: int,
        *,
        sinks: bool = False,
        value_scale: float = 1.0,
    ):
        super().__init__()
        self.config = config
        self.layer_idx = index
        self.head_dim = decoder.head_dim
        self.scaling = decoder.head_dim**-0.5
        self.value_scale = value_scale
        self.sliding_window = decoder.windows[index]
        self.sink_tokens = decoder.sink_tokens if self.sliding_window is not None else 0
        self.num_key_value_groups = decoder.num_attention_heads // decoder.num_key_value_heads
        queries = decoder.num_attention_heads * decoder.head_dim
        keys = decoder.num_key_value_heads * decoder.head_dim
        self.q_proj = nn.Linear(input_size, queries, bias=decoder.qkv_bias)
        self.k_proj = nn.Linear(input_size, keys, bias=decoder.qkv_bias)
        self.v_proj = nn.Linear(input_size, keys, bias=decoder.qkv_bias)
        self.o_proj = nn.Linear(queries, decoder.hidden_size, bias=decoder.output_bias)
        eps = decoder.rms_norm_eps
        self.q_norm = LlamaRMSNorm(decoder.head_dim, eps) if decoder.qk_norm else nn.Identity()
        self.k_norm = LlamaRMSNorm(decoder.head_dim, eps) if decoder.qk_norm else nn.Identity()
        self.attention_sink_bias: Tensor | None = None
        if sinks:
            self.attention_sink_bias = nn.Parameter(torch.empty(decoder.num_attention_heads))

    def forward(self, hidden: Tensor, cos_sin: CosSin, **attention: object) -> Tensor:
        """[B, T, input_size] → [B, T, H]. `attention` goes to the attention function."""
        query = self.q_norm(self._heads(self.q_proj(hidden))).transpose(1, 2)
        key, value = self._keys_values(hidden)
        query, key = modeling_llama.apply_rotary_pos_emb(query, key, *cos_sin)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        if self.sliding_window is not None:
            attention["sliding_window"] = self.sliding_window
        if self.sink_tokens:
            attention["sink_tokens"] = self.sink_tokens
        if self.attention_sink_bias is not None:
            attention["s_aux"] = self.attention_sink_bias
        attention.setdefault("attention_mask", None)
        out, _ = attend(self, query, key, value, scaling=self.scaling, **attention)
        return self.o_proj(out.flatten(-2))

    def _keys_values(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        key = self.k_norm(self._heads(self.k_proj(hidden))).transpose(1, 2)
        value = self._heads(self.v_proj(hidden)).transpose(1, 2)
        return key, value if self.value_scale == 1.0 else value * self.value_scale

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self.head_dim))


def add_and_norm(x: Tensor, residual: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """`x` + `residual`, and `norm` of it: in one step where what has taken the norm over knows one."""
    together = getattr(norm.forward, "of_sum", None)
    if together is not None:
        total, normed = together(x, residual)
        return total, normed
    total = residual + x
    return total, norm(total)


def rotary_embedding(config: LlamaConfig) -> LlamaRotaryEmbedding:
    """Rotary positions in which no sequence depends on its neighbors."""
    rotary = LlamaRotaryEmbedding(config)
    give_rows_their_rope(rotary)
    return rotary


def decoder_config(decoder: Decoder, attention: str) -> LlamaConfig:
    """The transformers configuration that norms, MLP and rotary embedding are built from."""
    rope = decoder.rope
    config = LlamaConfig(
        hidden_size=decoder.hidden_size,
        intermediate_size=decoder.intermediate_size,
        num_hidden_layers=decoder.num_hidden_layers,
        num_attention_heads=decoder.num_attention_heads,
        num_key_value_heads=decoder.num_key_value_heads,
        head_dim=decoder.head_dim,
        hidden_act=decoder.hidden_act,
        rms_norm_eps=decoder.rms_norm_eps,
        mlp_bias=decoder.mlp_bias,
        max_position_embeddings=rope.max_position_embeddings,
        rope_parameters={"rope_type": "default", **(rope.scaling or {}), "rope_theta": rope.base},
    )
    config._attn_implementation = attention
    return config
