"""The spec of EAGLE-1-like drafts, in which `fc` joins token embedding and target feature at every step."""

from __future__ import annotations

from typing import Literal

from draftkit.layout.decoder import Decoder
from draftkit.layout.families.eagle import EagleSpec

Owner = Literal["draft", "target"]


def fusion_spec(
    decoder: Decoder,
    vocab_size: int,
    *,
    fusion_bias: bool,
    embed_tokens: Owner,
    lm_head: Owner = "target",
    draft_vocab_size: int | None = None,
    embedding_norm: bool = False,
    hidden_norm: bool = False,
    input_norm: bool = False,
    final_norm: bool = False,
    feedback: Literal["pre_norm", "post_norm"] = "pre_norm",
    logit_scale: float = 1.0,
) -> EagleSpec:
    """A draft that reads the target's last hidden state, of its own width; the defaults are EAGLE-1's."""
    return EagleSpec(
        decoder=decoder,
        vocab_size=vocab_size,
        draft_vocab_size=vocab_size if draft_vocab_size is None else draft_vocab_size,
        target_hidden_size=decoder.hidden_size,
        aux_layer_ids=None,
        token_entry="fusion",
        concatenation="embedding_hidden",
        fusion_bias=fusion_bias,
        feature_norm="none",
        embedding_norm=embedding_norm,
        hidden_norm=hidden_norm,
        input_norm=input_norm,
        norm_before_residual=False,
        final_norm=final_norm,
        feedback=feedback,
        logit_scale=logit_scale,
        embed_tokens=embed_tokens,
        lm_head=lm_head,
        parallel=None,
    )
