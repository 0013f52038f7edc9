"""A target's multi-token prediction head: modules of two norms, a projection, a decoder layer like the target's own,
and a last norm. Of several, the draft steps take the next in turn, or the first one alone, as the kind has it.

Shapes: B sequences, T rows, H the target's width, V its vocabulary. Row j pairs the target's state at position p with
the embedding of the token at p + 1, and predicts the token at p + 2. The decoder layer, its rotary positions and the
norms are of the target's own class in transformers. Source: the `*_mtp.py` of vLLM 0.32's models.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from draftkit.errors import TargetError
from draftkit.layout.families.mtp import MtpSpec
from draftkit.layout.folder import Draft
from draftkit.layout.mtp import COPIES
from draftkit.models.chain import ChainModel, ChainOutput
from draftkit.models.rounded_inputs import input_formats, round_inputs_of
from draftkit.models.weights import check_sizes, load_stored
from draftkit.targets.attention import Sight, compresses, narrow
from draftkit.targets.finite import require_finite
from draftkit.targets.pretrained import empty_model
from draftkit.targets.recurrent import attends
from draftkit.targets.rope import give_rows_their_rope
from draftkit.targets.states import decoder_of

OUTER = "embedding_norm", "hidden_norm", "projection", "final_norm"


class MtpModel(ChainModel):
    """The modules of a target's head, built from its spec; embedding and output layer are set by `borrow`.

    `attention` names the attention function. Modules that share a part hold the same one.
    """

    def __init__(self, spec: MtpSpec, config: PretrainedConfig, attention: str, dtype: torch.dtype):
        super().__init__()
        self.spec = spec
        self.layer_config = one_layer(config)
        self.heads = nn.ModuleList(MtpHead(spec, config, attention, dtype) for _ in range(spec.modules_run))
        if len(spec.prefixes) == 1:
            for head in self.heads:
                for part in OUTER:
                    setattr(head, part, getattr(self.heads[0], part))
        narrow(self, Sight(spec.sliding_window, spec.sink_tokens))
        self.embed_tokens: nn.Module | None = None
        self.lm_head: nn.Module | None = None

    def borrow(self, embed_tokens: nn.Module, lm_head: nn.Module) -> None:
        """Use the target's embedding and head."""
        self.embed_tokens, self.lm_head = embed_tokens, lm_head

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def forward(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, *, step: int = 0, **attention: Any
    ) -> ChainOutput:
        """Compute as `ChainModel.forward` does, by the module whose turn it is in a draft step."""
        assert self.embed_tokens is not None, "borrow() comes first"
        embedding = self.embed_tokens(tokens).to(hidden.dtype)
        if self.spec.zero_first_embedding:
            embedding = embedding * (positions != 0)[..., None]
        output: ChainOutput = self.heads[step % len(self.heads)](embedding, hidden, positions, **attention)
        return output

    def logits(self, head_input: Tensor) -> Tensor:
        assert self.lm_head is not None, "borrow() comes first"
        logits: Tensor = self.lm_head(head_input)
        return logits

    @property
    def logit_scale(self) -> float:
        return 1.0

    @property
    def window(self) -> int | None:
        slides = (getattr(self.layer_config, "layer_types", None) or [""])[0] == "sliding_attention"
        windows = self.spec.sliding_window, self.layer_config.sliding_window if slides else None
        return min((window for window in windows if window is not None), default=None)

    @property
    def target_ids(self) -> None:
        """None: MTP heads draft in the target's vocabulary."""


class MtpHead(nn.Module):
    """One module. `decoder` is a model of the target's class with its one layer, without embedding and norm."""

    def __init__(self, spec: MtpSpec, config: PretrainedConfig, attention: str, dtype: torch.dtype):
        super().__init__()
        self.spec = spec
        layer_config = one_layer(config)
        trunk: Any = decoder_of(empty_model(config, torch.float32))
        norm, h, eps = type(trunk.norm), spec.target_hidden_size, layer_config.rms_norm_eps
        self.embedding_norm, self.hidden_norm, self.final_norm = (norm(h, eps=eps).to(dtype) for _ in range(3))
        self.projection = nn.Linear(2 * h, h, bias=False, dtype=dtype)
        decoder = type(trunk)._from_config(layer_config, dtype=dtype, attn_implementation=attention)
        self.decoder: Any = _without_embedding_and_norm(decoder)
        give_rows_their_rope(self.decoder)
        self._compresses = compresses(self.decoder)

    def forward(self, embedding: Tensor, hidden: Tensor, positions: Tensor, **attention: Any) -> ChainOutput:
        pair = self.embedding_norm(embedding), self.hidden_norm(hidden)
        ordered = pair if self.spec.concatenation == "embedding_hidden" else pair[::-1]
        output = self.decoder(
            inputs_embeds=self.projection(torch.cat(ordered, dim=-1)),
            position_ids=positions,
            past_key_values=attention["kv"].latents if self._compresses and "kv" in attention else None,
            use_cache=False,
            **attention,
        ).last_hidden_state
        normed = self.final_norm(output)
        return ChainOutput(normed, normed if self.spec.feedback == "post_norm" else output)


