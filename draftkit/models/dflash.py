"""One module for every block drafter: DFlash, DSpark, DFlash2, JetSpec.

Shapes: B sequences, J context rows, T rows of a block, K drafts, H draft width, F = A · Ht width of the target features
of one row, Vd draft vocabulary, r rank. Norms, MLP and rotary embedding are those of transformers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, rotate_half

from draftkit.errors import TargetError
from draftkit.layout.block import BlockConvolution
from draftkit.layout.families.dflash import CandidateSelector, DFlashSpec, MarkovHead
from draftkit.layout.folder import Draft
from draftkit.models.decoder import CosSin, DraftAttention, add_and_norm, decoder_config, rotary_embedding
from draftkit.models.weights import check_mask_token, check_sizes, load_into


class DFlashModel(nn.Module):
    """A draft built from its spec; parameters carry the names of the unified layout.

    `attention` names the attention function, registered with transformers' `AttentionInterface`; its argument
    `bidirectional` says whether a row sees the later rows of its block, `anchored` whether the window of all rows is
    that of the first. Embedding or head that the spec borrows from the
    target are set by `borrow`.
    """

    def __init__(self, spec: DFlashSpec, attention: str):
        super().__init__()
        self.spec = spec
        decoder = spec.decoder
        config = decoder_config(decoder, attention)
        h, eps = decoder.hidden_size, decoder.rms_norm_eps
        self.embed_tokens: nn.Module | None = None
        if spec.embed_tokens == "draft":
            self.embed_tokens = nn.Embedding(spec.vocab_size, h)
        self.fc = nn.Linear(spec.feature_size, h, bias=False)
        self.hidden_norm = LlamaRMSNorm(h, eps)
        self.layers = nn.ModuleList(BlockLayer(spec, config, index) for index in range(decoder.num_hidden_layers))
        self.norm = LlamaRMSNorm(h, eps)
        self.lm_head: nn.Module | None = None
        if spec.lm_head == "draft":
            self.lm_head = nn.Linear(h, spec.draft_vocab_size, bias=False)
        self.mask_embedding: Tensor | None = None
        if spec.mask_embedding:
            self.mask_embedding = nn.Parameter(torch.empty(h))
        self.markov_head = MarkovBias(spec, spec.markov) if spec.markov is not None else None
        self.confidence_head = ConfidenceHead(spec) if spec.confidence != "none" else None
        self.candidate_selector = CandidateScores(spec, spec.selector) if spec.selector is not None else None
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
        """Target features [B, J, F] → the context [B, J, H], of which every layer makes keys and values."""
        return self.hidden_norm(self.fc(features))

    def embed(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """The input [B, T, H] of rows of tokens int64 [B, T]."""
        assert self.embed_tokens is not None, "borrow() comes first"
        embedding = self.embed_tokens(tokens).to(dtype)
        if self.mask_embedding is not None:
            is_mask = (tokens == self.spec.parallel.mask_token_id)[..., None]
            embedding = torch.where(is_mask, self.mask_embedding, embedding)
        return embedding if self.spec.embedding_scale == 1.0 else embedding * self.spec.embedding_scale

    def context(self, layer: int, context: Tensor, cos_sin: CosSin) -> tuple[Tensor, Tensor]:
        """A layer's keys and values [B, G, J, D] of the context `fuse(features)` [B, J, H]."""
        attention: BlockAttention = self.layers[layer].self_attn  # type: ignore[assignment]
        return attention.keys_values(context, cos_sin)

    def forward(self, hidden: Tensor, positions: Tensor, **attention: object) -> Tensor:
        """The output [B, T, H] of blocks of rows `embed(tokens)` at `positions` int64 [B, T], normed, as `logits` reads
        it. `attention` goes to the attention function, which knows the context's keys and values."""
        cos_sin = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, cos_sin, **attention)
        return self.norm(hidden)

    def logits(self, output: Tensor) -> Tensor:
        """[..., H] → [..., Vd], before a Markov head's bias."""
        assert self.lm_head is not None, "borrow() comes first"
        spec = self.spec
        logits = self.lm_head(output)
        logits = logits if spec.logit_scale == 1.0 else logits * spec.logit_scale
        return torch.tanh(logits / spec.logit_softcap) * spec.logit_softcap if spec.logit_softcap else logits

    def confidence(self, previous: Tensor, output: Tensor) -> Tensor:
        """The chance [B] that a row's draft is accepted, from its `output` [B, H] and the token before int64 [B]."""
        assert self.confidence_head is not None
        latent = None
        if self.spec.confidence == "hidden_and_token":
            assert self.markov_head is not None
            latent = self.markov_head.markov_w1(previous)
        return self.confidence_head(output, latent)

    @property
    def target_ids(self) -> Tensor | None:
        """int64 [Vd]: the target's id of each draft id; None when they are the same."""
        if not self.spec.reduced_vocabulary:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)


