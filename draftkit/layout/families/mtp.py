"""A target's own multi-token prediction head: DeepSeek, GLM, Qwen3-Next, MiMo and others."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from draftkit.io.dtypes import FLOATS, QUANTIZED
from draftkit.io.settings import setting
from draftkit.layout.architecture import (
    MAX_REPEATS,
    SINK_TOKENS,
    Architecture,
    Capability,
    check_range,
    check_window,
    narrowing_sinks,
    narrowing_window,
)
from draftkit.layout.mtp import COPIES, Concatenation, Feedback, HeadParts, HiddenState, Modules, head_kind
from draftkit.layout.mtp_layer import Sizes, shapes_around, shapes_of_layer
from draftkit.layout.schema import Shape, TensorSchema
from draftkit.layout.stored_weights import module_of, modules_with_scales


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the head as its target's checkpoint has it: its name, safetensors' name of its dtype, its shape."""

    name: str
    dtype: str
    shape: Shape


@dataclass(frozen=True, kw_only=True)
class MtpSpec(Architecture):
    """Multi-token prediction heads, under the names that they have in their target's checkpoint.

    `parts` is None where draftkit does not run this kind of head.
    """

    SERVED_AS: ClassVar = {"vllm": {"mtp": "mtp"}, "sglang": {"mtp": "NEXTN"}, "llama.cpp": {"mtp": "draft-mtp"}}
    NEEDS: ClassVar = (
        Capability(
            "head-window", "a window that its target does not have",
            "builds the heads with the windows of their target",
            lambda draft: draft.sliding_window is not None,
        ),
        SINK_TOKENS,
    )  # fmt: skip
    closed: ClassVar = ("config",)  # draftkit builds the head from its target's own
    whole_head: ClassVar = "its output layer is the target's"

    config: dict[str, object] = setting("The target's configuration, verbatim: engines build the heads from it.")
    weights: tuple[StoredTensor, ...] = setting("What the checkpoint has of the heads.")
    vocab_size: int = setting("The tokens of the target's vocabulary.", unit="tokens")
    target_hidden_size: int = setting("The width of the target's hidden states.", unit="features")
    num_modules: int = setting("How many heads there are.")
    prefixes: tuple[str, ...] = setting("The prefixes of the heads' tensors.")
    parts: HeadParts | None
    concatenation: Concatenation = setting(
        "The order in which the token's embedding and the hidden state are concatenated."
    )
    hidden_state: HiddenState = setting("Which state of the target is read: before or after its final norm.")
    feedback: Feedback = setting("Which state the next step reads: after the head's last norm or before.")
    zero_first_embedding: bool = setting("Whether the embedding beside the state of position 0 is zero.")
    modules: Modules = setting("The head of each draft step, of several: the next in turn, or always the first.")
    sliding_window: int | None = narrowing_window()
    sink_tokens: int = narrowing_sinks()

    def __post_init__(self) -> None:
        check_range(self, MAX_REPEATS, "num_modules")
        check_window(self.sliding_window, self.sink_tokens)

    @property
    def not_run(self) -> str | None:
        kind = self.config.get("model_type")
        return f"the multi-token prediction heads of {kind}" if self.parts is None else None

    def passes(self, k: int) -> float:
        """How often the modules' weights are read to draft `k` tokens: one module in each step."""
        return k / self.num_modules

    @property
    def tokens_in_turn(self) -> int:
        return self.num_modules

    @property
    def modules_run(self) -> int:
        """How many of the modules draft: all where they take turns, else the first."""
        return self.num_modules if self.modules == "in_turn" else 1

    @property
    def windows(self) -> tuple[int | None, ...]:
        return () if self.sliding_window is None else (self.sliding_window,) * self.num_modules

    @property
    def usual_tokens(self) -> int:
        """One for each module that drafts: most were trained for no further one, on states of their own."""
        return self.modules_run

    @property
    def shares_head(self) -> bool:
        return True

    @property
    def method(self) -> str:
        return "mtp"

    @property
    def title(self) -> str:
        heads = "head" if self.num_modules == 1 else f"{self.num_modules} heads"
        return f"The multi-token prediction {heads} that came with the target"

    def tensors(self) -> dict[str, TensorSchema]:
        """What the target's configuration says that heads of a kind that draftkit runs have; of others, what there is.

        Quantized weights are what they are where their scales lie beside them.
        """
        known = self._known()
        stored = {tensor.name: tensor for tensor in self.weights}
        scaled = modules_with_scales(stored)
        schema = {}
        for name, shape in known.items():
            if name in stored or module_of(name) not in scaled:
                schema[name] = _schema(shape, stored.get(name), scaled)
        for name, tensor in stored.items():
            if not known or (module_of(name) in scaled and f"{module_of(name)}.weight" in known):
                schema.setdefault(name, _schema(tensor.shape, tensor, scaled))
        return schema

    def _known(self) -> dict[str, Sizes]:
        """The tensors of the heads with their shapes; nothing where draftkit does not know them."""
        kind = head_kind(self.config)
        if self.parts is None or kind is None:
            return {}
        known: dict[str, Sizes] = {}
        for index in range(self.num_modules):
            prefix = self.prefixes[min(index, len(self.prefixes) - 1)]
            block = prefix + self.parts.block.format(index=index)
            found = [stored.name.removeprefix(block) for stored in self.weights if stored.name.startswith(block)]
            around = shapes_around(self.parts, self.target_hidden_size)
            known |= {prefix + name: shape for name, shape in around.items()}
            known |= {block + name: shape for name, shape in shapes_of_layer(kind, self.config, found).items()}
            known |= {block + name: (self.vocab_size, self.target_hidden_size) for name in COPIES if name in found}
        return known

    def engine_config(self) -> dict[str, object]:
        return dict(self.config)

    def card_facts(self) -> dict[str, str]:
        return {"heads": str(self.num_modules)}


def _schema(sizes: Sizes, stored: StoredTensor | None, scaled: Collection[str]) -> TensorSchema:
    """The schema of a tensor with these sizes; a size that is not known is the stored one."""
    if stored is None:
        return TensorSchema(tuple(size or 0 for size in sizes))
    plain = stored.dtype in FLOATS or module_of(stored.name) not in scaled
    if not plain and stored.dtype not in QUANTIZED:
        return TensorSchema(stored.shape, (stored.dtype,))  # packed
    known = len(sizes) == len(stored.shape)
    shape = tuple(own if size is None else size for size, own in zip(sizes, stored.shape, strict=True)) if known else ()
    return TensorSchema(shape or tuple(size or 0 for size in sizes), FLOATS if plain else QUANTIZED)
