"""Gemma-4's assistant: a small decoder that attends to its target's keys and values, and has none of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from draftkit.errors import LayoutError
from draftkit.io.settings import setting
from draftkit.layout.architecture import MAX_REPEATS, MAX_SIZE, Architecture, Capability, check_range
from draftkit.layout.mtp import Concatenation, HiddenState
from draftkit.layout.schema import Shape, TensorSchema, of_shapes

ORDERING = "masked_embedding.token_ordering"
Position = Literal["state", "token"]

# What vLLM's class computes in one way, whatever the config says (`gemma4_mtp.py`).
ASSISTANT_NEEDS = (
    Capability(
        "shared-keys-concatenation", "another concatenation of a draft over the target's keys",
        "has concatenation embedding_hidden in its Gemma4MTP, this assistant another",
        lambda draft: draft.concatenation != "embedding_hidden",
    ),
    Capability(
        "shared-keys-state", "another hidden state of a draft over the target's keys",
        "has hidden_state after_norm in its Gemma4MTP, this assistant another",
        lambda draft: draft.hidden_state != "after_norm",
    ),
    Capability(
        "shared-keys-position", "another position of a draft over the target's keys",
        "has position state in its Gemma4MTP, this assistant another",
        lambda draft: draft.position != "state",
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Gemma4AssistantSpec(Architecture):
    """Gemma-4's assistant (`Gemma4MTP` of vLLM, `Gemma4AssistantForCausalLM` of transformers).

    Its layers have queries alone: each attends to what the last layer of the target that keeps keys and values of its
    own, and is of the same kind, has cached. All tokens of a round are drafted at one position, and see the target's
    keys up to the state whatever `position` is. Each centroid stands for as many tokens, `token_ordering` says which.
    """

    NEEDS: ClassVar = ASSISTANT_NEEDS
    SERVED_AS: ClassVar = {"vllm": {"gemma4-assistant": "mtp"}}
    closed: ClassVar = ("config",)
    whole_head: ClassVar = "engines build its output layer for all of the target's tokens"

    config: dict[str, object] = setting("The assistant's configuration, verbatim: engines build its layers from it.")
    vocab_size: int = setting("The tokens of the target's vocabulary.", unit="tokens")
    target_hidden_size: int = setting("The width of the target's hidden states.", unit="features")
    hidden_size: int = setting("The width of the layers' input and output.", unit="features")
    intermediate_size: int = setting("The width within the MLP.", unit="features")
    layer_types: tuple[str, ...] = setting("The kind of each layer, as transformers names it.")
    query_sizes: tuple[int, ...] = setting("The numbers of a row's queries, in each layer.", unit="features")
    attention_bias: bool = setting("Whether the attention's projections have a bias.")
    num_centroids: int = setting("The centroids of the ordered embedding, 0 without it.")
    selected_centroids: int = setting(
        "How many of the best centroids have their tokens' logits computed; the others' tokens have none."
    )
    tied: bool = setting("Whether its output layer is its embedding, which has no other use.")
    suppressed_tokens: tuple[int, ...] = setting("The tokens that are never drafted.")
    concatenation: Concatenation = setting(
        "The order in which the token's embedding and the hidden state are concatenated."
    )
    hidden_state: HiddenState = setting("Which state of the target is read: before or after its final norm.")
    position: Position = setting(
        "What its queries are rotated by: the position of the target's state that they start from, or that of"
        " the newest token, one later."
    )

    def __post_init__(self) -> None:
        check_range(self, MAX_SIZE, "vocab_size", "target_hidden_size", "hidden_size", "intermediate_size")
        if not 1 <= len(self.layer_types) == len(self.query_sizes) <= MAX_REPEATS:
            raise LayoutError(f"{len(self.layer_types)} layer_types and {len(self.query_sizes)} query_sizes")
        centroids, selected = self.num_centroids, self.selected_centroids
        if centroids and (self.vocab_size % centroids or not 1 <= selected <= centroids):
            raise LayoutError(
                f"{selected} of {centroids} centroids are selected, for {self.vocab_size} tokens",
                expected="centroids that stand for as many tokens each, and not more selected than there are",
            )
        if any(not 0 <= token < self.vocab_size for token in self.suppressed_tokens):
            raise LayoutError("suppressed_tokens has ids that are no tokens", expected=f"0 to {self.vocab_size - 1}")

    @property
    def method(self) -> str:
        return "gemma4-assistant"

    @property
    def title(self) -> str:
        return "A Gemma-4 assistant: a small decoder over the keys and values of its target"

    def tensors(self) -> dict[str, TensorSchema]:
        h, target = self.hidden_size, self.target_hidden_size
        shapes: dict[str, Shape] = {
            "pre_projection.weight": (h, 2 * target),
            "post_projection.weight": (target, h),
            "model.embed_tokens.weight": (self.vocab_size, h),
            "model.norm.weight": (h,),
        }
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab_size, h)
        for layer, size in enumerate(self.query_sizes):
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in self._layer(size).items()}
        schema = of_shapes(shapes)
        if self.num_centroids:
            schema["masked_embedding.centroids.weight"] = TensorSchema((self.num_centroids, h))
            schema[ORDERING] = TensorSchema((self.vocab_size,), ("I64", "I32"))
        return schema

    def _layer(self, queries: int) -> dict[str, Shape]:
        h, inner = self.hidden_size, self.intermediate_size
        shapes: dict[str, Shape] = {
            "self_attn.q_proj.weight": (queries, h),
            "self_attn.o_proj.weight": (h, queries),
            "self_attn.q_norm.weight": (self.head_dim(queries),),
            "mlp.gate_proj.weight": (inner, h),
            "mlp.up_proj.weight": (inner, h),
            "mlp.down_proj.weight": (h, inner),
            "layer_scalar": (1,),
        }
        norms = "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
        biases: dict[str, Shape] = {"self_attn.q_proj.bias": (queries,), "self_attn.o_proj.bias": (h,)}
        return shapes | {f"{norm}.weight": (h,) for norm in norms} | (biases if self.attention_bias else {})

    def head_dim(self, queries: int) -> int:
        """The width of a head, of a layer with so many numbers of queries."""
        text = self.config.get("text_config")
        heads = text.get("num_attention_heads") if isinstance(text, dict) else None
        if not isinstance(heads, int) or heads < 1 or queries % heads:
            raise LayoutError(f"num_attention_heads is {heads}, for {queries} numbers of queries")
        return queries // heads

    def engine_config(self) -> dict[str, object]:
        return dict(self.config)

    def card_facts(self) -> dict[str, str]:
        return {"layers": str(len(self.layer_types))}

    def limitations(self) -> list[str]:
        return ["it reads the target's keys and values, and fits no other target than the one it was trained with"]
