"""A target's own multi-token prediction head: DeepSeek, GLM, Qwen3-Next, MiMo and others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from draftkit.io.dtypes import FLOATS
from draftkit.layout.architecture import MAX_REPEATS, Architecture, check_range
from draftkit.layout.mtp import Concatenation, Feedback, HeadParts, HiddenState, Modules
from draftkit.layout.schema import Shape, TensorSchema


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the head as its target's checkpoint has it: its name, safetensors' name of its dtype, its shape."""

    name: str
    dtype: str
    shape: Shape


@dataclass(frozen=True, kw_only=True)
class MtpSpec(Architecture):
    """Multi-token prediction heads, under the names that they have in their target's checkpoint.

    - `config` is the target's, verbatim: engines build the heads from it. `weights`: what the checkpoint has of them.
    - `prefixes` of the heads' tensors, and the `parts` below; None where draftkit does not run this kind of head.
    - `concatenation`, `hidden_state`, `feedback`, `zero_first_embedding`, `modules`: as in `HeadKind`.
    """

    SERVED_AS: ClassVar = {"vllm": {"mtp": "mtp"}, "sglang": {"mtp": "NEXTN"}, "llama.cpp": {"mtp": "draft-mtp"}}
    closed: ClassVar = ("config",)  # draftkit builds the head from its target's own
    whole_head: ClassVar = "its output layer is the target's"

    config: dict[str, object]
    weights: tuple[StoredTensor, ...]
    vocab_size: int
    target_hidden_size: int
    num_modules: int
    prefixes: tuple[str, ...]
    parts: HeadParts | None
    concatenation: Concatenation
    hidden_state: HiddenState
    feedback: Feedback
    zero_first_embedding: bool
    modules: Modules

    def __post_init__(self) -> None:
        check_range(self, MAX_REPEATS, "num_modules")

    @property
    def not_run(self) -> str | None:
        kind = self.config.get("model_type")
        return f"the multi-token prediction heads of {kind}" if self.parts is None else None

    def passes(self, k: int) -> float:
        """One module in each step."""
        return k / self.num_modules

    @property
    def modules_run(self) -> int:
        """How many of the modules draft."""
        return self.num_modules if self.modules == "in_turn" else 1

    @property
    def usual_tokens(self) -> int:
        """One for each module that drafts: most were trained for no further one, on states of their own."""
        return self.modules_run

    @property
    def method(self) -> str:
        return "mtp"

    @property
    def title(self) -> str:
        heads = "head" if self.num_modules == 1 else f"{self.num_modules} heads"
        return f"The multi-token prediction {heads} that came with the target"

    def tensors(self) -> dict[str, TensorSchema]:
        return {
            stored.name: TensorSchema(stored.shape, FLOATS if stored.dtype in FLOATS else (stored.dtype,))
            for stored in self.weights
        }

    def engine_config(self) -> dict[str, object]:
        return dict(self.config)

    def card_facts(self) -> dict[str, str]:
        return {"heads": str(self.num_modules)}
