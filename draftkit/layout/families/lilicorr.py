"""LiLiCorr: DFlash, also with DFlash2's convolutions, whose likeliest tokens a small transformer weighs against each
other.

Source: vLLM 0.32 `lilicorr.py`; ModelOpt exports it, SGLang loads the same names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from draftkit.io.settings import setting
from draftkit.layout.architecture import MAX_REPEATS, MAX_SIZE, Capability, check_range
from draftkit.layout.block import BODY_NEEDS, BlockConvolution, BlockDraft
from draftkit.layout.schema import Shape

FEATURES = 5  # of a candidate: its log-probability, three forms of it, and its rank
# What vLLM's class computes in one way only; it loads every tensor of the head or fails (`lilicorr.py`).
LILICORR_NEEDS = (
    *BODY_NEEDS,
    Capability(
        "weighed-from-anchor", "weighed candidates of the anchor's row",
        "drafts from masks alone in its LiLiCorr class",
        lambda draft: draft.slots != "fill-in",
    ),
    Capability(
        "weighed-vocabulary", "weighed candidates of a reduced vocabulary",
        "has the whole vocabulary in its LiLiCorr class",
        lambda draft: draft.reduced_vocabulary,
    ),
    Capability(
        "weighed-own-embeddings", "weighed candidates in the draft's own table",
        "embeds LiLiCorr's candidates with the target's table",
        lambda draft: draft.embed_tokens == "draft",
    ),
    Capability(
        "weighed-candidate-counts", "another number of weighed candidates than 1, 2, 4, 8, 16",
        "takes 1, 2, 4, 8, 16 candidates",
        lambda draft: draft.lilicorr_candidate_topk not in (1, 2, 4, 8, 16),
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LiLiCorrSpec(BlockDraft):
    """A LiLiCorr draft, its head's facts under the names of the published configs.

    Layers of attention read the likeliest tokens of each row; vectors score each step from candidate to candidate.
    """

    NEEDS: ClassVar = LILICORR_NEEDS
    SERVED_AS: ClassVar = {"vllm": {"lilicorr": "dflash"}, "sglang": {"lilicorr": "DFLASH"}}

    convolution: BlockConvolution | None
    lilicorr_candidate_topk: int = setting("The likeliest tokens of each row that the head reads.", unit="tokens")
    lilicorr_hidden_size: int = setting("The width of the head's layers; 0 for that of the draft.", unit="features")
    lilicorr_num_layers: int = setting("How many layers the head has.")
    lilicorr_num_heads: int = setting("The attention heads of the head's layers.")
    lilicorr_mlp_ratio: float = setting("The width within the head's MLPs, as a multiple of its layers' width.")
    lilicorr_factor_dim: int = setting("The width of the vectors that score steps between candidates.", unit="features")
    lilicorr_vector_eps: float = setting("The least length by which those vectors are divided.")
    lilicorr_logit_scale: float = setting("The factor on the scores of steps between candidates.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, MAX_REPEATS, "lilicorr_num_layers", "lilicorr_num_heads")
        check_range(self, MAX_SIZE, "lilicorr_candidate_topk", "lilicorr_factor_dim")

    @property
    def method(self) -> str:
        return "lilicorr"

    @property
    def title(self) -> str:
        return "A LiLiCorr draft: a block drafter whose candidates a small transformer weighs against each other"

    @property
    def head_size(self) -> int:
        """Width of the head's layers."""
        return self.lilicorr_hidden_size or self.decoder.hidden_size

    def head_tensors(self) -> dict[str, Shape]:
        convolutions = {} if self.convolution is None else self.convolution.tensors(self.decoder)
        return convolutions | {f"lilicorr.{name}": shape for name, shape in self._lattice_tensors()}

    def _lattice_tensors(self) -> Iterator[tuple[str, Shape]]:
        h, c, heads = self.decoder.hidden_size, self.head_size, self.lilicorr_num_heads
        if c != h:
            yield from _linear("token_proj", h, c)
        for name in ("pass_hidden_proj", "context_proj"):
            yield from _linear(name, h, c)
        yield from (("feature_norm.weight", (FEATURES,)), ("feature_norm.bias", (FEATURES,)))
        yield from _linear("feature_mlp.up_proj", FEATURES, c)
        yield from _linear("feature_mlp.down_proj", c, c)
        yield "slot_embedding", (1, 1, self.block_size - 1, 1, c)
        yield "rank_embedding", (1, 1, 1, self.lilicorr_candidate_topk, c)
        yield "relative_slot_bias", (heads, 2 * self.block_size - 1)
        yield "same_slot_bias", (heads,)
        for layer in range(self.lilicorr_num_layers):
            yield from self._layer_tensors(f"layers.{layer}.")
        yield from (("output_norm.weight", (c,)), ("anchor_norm.weight", (c,)))
        yield from _linear("factor_input_proj", 3 * c, c)
        for name in ("out_head", "in_head", "anchor_out_head"):
            yield from _linear(name, c, self.lilicorr_factor_dim)

    def _layer_tensors(self, prefix: str) -> Iterator[tuple[str, Shape]]:
        c, wide = self.head_size, int(self.head_size * self.lilicorr_mlp_ratio)
        yield from ((f"{prefix}{norm}.weight", (c,)) for norm in ("attn_norm", "mlp_norm"))
        yield from ((f"{prefix}attn.in_proj_weight", (3 * c, c)), (f"{prefix}attn.in_proj_bias", (3 * c,)))
        yield from _linear(f"{prefix}attn.out_proj", c, c)
        yield from _linear(f"{prefix}mlp.up_proj", c, wide)
        yield from _linear(f"{prefix}mlp.down_proj", wide, c)

    def head_keys(self) -> dict[str, object]:
        convolution = {} if self.convolution is None else self.convolution.keys()
        names = (name for name in vars(self) if name.startswith("lilicorr_"))
        return (
            convolution
            | {"block_size": self.block_size, "lilicorr_enabled": True, "projector_type": "lilicorr"}
            | {name: getattr(self, name) for name in names}
        )

    def engine_config(self) -> dict[str, object]:
        own_head = self.lm_head == "draft"
        return super().engine_config() | {"architectures": ["LiLiCorrDraftModel"], "has_own_lm_head": own_head}


def _linear(name: str, inputs: int, outputs: int) -> tuple[tuple[str, Shape], ...]:
    return (f"{name}.weight", (outputs, inputs)), (f"{name}.bias", (outputs,))