class BlockLayer(nn.Module):
    """A decoder layer; DFlash2's has convolutions over the rows of the block before and after attention and MLP."""

    def __init__(self, spec: DFlashSpec, config: LlamaConfig, index: int):
        super().__init__()
        h, eps = spec.decoder.hidden_size, spec.decoder.rms_norm_eps
        self.sight = {"bidirectional": index not in spec.causal_layers, "anchored": spec.window_rule == "anchor"}
        self.input_layernorm = LlamaRMSNorm(h, eps)
        self.self_attn = BlockAttention(
            spec.decoder, config, index, h, sinks=spec.attention_sinks, value_scale=spec.value_scale
        )
        if spec.window_rule == "anchor" and self.self_attn.sliding_window is not None:
            self.self_attn.sliding_window += 1  # counted before the anchor, which is not one of them (speculators)
        self.post_attention_layernorm = LlamaRMSNorm(h, eps)
        self.mlp = LlamaMLP(config)
        self.attention_conv = self.mlp_conv = None
        if spec.convolution is not None:
            self.attention_conv = GroupedConvolution(h, spec.convolution)
            self.mlp_conv = GroupedConvolution(h, spec.convolution)

    def forward(self, hidden: Tensor, cos_sin: CosSin, **attention: object) -> Tensor:
        attention |= self.sight
        normed = self.input_layernorm(hidden)
        if self.attention_conv is None or self.mlp_conv is None:
            attended = self.self_attn(normed, cos_sin, **attention)
            hidden, normed = add_and_norm(attended, hidden, self.post_attention_layernorm)
            return hidden + self.mlp(normed)
        before, after = self.attention_conv.kernels(normed)
        attended = self.self_attn(convolved(normed, before), cos_sin, **attention)
        hidden = hidden + convolved(attended, after)
        normed = self.post_attention_layernorm(hidden)
        before, after = self.mlp_conv.kernels(normed)
        return hidden + convolved(self.mlp(convolved(normed, before)), after)


class BlockAttention(DraftAttention):
    """Attention of a block's rows over themselves and the keys and values of a context."""

    def keys_values(self, hidden: Tensor, cos_sin: CosSin) -> tuple[Tensor, Tensor]:
        """Keys, rotated, and values of rows: [B, G, T, head_dim] each."""
        key, value = self._keys_values(hidden)
        cos, sin = (part.unsqueeze(1) for part in cos_sin)
        return key * cos + rotate_half(key) * sin, value


