"""DFlash, DSpark, DFlash2, JetSpec: block drafters, which fill a block of masked tokens in one pass.

The published names are values of the facts: DSpark adds a Markov head that lets each draft depend on the one before,
DFlash2 convolutions within the block and a selector of candidates, JetSpec is causal within the block. Tensor names are
those of z-lab/dflash and deepseek-ai/DeepSpec, which vLLM loads without a prefix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from draftkit.errors import LayoutError
from draftkit.io.settings import setting
from draftkit.layout.architecture import MAX_SIZE, Capability, check_range
from draftkit.layout.block import BODY_NEEDS, MASK_FILE, BlockConvolution, BlockDraft
from draftkit.layout.schema import Shape

TITLES = {
    "dflash": "A DFlash draft: it fills a block of masked tokens in one pass over hidden states of the target",
    "dspark": "A DSpark draft: a block drafter whose tokens are drawn one after the other from one pass",
    "dflash2": "A DFlash2 draft: a block drafter with convolutions and a selector among candidates",
}
VLLM_CLASSES = {"dflash": "DFlashDraftModel", "dspark": "Qwen3DSparkModel", "dflash2": "DFlash2DraftModel"}
# What vLLM's classes compute in one way only: `qwen3_dflash.py`, `qwen3_dspark.py`, `qwen3_dflash2.py`.
DFLASH_NEEDS = (
    *BODY_NEEDS,
    Capability(
        "scaled-tables", "scaled embeddings or capped logits",
        "scales neither embeddings nor caps logits of this draft",
        lambda draft: draft.method != "dflash2" and (draft.embedding_scale != 1.0 or draft.logit_softcap != 0.0),
    ),
    Capability(
        "gated-markov", "a gated or recurrent Markov head",
        "has DSpark's plain Markov head only, and the draft's is gated or recurrent",
        lambda draft: draft.method != "dflash2" and draft.markov is not None and draft.markov.markov_type != "vanilla",
    ),
    Capability(
        "markov-mask-embedding", "an embedding of the mask besides the table and a Markov head",
        "has no embedding of the mask besides the table in its DSpark class",
        lambda draft: draft.method == "dspark" and draft.mask_embedding,
    ),
    Capability(
        "convolutions-or-selector", "one of convolutions and selector",
        "has both convolutions and a selector in its DFlash2 class",
        lambda draft: draft.method == "dflash2" and (draft.convolution is None or draft.selector is None),
    ),
    Capability(
        "selector-with-markov", "convolutions or a selector with DSpark's heads",
        "drafts from masks alone in its DFlash2 class, without DSpark's heads",
        lambda draft: (
            draft.method == "dflash2"
            and (draft.slots != "fill-in" or draft.markov is not None or draft.confidence != "none")
        ),
    ),
    Capability(
        "selector-vocabulary", "a reduced vocabulary with a selector", "has the whole vocabulary in its DFlash2 class",
        lambda draft: draft.method == "dflash2" and draft.reduced_vocabulary,
    ),
    Capability(
        "causal-windows-alone", "windows that are causal within the block beside layers that are not",
        "takes windows that are causal within the block for causality in the layers without a window too",
        lambda draft: (
            draft.method != "dspark"
            and 0 < len(draft.causal_layers) < draft.decoder.num_hidden_layers
        ), layout="speculators",
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MarkovHead:
    """A bias on the logits from the token before (DeepSpec, `markov_head.py`)."""

    markov_type: Literal["vanilla", "gated", "rnn"] = setting(
        "vanilla is that bias alone, gated weighs it by the row's output, rnn keeps a state over the block."
    )
    markov_rank: int = setting("The width of the table from which the bias is computed.", unit="features")

    def __post_init__(self) -> None:
        check_range(self, MAX_SIZE, "markov_rank")


@dataclass(frozen=True, kw_only=True)
class CandidateSelector:
    """DFlash2's walk over the likeliest tokens of each row, with scores between neighbors."""

    selector_rank: int = setting("The rank of the scores between candidates of neighboring rows.", unit="features")
    selector_top_k: int = setting("The candidates of each row.", unit="tokens")

    def __post_init__(self) -> None:
        check_range(self, MAX_SIZE, "selector_rank", "selector_top_k")

    def keys(self) -> dict[str, object]:
        """The sizes under the names that engines read."""
        return {"selector_rank": self.selector_rank, "selector_top_k": self.selector_top_k}


