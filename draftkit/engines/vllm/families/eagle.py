"""EAGLE-style drafts in vLLM 0.32: `llama_eagle.py`, `llama_eagle3.py`, `llm_base_proposer.py`."""

from __future__ import annotations

from draftkit.layout.families.eagle import EagleSpec


def refusal(eagle: EagleSpec) -> str | None:
    """The first thing that vLLM's class for this draft (`llama_eagle.py`, `llama_eagle3.py`) computes otherwise."""
    decoder = eagle.decoder
    reasons = _unlike_eagle1(eagle) if eagle.token_entry == "fusion" else _unlike_eagle3(eagle)
    reasons |= {
        "vLLM concatenates the embedding first": eagle.concatenation != "embedding_hidden",
        f"vLLM's draft layers have silu, not {decoder.hidden_act}": decoder.hidden_act != "silu",
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def settings(eagle: EagleSpec) -> dict[str, object]:
    """That all tokens are drafted in one pass."""
    return {} if eagle.parallel is None else {"parallel_drafting": True}


def _unlike_eagle1(eagle: EagleSpec) -> dict[str, bool]:
    norms = eagle.embedding_norm or eagle.hidden_norm or eagle.input_norm or eagle.final_norm or eagle.decoder.qk_norm
    norms = norms or eagle.feature_norm != "none" or eagle.norm_before_residual
    return {
        "vLLM drops fc.bias": eagle.fusion_bias,
        "vLLM's EAGLE class has none of the norms of this draft": norms,
        "vLLM's EAGLE class has the whole vocabulary": eagle.reduced_vocabulary,
        "vLLM's EAGLE class reads the target's last state": eagle.aux_layer_ids is not None,
        "vLLM's EAGLE class takes the target's head, and its loader stops at another": eagle.lm_head == "draft",
        "vLLM's EAGLE class has no sliding window": eagle.decoder.sliding_window is not None,
    }


def _unlike_eagle3(eagle: EagleSpec) -> dict[str, bool]:
    decoder = eagle.decoder
    norms = eagle.embedding_norm and eagle.hidden_norm and eagle.final_norm
    return {
        "vLLM's EAGLE-3 class has no bias in fc": eagle.fusion_bias,
        "vLLM's EAGLE-3 class always norms embedding, hidden state and output": not norms,
        "vLLM's second model runner feeds captured layers to a draft that reads the last state": (
            eagle.aux_layer_ids is None
        ),
        "vLLM's EAGLE-3 class gives a bias to all four attention projections or to none": (
            not decoder.qk_norm and decoder.qkv_bias != decoder.output_bias
        ),
        "vLLM's EAGLE-3 class with norms of queries and keys has no biases in o_proj and the MLP": (
            decoder.qk_norm and (decoder.output_bias or decoder.mlp_bias)
        ),
        "vLLM keeps all layers of a draft in one group of its cache, and layers with and without a window are in two": (
            len(set(decoder.windows)) > 1
        ),
        "vLLM drafts in parallel with a mask_hidden only": eagle.parallel is not None and not eagle.parallel.mask_state,
    }
