"""Block drafters in vLLM 0.32: `qwen3_dflash.py`, `qwen3_dspark.py`, `qwen3_dflash2.py`."""

from __future__ import annotations

from draftkit.engines.vllm.block import body_reasons, first_reason, second_runner
from draftkit.layout.families.dflash import DFlashSpec


def refusal(dflash: DFlashSpec) -> str | None:
    """The first thing that vLLM's class for this draft computes otherwise."""
    own = _unlike_dflash2(dflash) if dflash.method == "dflash2" else _unlike_dflash(dflash)
    return first_reason(body_reasons(dflash) | own)


def notes(dflash: DFlashSpec) -> list[str]:
    """That its first model runner stops at the draft."""
    mixed = len(set(dflash.decoder.windows)) > 1
    if dflash.method == "dflash" and not mixed:
        return []
    what = "DSpark" if dflash.method == "dspark" else "DFlash2"
    return [second_runner("layers with and without a window" if mixed else what)]


def _as_speculators(dflash: DFlashSpec) -> str | None:
    """What vLLM's adapter for the speculators library's files reads otherwise than the library."""
    if (
        dflash.method != "dspark"
        and dflash.causal_layers
        and dflash.causal_layers != tuple(range(dflash.decoder.num_hidden_layers))
    ):
        return "vLLM takes windows that are causal within the block for causality in the layers without a window too"
    return None


layout_refusals = {"speculators": _as_speculators}  # layout → what vLLM would run wrongly in it, and not in the unified


def _unlike_dflash(dflash: DFlashSpec) -> dict[str, bool]:
    markov = dflash.markov
    scaled = dflash.embedding_scale != 1.0 or dflash.logit_softcap != 0.0
    return {
        "vLLM scales neither embeddings nor caps logits of this draft": scaled,
        "vLLM has DSpark's plain Markov head only, and the draft's is gated or recurrent": (
            markov is not None and markov.markov_type != "vanilla"
        ),
        "vLLM's DSpark class has no embedding of the mask besides the table": (
            dflash.mask_embedding and dflash.method == "dspark"
        ),
    }


def _unlike_dflash2(dflash: DFlashSpec) -> dict[str, bool]:
    complete = dflash.convolution is not None and dflash.selector is not None
    return {
        "vLLM's DFlash2 class has both convolutions and a selector": not complete,
        "vLLM's DFlash2 class drafts from masks alone, without DSpark's heads": (
            dflash.slots != "fill-in" or dflash.markov is not None or dflash.confidence != "none"
        ),
        "vLLM's DFlash2 class has the whole vocabulary": dflash.reduced_vocabulary,
    }
