"""The facts of IBM's MLP speculator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from draftkit.io.settings import setting
from draftkit.layout.architecture import MAX_REPEATS, Architecture, check_range
from draftkit.layout.schema import Shape, TensorSchema, of_shapes


@dataclass(frozen=True, kw_only=True)
class MlpSpeculatorSpec(Architecture):
    """IBM's MLP speculator: one embedding, projection, norm and head for each of `num_heads` steps.

    `tied`: all steps share embedding, norm and head, and steps from 1 share the projection.
    `scale_input`: the first state is normed and divided by √2. Reads the target's last normed hidden state.
    """

    SERVED_AS: ClassVar = {"vllm": {"mlp-speculator": "mlp_speculator"}}
    whole_head: ClassVar = "MLP speculators have a head for each step, and no map from its rows to tokens"

    target_hidden_size: int = setting("The width of the target's hidden states.", unit="features")
    inner_size: int = setting("The width of the heads' states.", unit="features")
    vocab_size: int = setting("The tokens of the target's vocabulary.", unit="tokens")
    num_heads: int = setting("How many heads there are, one for each draft token.")
    tied: bool = setting("Whether all steps share embedding, norm and head, and steps from 1 share the projection.")
    scale_input: bool = setting("Whether the first state is normed and divided by √2.")
    top_k_per_head: tuple[int, ...] = setting("The branches of each head in a tree of candidates, which engines read.")
    num_candidates: int = setting("The candidates of a tree, which engines read.")

    def __post_init__(self) -> None:
        check_range(self, MAX_REPEATS, "num_heads")

    @property
    def method(self) -> str:
        return "mlp-speculator"

    @property
    def title(self) -> str:
        return "An MLP speculator: one small head for each position, on the target's last hidden state"

    @property
    def draft_tokens(self) -> int:
        return self.num_heads

    def passes(self, k: int) -> float:
        """How often the weights are read to draft `k` tokens: tied ones in every step, others once."""
        return k if self.tied else k / self.num_heads

    def tensors(self) -> dict[str, TensorSchema]:
        """One set of weights per step; tied copies are stored once, at the first index that owns them."""
        v, d = self.vocab_size, self.inner_size
        steps = range(1 if self.tied else self.num_heads)
        projections = range(min(2, self.num_heads) if self.tied else self.num_heads)
        tensors: dict[str, Shape] = {}
        for i in steps:
            tensors |= {f"speculator.emb.{i}.weight": (v, d), f"speculator.head.{i}.weight": (v, d)}
            tensors |= {f"speculator.ln.{i}.weight": (d,), f"speculator.ln.{i}.bias": (d,)}
        for i in projections:
            tensors[f"speculator.proj.{i}.weight"] = (d, self.target_hidden_size if i == 0 else d)
        return of_shapes(tensors)

    def engine_config(self) -> dict[str, object]:
        return {
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "model_type": "mlp_speculator",
            "vocab_size": self.vocab_size,
            "emb_dim": self.target_hidden_size,
            "inner_dim": self.inner_size,
            "n_predict": self.num_heads,
            "top_k_tokens_per_head": list(self.top_k_per_head),
            "n_candidates": self.num_candidates,
            "tie_weights": self.tied,
            "scale_input": self.scale_input,
        }

    def card_facts(self) -> dict[str, str]:
        return {"heads": str(self.num_heads)}
