"""What block drafters have in common: the facts of the body that fills a block, its tensors, and how engines read it.

Keys and values of the context are made from hidden states of the target; the rows of the block are an anchor, the
newest token, and masks after it. The families of DFlash's descendants add heads of their own to this body.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from draftkit.errors import LayoutError
from draftkit.io.settings import setting
from draftkit.layout.architecture import (
    ACTIVATION,
    MAX_SIZE,
    SINK_TOKENS,
    Architecture,
    Capability,
    ParallelDrafting,
    Rope,
    check_range,
)
from draftkit.layout.decoder import Decoder, layer_keys, layer_tensors, rope_keys
from draftkit.layout.positions import PositionLimit, limit_of
from draftkit.layout.schema import Shape, TensorSchema, of_shapes
from draftkit.layout.target import default_block_layer_ids

NESTED = "dflash_config"  # the config key under which z-lab's layout has what only a block drafter has
MASK_FILE = "mask_embedding.pt"  # where engines look for a mask's embedding that is no row of the table
# What vLLM's classes compute in one way only (`qwen3_dflash.py`).
BODY_NEEDS = (
    ACTIVATION,
    SINK_TOKENS,
    Capability(
        "block-without-qk-norms", "a block without norms of queries and keys",
        "norms queries and keys of block drafters",
        lambda draft: not draft.decoder.qk_norm,
    ),
    Capability(
        "some-block-biases", "biases in some projections of a block",
        "gives a bias to all four attention projections or to none, and none to the MLP",
        lambda draft: draft.decoder.qkv_bias != draft.decoder.output_bias or draft.decoder.mlp_bias,
    ),
    Capability(
        "normed-last-state", "the state after the target's final norm",
        "reads the state after the target's last layer before the final norm",
        lambda draft: draft.last_state == "after_norm",
    ),
    Capability(
        "anchored-window", "a window counted from the anchor", "counts a window from each row",
        lambda draft: draft.window_rule == "anchor" and bool(draft.sliding_layers),
    ),
    Capability(
        "some-causal-layers", "a block that is causal in some layers",
        "makes all layers causal within the block, none, or those with a window",
        lambda draft: not draft.uniformly_causal,
    ),
    Capability(
        "mixed-block-windows", "layers with and without a window",
        "keeps all layers of a block in one group of its cache, and layers with and without a window are in two",
        lambda draft: len(set(draft.windows)) > 1,
    ),
    Capability(
        "block-own-tables", "a block with an embedding or an output layer of its own",
        "takes the target's embedding and output layer for a block drafter",
        lambda draft: draft.embed_tokens == "draft" or draft.lm_head == "draft",
    ),
    Capability(
        "block-other-width", "a block of another width than the target's",
        "takes the target's states to be as wide as the draft",
        lambda draft: draft.target_hidden_size != draft.decoder.hidden_size,
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BlockConvolution:
    """DFlash2's convolutions around attention and MLP."""

    conv_taps: int = setting("How far a convolution reaches.", unit="rows")
    conv_group_size: int = setting("How many channels share coefficients.", unit="channels")

    def __post_init__(self) -> None:
        check_range(self, MAX_SIZE, "conv_taps", "conv_group_size")

    def keys(self) -> dict[str, object]:
        """The sizes under the names that engines read."""
        return {"conv_kernel_size": self.conv_taps, "conv_group_size": self.conv_group_size}

    def tensors(self, decoder: Decoder) -> dict[str, Shape]:
        """The tensors of the convolutions of all layers. Raises `LayoutError` where groups of channels do not fill the
        width."""
        h, taps = decoder.hidden_size, self.conv_taps
        if h % self.conv_group_size:
            raise LayoutError(
                f"conv_group_size is {self.conv_group_size}", expected=f"a divisor of the draft's width {h}"
            )
        coefficients = 2 * taps * (h // self.conv_group_size)
        return {
            f"layers.{layer}.{part}_conv.{name}": shape
            for layer in range(decoder.num_hidden_layers)
            for part in ("attention", "mlp")
            for name, shape in (("base_kernel", (2, taps, h)), ("kernel_projection.weight", (coefficients, h)))
        }


@dataclass(frozen=True, kw_only=True)
class BlockDraft(Architecture):
    """The body of a block drafter."""

    NEEDS: ClassVar[tuple[Capability, ...]] = BODY_NEEDS
    whole_head: ClassVar = "prepare does not cut the heads of block drafters yet, whose tables are as long"

    decoder: Decoder
    vocab_size: int = setting("The tokens of the target's vocabulary.", unit="tokens")
    draft_vocab_size: int = setting(
        "The tokens that the draft proposes among, of the target's vocabulary.", unit="tokens"
    )
    target_hidden_size: int = setting("The width of the target's hidden states.", unit="features")
    aux_layer_ids: tuple[int, ...] = setting(
        "The target's layers whose states are read, ascending: i is the residual stream after i decoder "
        "layers, 0 the embedding's output."
    )
    last_state: Literal["before_norm", "after_norm"] = setting(
        "Whether the state after the target's last layer is read before or after the final norm."
    )
    slots: Literal["fill-in", "anchor-first"] = setting(
        "What the rows of a block predict. fill-in: each mask the token in its own place; anchor-first: each "
        "row, the anchor among them, the token after it."
    )
    block_size: int = setting("The rows of a block in training.", unit="rows")
    parallel: ParallelDrafting = field()
    causal_layers: tuple[int, ...] = setting("The layers in which a row does not see the later rows of its block.")
    window_rule: Literal["row", "anchor"] = setting(
        "Where a sliding window is counted from: each row, as vLLM serves it, or backwards from the anchor "
        "for all rows, as the speculators library trains it."
    )
    embed_tokens: Literal["draft", "target"] = setting(
        "Whose embedding it is: the draft's own, or the target's, borrowed when loaded."
    )
    lm_head: Literal["draft", "target"] = setting(
        "Whose output layer it is: the draft's own, or the target's, borrowed when loaded."
    )

    def __post_init__(self) -> None:
        check_range(self, MAX_SIZE, "target_hidden_size", "draft_vocab_size")
        check_ascending("aux_layer_ids", self.aux_layer_ids)
        if not self.aux_layer_ids:
            raise LayoutError("aux_layer_ids are empty", expected="the target's layers that the draft reads")
        check_ascending("causal_layers", self.causal_layers, self.decoder.num_hidden_layers)
        if self.draft_tokens < 1:
            raise LayoutError(f"block_size is {self.block_size}", expected="a block that drafts at least one token")

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
    def sink_tokens(self) -> int:
        return self.decoder.sink_tokens

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
    def max_positions(self) -> PositionLimit | None:
        return limit_of(rope_keys(self.rope))

    @property
    def feature_size(self) -> int:
        """Width of the target features of one position: A · target_hidden_size."""
        return self.target_hidden_size * self.states_read

    @property
    def sliding_layers(self) -> tuple[int, ...]:
        """The layers that have a window."""
        return tuple(layer for layer, window in enumerate(self.windows) if window is not None)

    @property
    def uniformly_causal(self) -> bool:
        """Whether all layers are causal within the block, none, or those with a window."""
        return self.causal_layers in ((), tuple(range(self.decoder.num_hidden_layers)), self.sliding_layers)

    @property
    def target_layer_ids(self) -> list[int]:
        """The captured layers as engines number them: by the layers whose outputs these states are, −1 for none."""
        return [i - 1 for i in self.aux_layer_ids]

    def head_tensors(self) -> dict[str, Shape]:
        """The tensors that the family adds to the body."""
        return {}

    def tensors(self) -> dict[str, TensorSchema]:
        if self.lm_head == "target" and self.reduced_vocabulary:
            raise LayoutError(
                f"lm_head is the target's, and the draft has {self.draft_vocab_size} of {self.vocab_size} tokens",
                expected="a head of the draft's own, with a row for each of them",
            )
        h = self.decoder.hidden_size
        tensors: dict[str, Shape] = {"fc.weight": (h, self.feature_size), "hidden_norm.weight": (h,)}
        for index in range(self.decoder.num_hidden_layers):
            tensors |= layer_tensors(self.decoder, f"layers.{index}.")
        tensors |= {"norm.weight": (h,)} | self.head_tensors()
        if self.embed_tokens == "draft":
            tensors["embed_tokens.weight"] = (self.vocab_size, h)
        if self.lm_head == "draft":
            tensors["lm_head.weight"] = (self.draft_vocab_size, h)
        schema = of_shapes(tensors)
        if self.reduced_vocabulary:
            schema["d2t"] = TensorSchema((self.draft_vocab_size,), ("I64",))
        return schema

    def head_keys(self) -> dict[str, object]:
        """The keys that the family adds to `dflash_config`."""
        return {}

    def nested_config(self) -> dict[str, object]:
        """`dflash_config`, as z-lab's drafts have it."""
        nested: dict[str, object] = {
            "mask_token_id": self.parallel.mask_token_id,
            "target_layer_ids": self.target_layer_ids,
        }
        if self.causal_layers != self.sliding_layers:
            nested["causal"] = bool(self.causal_layers)  # one value for all layers; else the sliding ones are causal
        return nested | self.head_keys()

    def body_config(self) -> dict[str, object]:
        """The config of the decoder layers and the block, in transformers' words for Qwen3."""
        decoder = self.decoder
        return {
            "model_type": "qwen3",
            "vocab_size": self.vocab_size,
            **layer_keys(decoder),
            "attention_bias": decoder.qkv_bias,
            "layer_types": decoder.layer_types,
            "sliding_window": decoder.sliding_window,
            "use_sliding_window": decoder.sliding_window is not None,
            "block_size": self.block_size,
            "tie_word_embeddings": False,
        } | rope_keys(decoder.rope)

    def engine_config(self) -> dict[str, object]:
        return self.body_config() | {
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self.target_hidden_size,
            "eagle_aux_hidden_state_layer_ids": list(self.aux_layer_ids),
            NESTED: self.nested_config(),
        }

    def card_facts(self) -> dict[str, str]:
        return {
            "target layers read": ", ".join(map(str, self.aux_layer_ids)),
            "block": f"{self.block_size} rows, {self.slots}",
        }

    def limitations(self) -> list[str]:
        length = self.rope.max_position_embeddings
        found = [
            f"Its block is made for {self.draft_tokens} draft tokens a round; it was not trained for more.",
            f"Its position embedding is made for {length:,} tokens; acceptance beyond is not known.",
        ]
        if self.reduced_vocabulary:
            left_out = self.vocab_size - self.draft_vocab_size
            found.append(f"It never proposes {left_out:,} of the target's {self.vocab_size:,} tokens.")
        return found


def check_ascending(name: str, ids: tuple[int, ...], end: int | None = None) -> None:
    """Raise `LayoutError` unless these layers are distinct and ascending, from 0 and below `end`."""
    if list(ids) != sorted(set(ids)) or (ids and (ids[0] < 0 or (end is not None and ids[-1] >= end))):
        most = "" if end is None else f" below {end}"
        raise LayoutError(f"{name} are {list(ids)}", expected=f"distinct layers ≥ 0{most} in ascending order")
