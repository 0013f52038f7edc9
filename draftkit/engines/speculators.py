"""The speculators library (0.9): what it has classes for, and where its config says how a draft is served.

Its classes load a file strictly, and vLLM reads the same config: `speculators_config` for the target and the draft
length, `transformer_layer_config` as the draft's own (`vllm/transformers_utils/configs/speculators`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

VERSION = "0.9.0"
LAYER_CONFIG = "transformer_layer_config"
SERVING = "speculators_config"
KIND = "speculators_model_type"
ARCHITECTURES = {  # by the kind
    "eagle3": "Eagle3DraftModel",
    "peagle": "PEagleDraftModel",
    "dflash": "DFlashDraftModel",
    "dspark": "DSparkDraftModel",
    "dflash2": "DFlash2DraftModel",
}


def serving_config(kind: str, tokens: int, target: str, architectures: Sequence[str]) -> dict[str, object]:
    """How a draft is served: the target by name and architectures, and how many tokens are drafted."""
    return {
        "algorithm": kind,
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
        "verifier": {"name_or_path": target, "architectures": list(architectures)},
    }


def proposed_tokens(config: Mapping[str, object]) -> int | None:
    """The draft tokens a round that a config of the library names; None of any other."""
    stated = config.get(SERVING)
    methods = stated.get("proposal_methods") if isinstance(stated, dict) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    tokens = first.get("speculative_tokens") if isinstance(first, dict) else None
    return tokens if isinstance(tokens, int) and tokens > 0 else None


def verifier_name(config: Mapping[str, object]) -> str | None:
    """The target that a config of the library names."""
    stated = config.get(SERVING)
    verifier = stated.get("verifier") if isinstance(stated, dict) else None
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    return name if isinstance(name, str) else None


def verifier_architectures(config: Mapping[str, object]) -> list[str]:
    """The class names of the target that a config of the library names."""
    stated = config.get(SERVING)
    verifier = stated.get("verifier") if isinstance(stated, dict) else None
    names = verifier.get("architectures") if isinstance(verifier, dict) else None
    return [str(name) for name in names] if isinstance(names, list) else []