def load_mtp(draft: Draft, target: PreTrainedModel, *, attention: str, dtype: torch.dtype | None = None) -> MtpModel:
    """A target's head. `attention` names the attention function; `dtype` None is the target's.

    Raises `TargetError` for the head of another target.
    """
    spec = draft.spec.architecture.expect(MtpSpec)
    check_sizes(draft, spec.target_hidden_size, target)
    with torch.device(target.device):
        model = MtpModel(spec, target.config, attention, dtype or target.dtype)
    fill_mtp(model, load_stored(draft, target.device), draft.path)
    _round_inputs(model, draft)
    model.borrow(target.get_input_embeddings(), target.get_output_embeddings())
    return model.eval().requires_grad_(False)


def _round_inputs(model: MtpModel, draft: Draft) -> None:
    """Have the linear layers round their inputs as the target's quantization says; experts, which are one tensor here,
    read theirs as they are."""
    formats = input_formats(draft)
    for index, head in enumerate(model.heads):
        names, prefix = _names(model.spec, index)
        parts = {
            name.removesuffix(".weight"): getattr(head, part.removesuffix(".weight")) for part, name in names.items()
        }
        layer = head.get_submodule("decoder.layers.0")
        parts |= {f"{prefix}{name}": inner for name, inner in layer.named_modules()}
        for module, (format, scale) in formats.items():
            round_inputs_of(parts.get(module), format, scale)


def fill_mtp(model: MtpModel, tensors: Mapping[str, Tensor], where: Path) -> None:
    """Give a head its weights, by their names in the target's checkpoint; in float32, as it is trained, its parameters
    stay the same ones.

    Raises `TargetError`, naming `where` they are from, for a layer that does not fit the target's class.
    """
    for index, head in enumerate(model.heads):
        names, prefix = _names(model.spec, index)
        _fill_layer(head, model.layer_config, _layer(tensors, names, prefix), where)
        head.load_state_dict({part: tensors[name] for part, name in names.items()}, strict=False)
    require_finite(model.state_dict().items(), where)


def _fill_layer(head: Any, config: PretrainedConfig, tensors: Mapping[str, Tensor], where: Path) -> None:
    """The decoder layer by its own names. What transformers keeps in float32 is so, whatever the dtype."""
    unread = {  # which a model of its class has, and a head does not
        "embed_tokens.weight": torch.zeros(1, config.hidden_size),
        "norm.weight": torch.zeros(config.hidden_size),
    }
    loaded, info = type(head.decoder).from_pretrained(
        None,
        config=config,
        state_dict={f"layers.0.{name}": tensor for name, tensor in tensors.items()} | unread,
        dtype=head.projection.weight.dtype,
        output_loading_info=True,
    )
    if wrong := sorted(info["missing_keys"] | info["unexpected_keys"]):
        raise TargetError(f"the head's layer does not fit the target's class: {', '.join(wrong[:5])}", where=where)
    weight = head.projection.weight
    state = {
        name: tensor.to(weight.device) for name, tensor in _without_embedding_and_norm(loaded).state_dict().items()
    }
    head.decoder.load_state_dict(state, assign=weight.dtype != torch.float32)


def _without_embedding_and_norm(decoder: Any) -> Any:
    """A decoder without embedding and last norm, which are the target's and the head's."""
    decoder.embed_tokens, decoder.norm = nn.Identity(), nn.Identity()
    return decoder


def stored_mtp(model: MtpModel, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The part of a head's `state_dict` that is its own, by the names in the target's checkpoint."""
    stored: dict[str, Tensor] = {}
    for index, head in enumerate(model.heads):
        names, prefix = _names(model.spec, index)
        layers = f"heads.{index}.decoder.layers."
        inner = {n.removeprefix(f"heads.{index}.decoder."): t for n, t in state.items() if n.startswith(layers)}
        stored |= {name: state[f"heads.{index}.{part}"] for part, name in names.items()}
        layer = revert_weight_conversion(head.decoder, inner)
        stored |= {prefix + name.removeprefix("layers.0."): tensor for name, tensor in layer.items()}
    return stored


def _names(spec: MtpSpec, index: int) -> tuple[dict[str, str], str]:
    """The parts of a module around its decoder layer with their names in a checkpoint, and what those of the layer
    begin with."""
    assert spec.parts is not None
    prefix = spec.prefixes[min(index, len(spec.prefixes) - 1)]
    outer = {f"{part}.weight": f"{prefix}{getattr(spec.parts, part)}.weight" for part in OUTER}
    return outer, prefix + spec.parts.block.format(index=index)


def _layer(tensors: Mapping[str, Tensor], outer: Mapping[str, str], prefix: str) -> dict[str, Tensor]:
    """The tensors that belong to a decoder layer and are not copies of the target's tables."""
    others = set(outer.values())
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix) and name not in others and not name.endswith(tuple(COPIES))
    }


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
