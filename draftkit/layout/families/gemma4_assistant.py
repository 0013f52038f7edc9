"""Gemma-4's assistant: a small decoder that attends to its target's keys and values, and has none of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from draftkit.errors import LayoutError
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
    own, and is of the same kind, has cached. All tokens of a round are drafted at one position.

    - `config` is the assistant's, verbatim: engines build its layers from it.
    - `layer_types` as transformers calls them; `query_sizes`: numbers of a row's queries, in each layer.
    - `num_centroids` of the ordered embedding, 0 without it: each stands for as many tokens, `token_ordering` says
      which; the tokens of the best `selected_centroids` have logits, the others none.
    - `position`: what its queries are rotated by: the position of the target's `state` that they start from, or that of
      the newest `token`, one later. They see the target's keys up to the state either way.
    - `suppressed_tokens` are never drafted. `tied`: its output layer is its embedding, which has no other use.
    - `concatenation` of the target's embedding of a token and the state; `hidden_state` as in `HeadKind`.
    """

    NEEDS: ClassVar = ASSISTANT_NEEDS
    SERVED_AS: ClassVar = {"vllm": {"gemma4-assistant": "mtp"}, "llama.cpp": {"gemma4-assistant": "draft-mtp"}}
    closed: ClassVar = ("config",)
    whole_head: ClassVar = "engines build its output layer for all of the target's tokens"

    config: dict[str, object]
    vocab_size: int
    target_hidden_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    query_sizes: tuple[int, ...]
    attention_bias: bool
    num_centroids: int
    selected_centroids: int
    tied: bool
    suppressed_tokens: tuple[int, ...]
    concatenation: Concatenation
    hidden_state: HiddenState
    position: Position

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
