"""XPress: DFlash whose block a causal head refines, pass by pass.

Source: speculators 0.9 `models/xpress`; vLLM's serving class of a later release has the same head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from draftkit.io.settings import setting
from draftkit.layout.architecture import MAX_SIZE, Capability, check_range
from draftkit.layout.block import BODY_NEEDS, BlockDraft
from draftkit.layout.schema import Shape


@dataclass(frozen=True, kw_only=True)
class XPressSpec(BlockDraft):
    """An XPress draft.

    A causal head puts a bias on all rows' logits, from the tokens before them, the rows' outputs and their mean.
    Drafting repeats it, each pass on the tokens of the pass before.
    """

    NEEDS: ClassVar = (
        Capability(
            "refined-block", "a causal head that refines the block", "has no class for XPress",
            lambda draft: True,
        ),
        Capability(
            "refined-vocabulary", "a reduced vocabulary with such a head", "refuses a reduced vocabulary with XPress",
            lambda draft: draft.reduced_vocabulary,
        ),
        *BODY_NEEDS,
    )  # fmt: skip
    SERVED_AS: ClassVar = {"vllm": {"xpress": "dflash"}}

    xpress_rank: int = setting("The width of the head's causal mixer.", unit="features")
    xpress_mlp_hidden: int = setting("The width within the head's MLP.", unit="features")
    num_jacobi_passes: int = setting("How often the head refines a block.", unit="passes")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, MAX_SIZE, "xpress_rank", "xpress_mlp_hidden", "num_jacobi_passes")

    @property
    def method(self) -> str:
        return "xpress"

    @property
    def title(self) -> str:
        return "An XPress draft: a block drafter whose tokens a causal head refines in several passes"

    def head_tensors(self) -> dict[str, Shape]:
        h, r, mlp = self.decoder.hidden_size, self.xpress_rank, self.xpress_mlp_hidden
        return {
            "refiner_head.token_embed.weight": (self.vocab_size, r),
            "refiner_head.down_h.weight": (r, h),
            "refiner_head.down_g.weight": (r, h),
            "refiner_head.in_proj.weight": (r, 3 * r),
            "refiner_head.mix_l": (r, self.block_size, self.block_size),
            "refiner_head.mlp_gate.weight": (mlp, r),
            "refiner_head.mlp_up.weight": (mlp, r),
            "refiner_head.mlp_down.weight": (r, mlp),
            "refiner_head.readout.weight": (self.draft_vocab_size, r),
        }

    def xpress_keys(self) -> dict[str, object]:
        """The head's sizes as the published drafts have them, at the top of the config."""
        return {
            "xpress_block_size": self.block_size,
            "xpress_rank": self.xpress_rank,
            "xpress_mlp_hidden": self.xpress_mlp_hidden,
            "xpress_num_passes": self.num_jacobi_passes,
        }

    def engine_config(self) -> dict[str, object]:
        return super().engine_config() | self.xpress_keys()
