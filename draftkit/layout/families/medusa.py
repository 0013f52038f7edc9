"""The facts of Medusa drafts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from draftkit.io.settings import setting
from draftkit.layout.architecture import MAX_REPEATS, Architecture, Capability, check_range
from draftkit.layout.schema import Shape, TensorSchema, of_shapes

# What vLLM's class leaves uninitialized, or its loader stops at (`medusa.py`).
MEDUSA_NEEDS = (
    Capability(
        "heads-without-output-layer", "heads on the target's output layer",
        "does not borrow the target's head in its Medusa class, and leaves its own uninitialized",
        lambda draft: draft.lm_head == "target",
    ),
    Capability(
        "heads-vocabulary", "heads with a reduced vocabulary",
        "has a token_map in its Medusa class, and its loader stops at it",
        lambda draft: draft.reduced_vocabulary,
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MedusaSpec(Architecture):
    """Medusa: independent heads on the target's last normed hidden state; head h predicts the token h + 2 ahead."""

    NEEDS: ClassVar = MEDUSA_NEEDS
    SERVED_AS: ClassVar = {"vllm": {"medusa": "medusa"}}
    whole_head: ClassVar = "Medusa has a head for each position, and engines do not load its token_map"

    target_hidden_size: int = setting("The width of the target's hidden states.", unit="features")
    vocab_size: int = setting("The tokens of the target's vocabulary.", unit="tokens")
    draft_vocab_size: int = setting(
        "The tokens that the draft proposes among, of the target's vocabulary.", unit="tokens"
    )
    num_heads: int = setting("How many heads there are, one for each draft token.")
    num_layers: int = setting("The residual blocks of a head, each with weights of its own.")
    bias: bool = setting("Whether the residual blocks have a bias.")
    lm_head: Literal["draft", "shared", "target"] = setting(
        "The matrix to logits: one of the draft's for each head (draft), one of the draft's for all (shared),"
        " or the target's, borrowed when loaded."
    )

    def __post_init__(self) -> None:
        check_range(self, MAX_REPEATS, "num_heads", "num_layers")

    @property
    def method(self) -> str:
        return "medusa"

    @property
    def title(self) -> str:
        return "Medusa heads: independent heads on the target's last hidden state"

    @property
    def draft_tokens(self) -> int:
        return self.num_heads

    @property
    def reduced_vocabulary(self) -> bool:
        return self.draft_vocab_size != self.vocab_size

    def passes(self, k: int) -> float:
        """How often the weights are read to draft `k` tokens: each token reads one head."""
        return k / self.num_heads

    def tensors(self) -> dict[str, TensorSchema]:
        h = self.target_hidden_size
        tensors: dict[str, Shape] = {}
        for head in range(self.num_heads):
            for layer in range(self.num_layers):
                tensors[f"blocks.{head}.layers.{layer}.weight"] = (h, h)
                if self.bias:
                    tensors[f"blocks.{head}.layers.{layer}.bias"] = (h,)
            if self.lm_head == "draft":
                tensors[f"lm_heads.{head}.weight"] = (self.draft_vocab_size, h)
        if self.lm_head == "shared":
            tensors["lm_head.weight"] = (self.draft_vocab_size, h)
        schema = of_shapes(tensors)
        if self.reduced_vocabulary:
            schema["token_map"] = TensorSchema((self.draft_vocab_size,), ("I64",))
        return schema

    def engine_config(self) -> dict[str, object]:
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": self.target_hidden_size,
            "vocab_size": self.vocab_size,
            "truncated_vocab_size": self.draft_vocab_size,
            "num_heads": self.num_heads,
            "num_hidden_layers": self.num_layers,
            "medusa_fc_bias": self.bias,
            "original_lm_head": self.lm_head != "draft",
        }

    def card_facts(self) -> dict[str, str]:
        return {"heads": str(self.num_heads)}
