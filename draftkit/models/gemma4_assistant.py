"""Gemma-4's assistant: the target's embedding of a token and its state, projected to the width of a small decoder
whose layers have queries alone, and its output projected back to be the next step's state.

Shapes: B sequences, T rows, H the target's width, h the assistant's, V the vocabulary. The layers are transformers'.
Source: `gemma4_mtp.py` and `gemma4.py` of vLLM 0.32, which this follows where transformers 5.23 computes otherwise.
transformers has the queries one position later, and lets them see what the cache holds there: the keys of the draft
that was rejected last. Its sliding windows are one token longer. It scales no logits (`final_logit_softcapping`), gives
tokens of other centroids the lowest logit less one, where vLLM gives them none, and drafts suppressed tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import CONFIG_MAPPING, AutoModel, PretrainedConfig, PreTrainedModel

from draftkit.errors import TargetError
from draftkit.layout.families.gemma4_assistant import ORDERING, Gemma4AssistantSpec
from draftkit.layout.folder import Draft
from draftkit.models.chain import ChainOutput
from draftkit.models.weights import check_sizes, load_weights
from draftkit.targets.rope import give_rows_their_rope
from draftkit.targets.states import decoder_layers, decoder_of

OWN_KEYS = ("k_proj", "v_proj", "k_norm", "v_norm")  # of the target's layers; the assistant's have none


class Gemma4AssistantModel(nn.Module):
    """Built from its spec; parameters carry the names of the checkpoint. `attention` names the attention function."""

    def __init__(self, spec: Gemma4AssistantSpec, text: PretrainedConfig, attention: str, dtype: torch.dtype):
        super().__init__()
        self.spec = spec
        h, target = spec.hidden_size, spec.target_hidden_size
        self.pre_projection = nn.Linear(2 * target, h, bias=False, dtype=dtype)
        self.post_projection = nn.Linear(h, target, bias=False, dtype=dtype)
        self.model: Any = AutoModel.from_config(text, dtype=dtype, attn_implementation=attention)
        for layer in self.model.layers:
            without_keys(layer.self_attn)
        give_rows_their_rope(self.model)
        self.lm_head = None if spec.tied else nn.Linear(h, spec.vocab_size, bias=False, dtype=dtype)
        if spec.num_centroids:
            self.masked_embedding = OrderedEmbedding(spec, dtype)
        self.softcap: float | None = getattr(text, "final_logit_softcapping", None)
        self.register_buffer("suppressed", torch.tensor(spec.suppressed_tokens, dtype=torch.int64), persistent=False)
        self.suppressed: Tensor
        self.embed_tokens: nn.Module | None = None

    def borrow(self, embed_tokens: nn.Module) -> None:
        """Use the target's embedding, scaled as the target's own layers have it."""
        self.embed_tokens = embed_tokens

    def forward(
        self,
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,
        shared: Mapping[str, tuple[Tensor, Tensor]],
        **attention: object,
    ) -> ChainOutput:
        """One draft step.

        `tokens` int64 [B, 1]: the newest. `hidden` [B, 1, H]: the target's state that it was emitted from, or the last
        step's feedback. `positions` int64 [B, 1], for rope. `shared`: by kind of layer, what goes to the attention
        function for keys and values. `attention` goes there too.
        """
        assert self.embed_tokens is not None, "borrow() comes first"
        pair = self.embed_tokens(tokens).to(hidden.dtype), hidden
        ordered = pair if self.spec.concatenation == "embedding_hidden" else pair[::-1]
        state = self.model(
            inputs_embeds=self.pre_projection(torch.cat(ordered, dim=-1)),
            attention_mask=dict.fromkeys(self.spec.layer_types),
            position_ids=positions,
            shared_kv_states=dict(shared),
            use_cache=False,
            **attention,
        ).last_hidden_state
        return ChainOutput(state, self.post_projection(state))

    def logits(self, head_input: Tensor) -> Tensor:
        """[B, h] → [B, V]: −∞ where a token is suppressed, or its centroid not selected."""
        weight = self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        if self.spec.num_centroids:
            logits = self.masked_embedding(head_input, weight)
        else:
            logits = linear(head_input, weight)
            if self.softcap is not None:
                logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits.index_fill(-1, self.suppressed, -torch.inf) if len(self.suppressed) else logits


class OrderedEmbedding(nn.Module):
    """Logits of those tokens alone whose centroid is among the best. `token_ordering` [V]: those of each, one after
    the other."""

    def __init__(self, spec: Gemma4AssistantSpec, dtype: torch.dtype):
        super().__init__()
        self.selected = spec.selected_centroids
        self.centroids = nn.Linear(spec.hidden_size, spec.num_centroids, bias=False, dtype=dtype)
        self.register_buffer("token_ordering", torch.zeros(spec.vocab_size, dtype=torch.int64))
        self.token_ordering: Tensor

    def forward(self, state: Tensor, weight: Tensor) -> Tensor:
        best = self.centroids(state).topk(self.selected, dim=-1).indices  # [B, selected]
        tokens = self.token_ordering.view(self.centroids.out_features, -1)[best].flatten(1)
        logits = torch.einsum("bh,bth->bt", state, weight[tokens])
        return torch.full_like(state[:, :1], -torch.inf).expand(-1, len(weight)).scatter(-1, tokens, logits)


def load_gemma4_assistant(draft: Draft, target: PreTrainedModel, *, attention: str) -> Gemma4AssistantModel:
    """Gemma-4's assistant. Raises `TargetError` for one of another target."""
    spec = draft.spec.architecture.expect(Gemma4AssistantSpec)
    check_sizes(draft, spec.target_hidden_size, target)
    with torch.device(target.device):
        model = Gemma4AssistantModel(spec, text_config(draft, spec), attention, target.dtype)
    _check_heads(draft, model, target)
    weights = load_weights(draft, target)
    if ORDERING in weights:
        _check_ordering(draft, weights[ORDERING])
    model.load_state_dict(weights)
    model.borrow(target.get_input_embeddings())
    return model.eval().requires_grad_(False)


