"""Domino: DFlash whose logits a recurrent head corrects, from one token of the block to the next.

Source: sgl-project/SpecForge `modeling/draft/domino.py`; NeMo Automodel and ModelOpt have the same head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from draftkit.io.settings import setting
from draftkit.layout.architecture import MAX_SIZE, Capability, check_range
from draftkit.layout.block import BlockDraft
from draftkit.layout.schema import Shape


@dataclass(frozen=True, kw_only=True)
class DominoSpec(BlockDraft):
    """A Domino draft.

    A recurrent network reads the embeddings of the block's tokens; its state and the row's output correct the logits.
    """

    NEEDS: ClassVar = (
        Capability(
            "recurrent-correction", "a recurrent head that corrects logits", "has no class for Domino",
            lambda draft: True,
        ),
    )  # fmt: skip

    gru_hidden_dim: int = setting("The width of the recurrent network's state.", unit="features")
    emb_dim: int = setting("The features through which the correction of the logits goes.", unit="features")
    pure_draft_prefix_len: int = setting("The first predicting rows, whose logits are not corrected.", unit="rows")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, MAX_SIZE, "gru_hidden_dim", "emb_dim")

    @property
    def method(self) -> str:
        return "domino"

    @property
    def title(self) -> str:
        return "A Domino draft: a block drafter whose logits a recurrent head corrects from token to token"

    def head_tensors(self) -> dict[str, Shape]:
        h, states = self.decoder.hidden_size, self.gru_hidden_dim
        return {
            "prefix_gru.weight_ih_l0": (3 * states, h),
            "prefix_gru.weight_hh_l0": (3 * states, states),
            "embed_proj.0.weight": (self.emb_dim, h + states),
            "embed_proj.2.weight": (self.draft_vocab_size, self.emb_dim),
        }

    def head_keys(self) -> dict[str, object]:
        return {
            "projector_type": "domino",
            "emb_dim": self.emb_dim,
            "gru_hidden_dim": self.gru_hidden_dim,
            "pure_draft_prefix_len": self.pure_draft_prefix_len,
            "shift_label": self.slots == "anchor-first",
        }
