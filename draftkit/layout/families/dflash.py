"""DFlash, DSpark, DFlash2, JetSpec: block drafters, which fill a block of masked tokens in one pass.

Keys and values of the context are made from hidden states of the target; the rows of the block are an anchor, the
newest token, and masks after it. The published names are values of the facts: DSpark adds a Markov head that lets each
draft depend on the one before, DFlash2 convolutions within the block and a selector of candidates, JetSpec is causal
within the block. Tensor names are those of z-lab/dflash and deepseek-ai/DeepSpec, which vLLM loads without a prefix.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from draftkit.errors import LayoutError
from draftkit.layout.architecture import MAX_SIZE, Architecture, ParallelDrafting, check_range
from draftkit.layout.decoder import Decoder, Rope, layer_keys, layer_tensors, rope_keys
from draftkit.layout.positions import longest_sequence
from draftkit.layout.schema import Shape, TensorSchema, of_shapes
from draftkit.layout.target import default_block_layer_ids

TITLES = {
    "dflash": "A DFlash draft: it fills a block of masked tokens in one pass over hidden states of the target",
    "dspark": "A DSpark draft: a block drafter whose tokens are drawn one after the other from one pass",
    "dflash2": "A DFlash2 draft: a block drafter with convolutions and a selector among candidates",
}
VLLM_CLASSES = {"dflash": "DFlashDraftModel", "dspark": "Qwen3DSparkModel", "dflash2": "DFlash2DraftModel"}


@dataclass(frozen=True, kw_only=True)
class MarkovHead:
    """A bias on the logits from the token before, through a table of `markov_rank` numbers per token.

    `markov_type`: `vanilla` is that bias alone, `gated` weighs it by the row's output, `rnn` keeps a state over the
    block (DeepSpec, `markov_head.py`).
    """

    markov_type: Literal["vanilla", "gated", "rnn"]
    markov_rank: int

    def __post_init__(self) -> None:
        check_range(self, MAX_SIZE, "markov_rank")


@dataclass(frozen=True, kw_only=True)
class BlockConvolution:
    """DFlash2's convolutions around attention and MLP: over `conv_taps` rows, coefficients shared by `conv_group_size`
    channels."""

    conv_taps: int
    conv_group_size: int

    def __post_init__(self) -> None:
        check_range(self, MAX_SIZE, "conv_taps", "conv_group_size")


@dataclass(frozen=True, kw_only=True)
class CandidateSelector:
    """DFlash2's walk over the `selector_top_k` likeliest tokens of each row, with scores of rank `selector_rank`
    between neighbors."""

    selector_rank: int
    selector_top_k: int

    def __post_init__(self) -> None:
        check_range(self, MAX_SIZE, "selector_rank", "selector_top_k")


@dataclass(frozen=True, kw_only=True)
class DFlashSpec(Architecture):
    """A block drafter: DFlash, DSpark, DFlash2, JetSpec.

    - `aux_layer_ids`: captured target layers in convention S, ascending: id i is the residual stream after i decoder
      layers, 0 the embedding's output. `last_state`: whether the state after the last layer, where it is among them, is
      read before or after the target's final norm.
    - `slots`: what the rows of a block predict. `fill-in`: each mask the token in its own place, the anchor nothing.
      `anchor-first`: each row, the anchor among them, the token after it.
    - `block_size`: rows of a block in training. `parallel.mask_token_id`: the token in the place of masks.
      `mask_embedding`: its embedding is a tensor of the draft's own, not a row of the table.
    - `causal_layers`: the layers in which a row does not see the later rows of its block. `window_rule`: where a
      sliding window is counted from: each `row`, as served by vLLM and SGLang, or the `anchor` for all rows.
    - `attention_sinks`: one more score per head. `value_scale`: a factor on the values.
    - `markov`, `confidence`: DSpark's heads. The latter tells the chance of acceptance of a row's draft from the row's
      output (`hidden`), and from the token before (`hidden_and_token`).
    - `convolution`, `selector`: DFlash2's parts.
    - `embedding_scale`, `logit_scale`, `logit_softcap` (0: none): as applied to the tables' rows and the logits.
    - `embed_tokens`, `lm_head`: whose weights these are; `target` means borrowed when loaded.
    """

    SERVED_AS: ClassVar = {
        "vllm": {"dflash": "dflash", "dspark": "dspark", "dflash2": "dflash"},
        "sglang": {"dflash": "DFLASH", "dspark": "DSPARK"},
    }

    decoder: Decoder
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    aux_layer_ids: tuple[int, ...] = field()
    last_state: Literal["before_norm", "after_norm"]
    slots: Literal["fill-in", "anchor-first"]
    block_size: int
    parallel: ParallelDrafting = field()
    mask_embedding: bool
    causal_layers: tuple[int, ...]
    window_rule: Literal["row", "anchor"]
    attention_sinks: bool
    value_scale: float
    markov: MarkovHead | None
    confidence: Literal["none", "hidden", "hidden_and_token"]
    convolution: BlockConvolution | None
    selector: CandidateSelector | None
    embedding_scale: float
    logit_scale: float
    logit_softcap: float
    embed_tokens: Literal["draft", "target"]
    lm_head: Literal["draft", "target"]

    def __post_init__(self) -> None:
        check_range(self, MAX_SIZE, "target_hidden_size", "draft_vocab_size")
        _check_ascending("aux_layer_ids", self.aux_layer_ids)
        if not self.aux_layer_ids:
            raise LayoutError("aux_layer_ids are empty", expected="the target's layers that the draft reads")
        _check_ascending("causal_layers", self.causal_layers, self.decoder.num_hidden_layers)
        if self.draft_tokens < 1:
            raise LayoutError(f"block_size is {self.block_size}", expected="a block that drafts at least one token")
        if self.confidence == "hidden_and_token" and self.markov is None:
            raise LayoutError("the confidence head reads the Markov head's table, and there is none")
        if self.convolution is not None and self.decoder.hidden_size % self.convolution.conv_group_size:
            raise LayoutError(
                f"conv_group_size is {self.convolution.conv_group_size}",
                expected=f"a divisor of the draft's width {self.decoder.hidden_size}",
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
    def rope(self) -> Rope:
        return self.decoder.rope

    def usual_layers(self, num_target_layers: int) -> tuple[tuple[int, ...], ...]:
        own = default_block_layer_ids(num_target_layers, self.decoder.num_hidden_layers)
        return own, *super().usual_layers(num_target_layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        return self.decoder.windows

    @property
    def reduced_vocabulary(self) -> bool:
        return self.draft_vocab_size != self.vocab_size

    @property
    def draft_tokens(self) -> int:
        return self.block_size - 1 if self.slots == "fill-in" else self.block_size

    @property
    def fixed_length(self) -> bool:
        return len(self.causal_layers) < self.decoder.num_hidden_layers

    @property
    def states_read(self) -> int:
        return len(self.aux_layer_ids)

    @property
    def max_positions(self) -> int | None:
        return longest_sequence(rope_keys(self.rope))

    @property
    def feature_size(self) -> int:
        """Width of the target features of one position: A · target_hidden_size."""
        return self.target_hidden_size * self.states_read

    def tensors(self) -> dict[str, TensorSchema]:
        if self.lm_head == "target" and self.reduced_vocabulary:
            raise LayoutError(
                f"lm_head is the target's, and the draft has {self.draft_vocab_size} of {self.vocab_size} tokens",
                expected="a head of the draft's own, with a row for each of them",
            )
        h, decoder = self.decoder.hidden_size, self.decoder
        tensors: dict[str, Shape] = {"fc.weight": (h, self.feature_size), "hidden_norm.weight": (h,)}
        for index in range(decoder.num_hidden_layers):
            tensors |= layer_tensors(decoder, f"layers.{index}.")
            if self.attention_sinks:
                tensors[f"layers.{index}.self_attn.attention_sink_bias"] = (decoder.num_attention_heads,)
            if self.convolution is not None:
                tensors |= self._convolution_tensors(self.convolution, f"layers.{index}.")
        tensors["norm.weight"] = (h,)
        if self.mask_embedding:
            tensors["mask_embedding"] = (h,)
        if self.markov is not None:
            tensors |= self._markov_tensors(self.markov)
        if self.confidence != "none":
            tensors |= {"confidence_head.proj.weight": (1, self._confidence_size), "confidence_head.proj.bias": (1,)}
        if self.selector is not None:
            table = self.vocab_size, self.selector.selector_rank
            tensors |= {f"candidate_selector.{side}_codebook": table for side in ("predecessor", "successor")}
            tensors["candidate_selector.hidden_projection.weight"] = (self.selector.selector_rank, h)
        if self.embed_tokens == "draft":
            tensors["embed_tokens.weight"] = (self.vocab_size, h)
        if self.lm_head == "draft":
            tensors["lm_head.weight"] = (self.draft_vocab_size, h)
        schema = of_shapes(tensors)
        if self.reduced_vocabulary:
            schema["d2t"] = TensorSchema((self.draft_vocab_size,), ("I64",))
        return schema

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

    def _convolution_tensors(self, convolution: BlockConvolution, prefix: str) -> dict[str, Shape]:
        h, taps = self.decoder.hidden_size, convolution.conv_taps
        coefficients = 2 * taps * (h // convolution.conv_group_size)
        return {
            f"{prefix}{part}_conv.{name}": shape
            for part in ("attention", "mlp")
            for name, shape in (("base_kernel", (2, taps, h)), ("kernel_projection.weight", (coefficients, h)))
        }

    @property
    def _confidence_size(self) -> int:
        r = self.markov.markov_rank if self.markov is not None and self.confidence == "hidden_and_token" else 0
        return self.decoder.hidden_size + r

    def engine_config(self) -> dict[str, object]:
        decoder = self.decoder
        outputs = [i - 1 for i in self.aux_layer_ids]  # engines number the layers whose outputs these states are
        nested: dict[str, object] = {"mask_token_id": self.parallel.mask_token_id, "target_layer_ids": outputs}
        if self.causal_layers != self.sliding_layers:
            nested["causal"] = bool(self.causal_layers)  # one value for all layers; else the sliding ones are causal
        if self.attention_sinks:
            nested["attention_sink_bias"] = True
        if self.value_scale != 1.0:
            nested["attention_value_scale"] = self.value_scale
        if self.method == "dflash2":
            nested |= self._dflash2_keys()
        config: dict[str, object] = {
            "architectures": [VLLM_CLASSES[self.method]],
            "model_type": "qwen3",
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            **layer_keys(decoder),
            "attention_bias": decoder.qkv_bias,
            "layer_types": decoder.layer_types,
            "sliding_window": decoder.sliding_window,
            "use_sliding_window": decoder.sliding_window is not None,
            "target_hidden_size": self.target_hidden_size,
            "block_size": self.block_size,
            "dflash_config": nested,
            "eagle_aux_hidden_state_layer_ids": list(self.aux_layer_ids),
            "logit_scale": self.logit_scale,
            "tie_word_embeddings": False,
        } | rope_keys(decoder.rope)
        return config | self._dspark_keys() if self.method == "dspark" else config

    def _dspark_keys(self) -> dict[str, object]:
        markov, anchor_first = self.markov, self.slots == "anchor-first"
        return {
            "mask_token_id": self.parallel.mask_token_id,
            "target_layer_ids": [i - 1 for i in self.aux_layer_ids],
            "sample_from_anchor": anchor_first,
            "dspark_bonus_anchor": not anchor_first,
            "markov_rank": 0 if markov is None else markov.markov_rank,
            "markov_head_type": "vanilla" if markov is None else markov.markov_type,
            "enable_confidence_head": self.confidence != "none",
            "confidence_head_with_markov": self.confidence == "hidden_and_token",
        }

    def _dflash2_keys(self) -> dict[str, object]:
        keys: dict[str, object] = {"output_multiplier": self.logit_scale}
        if self.convolution is not None:
            keys |= {
                "conv_kernel_size": self.convolution.conv_taps,
                "conv_group_size": self.convolution.conv_group_size,
            }
        if self.selector is not None:
            keys |= {"selector_rank": self.selector.selector_rank, "selector_top_k": self.selector.selector_top_k}
        return keys | {
            "input_embedding_scale": self.embedding_scale,
            "final_logit_softcapping": self.logit_softcap,
        }

    @property
    def sliding_layers(self) -> tuple[int, ...]:
        """The layers that have a window."""
        return tuple(layer for layer, window in enumerate(self.windows) if window is not None)

    def card_facts(self) -> dict[str, str]:
        return {
            "target layers read": ", ".join(map(str, self.aux_layer_ids)),
            "block": f"{self.block_size} rows, {self.slots}",
        }

    def limitations(self) -> list[str]:
        length = self.rope.max_position_embeddings
        found = [
            f"Its block is made for {self.draft_tokens} draft tokens a round; it cannot draft more.",
            f"Its position embedding is made for {length:,} tokens; acceptance beyond is not known.",
        ]
        if self.reduced_vocabulary:
            left_out = self.vocab_size - self.draft_vocab_size
            found.append(f"It never proposes {left_out:,} of the target's {self.vocab_size:,} tokens.")
        return found


def _check_ascending(name: str, ids: tuple[int, ...], end: int | None = None) -> None:
    if list(ids) != sorted(set(ids)) or (ids and (ids[0] < 0 or (end is not None and ids[-1] >= end))):
        most = "" if end is None else f" below {end}"
        raise LayoutError(f"{name} are {list(ids)}", expected=f"distinct layers ≥ 0{most} in ascending order")