def text_config(draft: Draft, spec: Gemma4AssistantSpec) -> PretrainedConfig:
    """The configuration of the assistant's decoder. Raises `TargetError` where transformers does not know it.

    Its class refuses layers that all share keys and values, in transformers 5.23; so here, as in vLLM, none does.
    """
    stated = dict(spec.config["text_config"])  # type: ignore[call-overload]
    kind = stated.pop("model_type", "gemma4_text")
    if kind not in CONFIG_MAPPING:
        raise TargetError(f"transformers knows no model of type {kind}", where=draft.path, hint="install a newer one")
    text: PretrainedConfig = CONFIG_MAPPING[kind].from_dict(stated | {"num_kv_shared_layers": 0})
    return text


def without_keys(attention: Any) -> None:
    """Let a layer take the keys and values that it is given."""
    attention.is_kv_shared_layer, attention.store_full_length_kv = True, False
    for name in OWN_KEYS:
        if hasattr(attention, name):
            delattr(attention, name)


def layers_read(spec: Gemma4AssistantSpec, target: PreTrainedModel) -> dict[str, int]:
    """The layer of the target that each kind of the assistant's layers attends to: the last of its kind that keeps keys
    and values of its own."""
    text = target.config.get_text_config()
    kinds = list(getattr(text, "layer_types", None) or ())
    own = kinds[: len(kinds) - getattr(text, "num_kv_shared_layers", 0)]
    return {
        kind: max(i for i, k in enumerate(own) if k == kind) for kind in dict.fromkeys(spec.layer_types) if kind in own
    }


def _check_heads(draft: Draft, model: Gemma4AssistantModel, target: PreTrainedModel) -> None:
    """Raise `TargetError` unless every layer finds keys of its heads' width in the target, for a divisor of them."""
    read, layers = layers_read(model.spec, target), decoder_layers(decoder_of(target))
    for number, (kind, layer) in enumerate(zip(model.spec.layer_types, model.model.layers, strict=True)):
        theirs: Any = layers[read[kind]].self_attn if kind in read else None
        own, heads = layer.self_attn, model.model.config.num_attention_heads
        if theirs is None or theirs.head_dim != own.head_dim or heads % (theirs.k_proj.out_features // theirs.head_dim):
            raise TargetError(
                f"layer {number} of the assistant ({kind}) finds no keys and values in the target that fit it",
                where=draft.path,
                expected=f"a {kind} layer with heads {own.head_dim} wide, as in the Gemma-4 that it was trained with",
            )


def _check_ordering(draft: Draft, ordering: Tensor) -> None:
    if not torch.equal(ordering.sort().values, torch.arange(len(ordering), device=ordering.device)):
        raise TargetError(
            f"{ORDERING} does not have every token once",
            where=draft.path,
            hint="fetch the assistant's checkpoint again",
        )
