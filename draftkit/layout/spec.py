"""What a draft is: every fact that decides which tokens it proposes.

The facts are orthogonal. `eagle`, `eagle3` and `p-eagle` are names for values of them, not kinds of their own:
`EagleSpec` describes all three, and one module builds all three. Every fact is stated; nothing is left to a
reader's default, because the defaults of engines disagree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from draftkit.errors import LayoutError
from draftkit.layout.dtypes import FLOATS
from draftkit.layout.records import from_dict, to_dict

MAX_REPEATS = 1_000  # layers or heads; a draft's schema lists the tensors of every one
MAX_SIZE = 1 << 31


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding, rotate-half layout.

    `base` is the effective one, with which the weights were trained; `declared_base` is what the source's config
    says (None: it says nothing). Several trainers ignore the number in the config, and engines believe it.
    `scaling` holds the other rope parameters under the names of transformers (`rope_type`, `factor`, ...).
    """

    base: float
    declared_base: float | None
    scaling: dict[str, object] | None
    max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Sizes and options of the decoder layers of a draft. All widths are numbers of features."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    rms_norm_eps: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_window: int | None
    rope: Rope

    def __post_init__(self) -> None:
        _check_range(self, MAX_REPEATS, "num_hidden_layers")

    @property
    def cached_numbers(self) -> int:
        """How many numbers the keys and values of one position are, over all layers."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class ParallelDrafting:
    """Drafting all K tokens in one pass: rows after the first hold the mask token.

    With `mask_state`, their hidden input is the learned vector `mask_hidden` of the checkpoint.
    """

    mask_token_id: int
    mask_state: bool


@dataclass(frozen=True, kw_only=True)
class EagleSpec:
    """A draft that reads the target's hidden states: EAGLE-1/2, HASS, EAGLE-3, P-EAGLE.

    - `aux_layer_ids`: captured target layers in convention S, ascending: id i is the residual stream after i decoder
      layers, before any norm. None: the target's last hidden state *after* its final norm.
    - `token_entry`: where the token embedding joins. `fusion`: `fc` reads [embedding, hidden] at every step (EAGLE-1).
      `attention`: layer 0's q/k/v read [embedding, hidden], and `fc` reads captured states only (EAGLE-3); without
      captured layers there is no `fc`.
    - `concatenation`: the order of those two halves.
    - `fusion_bias`: `fc` has a bias. `feature_norm`: an RMSNorm before `fc`, one over all captured states (`joint`) or
      one for each (`per_layer`).
    - `embedding_norm`, `hidden_norm`: that half is normed where it joins: before `fc` (`enorm`, `hnorm`) or in layer 0
      (`input_layernorm`, `hidden_norm`). `input_norm`: with `fusion`, layer 0 has the usual norm before attention
      (EAGLE-1 has none). Deeper layers always have it.
    - `norm_before_residual`: layer 0's residual is the normed hidden instead of the raw one.
    - `final_norm`: a norm before the head. `feedback`: whether the next step gets the layer output before or after it.
    - `embed_tokens`, `lm_head`: whose weights these are; `target` means borrowed when loaded.
    """

    decoder: Decoder
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    aux_layer_ids: tuple[int, ...] | None
    token_entry: Literal["fusion", "attention"]
    concatenation: Literal["embedding_hidden", "hidden_embedding"]
    fusion_bias: bool
    feature_norm: Literal["none", "joint", "per_layer"]
    embedding_norm: bool
    hidden_norm: bool
    input_norm: bool
    norm_before_residual: bool
    final_norm: bool
    feedback: Literal["pre_norm", "post_norm"]
    logit_scale: float
    embed_tokens: Literal["draft", "target"]
    lm_head: Literal["draft", "target"]
    parallel: ParallelDrafting | None

    def __post_init__(self) -> None:
        _check_range(self, MAX_SIZE, "target_hidden_size")
        ids = self.aux_layer_ids
        if ids is not None and (not ids or min(ids) < 0 or list(ids) != sorted(set(ids))):
            # Engines sort and de-duplicate the ids, which reorders or narrows what fc reads.
            raise LayoutError(f"aux_layer_ids are {list(ids)}", expected="distinct layers ≥ 0 in ascending order")

    @property
    def method(self) -> str:
        if self.parallel is not None:
            return "p-eagle"
        return "eagle" if self.token_entry == "fusion" else "eagle3"

    @property
    def feature_size(self) -> int:
        """Width of the target features that one row brings: A · target_hidden_size."""
        return self.target_hidden_size * (1 if self.aux_layer_ids is None else len(self.aux_layer_ids))

    @property
    def reduced_vocabulary(self) -> bool:
        return self.draft_vocab_size != self.vocab_size


@dataclass(frozen=True, kw_only=True)
class TargetFeatures:
    """PARD-2: target hidden states added to the embeddings of a causal LM.

    `layer_ids` index the `hidden_states` of transformers, order kept, negative from the end (-1 is after the norm).
    """

    layer_ids: tuple[int, ...]
    size: int
    scale: float
    projection_bias: bool


@dataclass(frozen=True, kw_only=True)
class CausalLMSpec:
    """A causal language model as draft: standalone, PARD (`parallel`), PARD-2 (`target_features`).

    `config` is its transformers configuration, verbatim. `head_ids`: the tokens that it proposes, ascending; None for
    all. The tensors are those of the whole vocabulary all the same, so that engines load the folder and ignore this;
    draftkit's runtime computes the logits of these tokens only.
    """

    config: dict[str, object]
    vocab_size: int
    parallel: ParallelDrafting | None
    target_features: TargetFeatures | None
    head_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        ids = self.head_ids
        if ids is not None and (
            not ids or list(ids) != sorted(set(ids)) or not 0 <= ids[0] <= ids[-1] < self.vocab_size
        ):
            raise LayoutError(
                f"the {len(ids)} head_ids are no tokens in order", expected=f"ascending ids below {self.vocab_size}"
            )

    @property
    def method(self) -> str:
        if self.target_features is not None:
            return "pard-2"
        return "draft-model" if self.parallel is None else "pard"


@dataclass(frozen=True, kw_only=True)
class MlpSpeculatorSpec:
    """IBM's MLP speculator: one embedding, projection, norm and head for each of `num_heads` steps.

    `tied`: all steps share embedding, norm and head, and steps from 1 share the projection.
    `scale_input`: the first state is normed and divided by √2. Reads the target's last normed hidden state.
    """

    target_hidden_size: int
    inner_size: int
    vocab_size: int
    num_heads: int
    tied: bool
    scale_input: bool
    top_k_per_head: tuple[int, ...]
    num_candidates: int

    def __post_init__(self) -> None:
        _check_range(self, MAX_REPEATS, "num_heads")

    @property
    def method(self) -> str:
        return "mlp-speculator"


@dataclass(frozen=True, kw_only=True)
class MedusaSpec:
    """Medusa: independent heads on the target's last normed hidden state; head h predicts the token h + 2 ahead.

    - `num_layers` residual blocks a head, each with weights of its own; `bias` on the blocks.
    - `lm_head`: the matrix to logits. `draft`: one for each head. `shared`: one of the draft's for all. `target`: the
      target's, borrowed when loaded.
    """

    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_heads: int
    num_layers: int
    bias: bool
    lm_head: Literal["draft", "shared", "target"]

    def __post_init__(self) -> None:
        _check_range(self, MAX_REPEATS, "num_heads", "num_layers")

    @property
    def method(self) -> str:
        return "medusa"


def _check_range(record: object, most: int, *names: str) -> None:
    for name in names:
        value = getattr(record, name)
        if not 1 <= value <= most:
            raise LayoutError(f"{name} is {value}", expected=f"1 to {most:,}")


Architecture = EagleSpec | CausalLMSpec | MlpSpeculatorSpec | MedusaSpec
KINDS: dict[str, type[Architecture]] = {
    "eagle": EagleSpec,
    "causal-lm": CausalLMSpec,
    "mlp-speculator": MlpSpeculatorSpec,
    "medusa": MedusaSpec,
}


@dataclass(frozen=True, kw_only=True)
class DraftSpec:
    """One draft: its architecture and the dtype of its weights (safetensors' name, as `F16`).

    `quantization`: the `quantization_config` of transformers, verbatim, of weights kept in another dtype (fp8).
    """

    architecture: Architecture
    dtype: str
    quantization: dict[str, object] | None = None

    @property
    def method(self) -> str:
        """The published name of this combination of facts: eagle, eagle3, p-eagle, draft-model, pard, ..."""
        return self.architecture.method

    @property
    def kind(self) -> str:
        return next(name for name, cls in KINDS.items() if isinstance(self.architecture, cls))

    def to_dict(self) -> dict[str, object]:
        """The spec as JSON values, every fact written out."""
        return {
            "kind": self.kind,
            "dtype": self.dtype,
            "quantization": self.quantization,
            "architecture": to_dict(self.architecture),
        }

    @classmethod
    def from_dict(cls, data: dict[str, object], where: object) -> DraftSpec:
        """Read what `to_dict` wrote. Raises `LayoutError` listing every missing, unknown or ill-typed fact."""
        kind, dtype, quantization = data.get("kind"), data.get("dtype"), data.get("quantization")
        keys = {"kind", "dtype", "quantization", "architecture"}
        is_quantization = quantization is None or isinstance(quantization, dict)
        if kind not in list(KINDS) or dtype not in FLOATS or set(data) != keys or not is_quantization:
            raise LayoutError(
                f"not a draft spec: kind {kind!r}, dtype {dtype!r}, keys {sorted(data)}",
                where=where,
                expected=f"kind of {sorted(KINDS)}, dtype of {list(FLOATS)}, quantization, architecture",
            )
        return cls(
            architecture=from_dict(KINDS[str(kind)], data["architecture"], where),
            dtype=str(dtype),
            quantization=cast("dict[str, object] | None", quantization),
        )