@dataclass(frozen=True, kw_only=True)
class DFlashSpec(BlockDraft):
    """A block drafter: DFlash, DSpark, DFlash2, JetSpec.

    `markov` and `confidence` are DSpark's heads, `convolution` and `selector` are DFlash2's parts.
    """

    NEEDS: ClassVar = DFLASH_NEEDS
    SERVED_AS: ClassVar = {
        "vllm": {"dflash": "dflash", "dspark": "dspark", "dflash2": "dflash"},
        "sglang": {"dflash": "DFLASH", "dspark": "DSPARK", "dflash2": "DFLASH"},
        "llama.cpp": {"dflash": "draft-dflash", "dspark": "draft-dspark", "dflash2": "draft-dflash"},
    }

    mask_embedding: bool = setting(
        "Whether the embedding of the mask token is a tensor of the draft's own, not a row of the table."
    )
    attention_sinks: bool = setting("Whether each head has one more score, which attends to nothing.")
    value_scale: float = setting("The factor on the attention's values.")
    markov: MarkovHead | None
    confidence: Literal["none", "hidden", "hidden_and_token"] = setting(
        "What DSpark's head tells a draft's chance of acceptance from: the row's output (hidden), or also the"
        " token before (hidden_and_token)."
    )
    convolution: BlockConvolution | None
    selector: CandidateSelector | None
    embedding_scale: float = setting("The factor on rows of the embedding.")
    logit_scale: float = setting("The factor on the logits.")
    logit_softcap: float = setting("The cap on the logits, by tanh; 0 for none.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.confidence == "hidden_and_token" and self.markov is None:
            raise LayoutError("the confidence head reads the Markov head's table, and there is none")
        if self.selector is not None and self.selector.selector_top_k > self.draft_vocab_size:
            raise LayoutError(
                f"selector_top_k is {self.selector.selector_top_k}",
                expected=f"at most the {self.draft_vocab_size} tokens of the draft vocabulary",
            )

    @property
    def method(self) -> str:
        if self.convolution is not None or self.selector is not None:
            return "dflash2"
        plain = self.slots == "fill-in" and self.markov is None and self.confidence == "none"
        return "dflash" if plain else "dspark"

    @property
    def title(self) -> str:
        return TITLES[self.method]

    @property
    def most_draft_tokens(self) -> None:
        """None, for any number: no tensor has the size of the block, and vLLM adds as many masks as tokens are
        wanted."""
        return None

    @property
    def side_files(self) -> Mapping[str, Mapping[str, str]]:
        """The file from which vLLM reads the embedding of the mask."""
        return {MASK_FILE: {"embedding": "mask_embedding"}} if self.mask_embedding else {}

    def head_tensors(self) -> dict[str, Shape]:
        h, decoder = self.decoder.hidden_size, self.decoder
        tensors: dict[str, Shape] = {"mask_embedding": (h,)} if self.mask_embedding else {}
        if self.attention_sinks:
            names = (f"layers.{layer}.self_attn.attention_sink_bias" for layer in range(decoder.num_hidden_layers))
            tensors |= dict.fromkeys(names, (decoder.num_attention_heads,))
        if self.convolution is not None:
            tensors |= self.convolution.tensors(decoder)
        if self.markov is not None:
            tensors |= self._markov_tensors(self.markov)
        if self.confidence != "none":
            tensors |= {"confidence_head.proj.weight": (1, self._confidence_size), "confidence_head.proj.bias": (1,)}
        if self.selector is not None:
            table = self.vocab_size, self.selector.selector_rank
            tensors |= {f"candidate_selector.{side}_codebook": table for side in ("predecessor", "successor")}
            tensors["candidate_selector.hidden_projection.weight"] = (self.selector.selector_rank, h)
        return tensors

    def _markov_tensors(self, head: MarkovHead) -> dict[str, Shape]:
        h, r = self.decoder.hidden_size, head.markov_rank
        tensors: dict[str, Shape] = {
            "markov_w1.weight": (self.vocab_size, r),
            "markov_w2.weight": (self.draft_vocab_size, r),
        }
        if head.markov_type == "gated":
            tensors |= {"gate_proj.weight": (r, h + r), "gate_proj.bias": (r,)}
        if head.markov_type == "rnn":
            tensors |= {"joint_proj.weight": (3 * r, 2 * r + h), "joint_proj.bias": (3 * r,)}
        return {f"markov_head.{name}": shape for name, shape in tensors.items()}

    @property
    def _confidence_size(self) -> int:
        r = self.markov.markov_rank if self.markov is not None and self.confidence == "hidden_and_token" else 0
        return self.decoder.hidden_size + r

    def head_keys(self) -> dict[str, object]:
        keys: dict[str, object] = {"attention_sink_bias": True} if self.attention_sinks else {}
        if self.value_scale != 1.0:
            keys["attention_value_scale"] = self.value_scale
        return keys | self._dflash2_keys() if self.method == "dflash2" else keys

    def _dflash2_keys(self) -> dict[str, object]:
        parts = (part.keys() for part in (self.convolution, self.selector) if part is not None)
        return {key: value for keys in parts for key, value in keys.items()} | {
            "input_embedding_scale": self.embedding_scale,
            "output_multiplier": self.logit_scale,
            "final_logit_softcapping": self.logit_softcap,
        }

    def engine_config(self) -> dict[str, object]:
        config = super().engine_config() | {
            "architectures": [VLLM_CLASSES[self.method]],
            "logit_scale": self.logit_scale,
        }
        if self.method == "dspark":
            config |= self.dspark_keys() | {
                "sample_from_anchor": self.slots == "anchor-first",  # vLLM stops at the key within dflash_config
                "dspark_bonus_anchor": self.slots == "fill-in",
            }
        return config

    def dspark_keys(self) -> dict[str, object]:
        """What DeepSpec's layout has at the top of the config, the slots apart, which are always the same there."""
        markov = self.markov
        return {
            "mask_token_id": self.parallel.mask_token_id,
            "target_layer_ids": self.target_layer_ids,
            "markov_rank": 0 if markov is None else markov.markov_rank,
            "markov_head_type": "vanilla" if markov is None else markov.markov_type,
            "enable_confidence_head": self.confidence != "none",
            "confidence_head_with_markov": self.confidence == "hidden_and_token",
        }