class GroupedConvolution(nn.Module):
    """Kernels over the newest rows of a block, made from each row, for before and after a part of a layer (DFlash2)."""

    def __init__(self, hidden_size: int, convolution: BlockConvolution):
        super().__init__()
        self.taps, self.group_size = convolution.conv_taps, convolution.conv_group_size
        groups = hidden_size // self.group_size
        self.base_kernel = nn.Parameter(torch.empty(2, self.taps, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * self.taps * groups, bias=False)

    @torch.no_grad()
    def pass_through(self) -> None:
        """Weights that leave the rows as they are."""
        self.base_kernel.zero_()
        self.base_kernel[:, 0] = 1
        self.kernel_projection.weight.zero_()

    def kernels(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The kernels [B, T, taps, H] before and after the part that reads `rows` [B, T, H]."""
        of_rows = self.kernel_projection(rows).unflatten(-1, (2, self.taps, -1))
        before, after = (self.base_kernel + of_rows.repeat_interleave(self.group_size, dim=-1)).unbind(2)
        return before, after


def convolved(rows: Tensor, kernels: Tensor) -> Tensor:
    """Rows [B, T, H] of a block, each the sum over taps t of `kernels` [B, T, taps, H] times the row t before it."""
    total = kernels[:, :, 0] * rows
    for tap in range(1, kernels.shape[2]):
        total = total + kernels[:, :, tap] * pad(rows, (0, 0, tap, 0))[:, : rows.shape[1]]
    return total


class MarkovStep(NamedTuple):
    """One step of a Markov head: `latent` [B, r], what the token before says about a row, and the state [B, r] for the
    next row."""

    latent: Tensor
    state: Tensor


class MarkovBias(nn.Module):
    """DSpark's Markov head (DeepSpec, `markov_head.py`): what the token before says about a row's token."""

    def __init__(self, spec: DFlashSpec, head: MarkovHead):
        super().__init__()
        h, r = spec.decoder.hidden_size, head.markov_rank
        self.markov_type = head.markov_type
        self.scale = spec.logit_scale
        self.markov_w1 = nn.Embedding(spec.vocab_size, r)
        self.markov_w2 = nn.Linear(r, spec.draft_vocab_size, bias=False)
        if head.markov_type == "gated":
            self.gate_proj = nn.Linear(h + r, r)
        if head.markov_type == "rnn":
            self.joint_proj = nn.Linear(2 * r + h, 3 * r)

    def start(self, output: Tensor) -> Tensor:
        """The state [B, r] before the first row of a block with outputs [B, T, H]."""
        return output.new_zeros(output.shape[0], self.markov_w1.embedding_dim)

    def latent(self, previous: Tensor, output: Tensor, state: Tensor) -> MarkovStep:
        """One row's step: `previous` int64 [B] is the token before it in the target's vocabulary, `output` [B, H]."""
        latent = self.markov_w1(previous).to(output.dtype)
        if self.markov_type == "gated":
            latent = latent * torch.sigmoid(self.gate_proj(torch.cat((output, latent), dim=-1)))
        if self.markov_type == "rnn":
            joint = self.joint_proj(torch.cat((state, latent, output), dim=-1))
            gate, candidate, shown = joint.chunk(3, dim=-1)
            gate = torch.sigmoid(gate)
            state = gate * state + (1 - gate) * torch.tanh(candidate)
            latent = torch.tanh(shown)
        return MarkovStep(latent, state)

    def bias(self, latent: Tensor) -> Tensor:
        """What is added to a row's logits: [B, Vd] of a latent [B, r]."""
        bias = self.markov_w2(latent)
        return bias if self.scale == 1.0 else bias * self.scale


class ConfidenceHead(nn.Module):
    """DSpark's estimate of the chance that the target accepts a row's draft."""

    def __init__(self, spec: DFlashSpec):
        super().__init__()
        rank = spec.markov.markov_rank if spec.markov is not None and spec.confidence == "hidden_and_token" else 0
        self.proj = nn.Linear(spec.decoder.hidden_size + rank, 1)

    def forward(self, output: Tensor, latent: Tensor | None = None) -> Tensor:
        """The chance [B] from a row's `output` [B, H], and the Markov embedding [B, r] of the token before, if read."""
        return torch.sigmoid(self.logits(output, latent).float())

    def logits(self, output: Tensor, latent: Tensor | None = None) -> Tensor:
        """The chances before the sigmoid."""
        read = output if latent is None else torch.cat((output, latent.to(output.dtype)), dim=-1)
        return self.proj(read)[..., 0]


class CandidateScores(nn.Module):
    """DFlash2's selector: how well each candidate of a row follows one of the row before."""

    def __init__(self, spec: DFlashSpec, selector: CandidateSelector):
        super().__init__()
        self.top_k = selector.selector_top_k
        table = spec.vocab_size, selector.selector_rank
        self.predecessor_codebook = nn.Parameter(torch.empty(table))
        self.successor_codebook = nn.Parameter(torch.empty(table))
        self.hidden_projection = nn.Linear(spec.decoder.hidden_size, selector.selector_rank, bias=False)

    @torch.no_grad()
    def say_nothing(self) -> None:
        """Weights by which all scores are 0, from which the successors learn at once: their gradient is the product of
        the other two factors, which would be next to nothing if these were as small as elsewhere."""
        nn.init.normal_(self.predecessor_codebook)
        nn.init.normal_(self.hidden_projection.weight, std=self.hidden_projection.in_features**-0.5)
        nn.init.zeros_(self.successor_codebook)

    def forward(self, previous: Tensor, candidates: Tensor, output: Tensor) -> Tensor:
        """Scores [B, top_k] to add to the logits of a row's `candidates` int64 [B, top_k].

        `previous` int64 [B]: the token before; `output` [B, H]: the row's.
        """
        predecessor = self.predecessor_codebook[previous] * self.hidden_projection(output)
        return (self.successor_codebook[candidates] @ predecessor[:, :, None])[:, :, 0]


def load_dflash(
    draft: Draft, target: PreTrainedModel, *, attention: str, dtype: torch.dtype | None = None
) -> DFlashModel:
    """A block drafter. `attention` names the attention function; `dtype` None is the target's."""
    spec = draft.spec.architecture.expect(DFlashSpec)
    check_sizes(draft, spec.target_hidden_size, target)
    check_mask_token(draft)
    width = target.get_input_embeddings().weight.shape[1]
    if "target" in (spec.embed_tokens, spec.lm_head) and width != spec.decoder.hidden_size:
        raise TargetError(
            f"the draft is {spec.decoder.hidden_size} wide and takes the target's embedding or head of {width}",
            where=draft.path,
            hint="evaluate it with its own target",
        )
    with torch.device("meta"):
        model = DFlashModel(spec, attention)
    load_into(model, draft, target, dtype=dtype)
    model.rotary = rotary_embedding(model.rotary.config).to(target.device)  # its frequencies are not weights
    model.borrow(target.get_input_embeddings(), target.get_output_embeddings())
    return model
