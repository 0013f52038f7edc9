"""What vLLM 0.32's block drafters share: a body that computes some things in one way only (`qwen3_dflash.py`)."""

from __future__ import annotations

from draftkit.layout.block import BlockDraft


def body_reasons(draft: BlockDraft) -> dict[str, bool]:
    """What its classes compute otherwise than a body does → whether that is so here."""
    decoder, layers = draft.decoder, draft.decoder.num_hidden_layers
    uniform = draft.causal_layers in ((), tuple(range(layers)), draft.sliding_layers)
    return {
        f"vLLM's draft layers have silu, not {decoder.hidden_act}": decoder.hidden_act != "silu",
        "vLLM's block drafters norm queries and keys": not decoder.qk_norm,
        "vLLM gives a bias to all four attention projections or to none, and none to the MLP": (
            decoder.qkv_bias != decoder.output_bias or decoder.mlp_bias
        ),
        "vLLM reads the state after the target's last layer before the final norm": draft.last_state == "after_norm",
        "vLLM counts a window from each row": draft.window_rule == "anchor" and bool(draft.sliding_layers),
        "vLLM makes all layers causal within the block, none, or those with a window": not uniform,
    }


def first_reason(reasons: dict[str, bool]) -> str | None:
    return next((reason for reason, holds in reasons.items() if holds), None)


def second_runner(what: str) -> str:
    """That vLLM's first model runner stops at a draft."""
    return (
        f"vLLM runs {what} with its second model runner only, which it takes by itself where Triton is; "
        "VLLM_USE_V2_MODEL_RUNNER=1 asks for it."
    )
