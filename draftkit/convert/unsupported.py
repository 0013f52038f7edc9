"""Drafts of kinds that have a name and no format here, so that a refusal can call them by it.

Recognized by what their trainers and engines call their parts: z-lab/dflash, deepseek-ai/DeepSpec, SpecForge,
speculators 0.9, NeMo Automodel, and the MTP classes of vLLM 0.32.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from draftkit.convert.checkpoint import Checkpoint
from draftkit.errors import FormatError


@dataclass(frozen=True)
class Kind:
    """`tensors`: a pattern in a tensor's name that no other kind has. `method`: vLLM's name for it, if it has one.

    Configs name it too: in `architectures`, in `speculators_model_type`, or as the projector's type in `dflash_config`.
    """

    name: str
    tensors: str
    method: str | None = None

    def has_tensors(self, checkpoint: Checkpoint) -> bool:
        return any(re.search(self.tensors, name) for name in checkpoint.tensors)

    def is_named(self, checkpoint: Checkpoint) -> bool:
        config, name = checkpoint.config, self.name.lower()
        nested = config.get("dflash_config")
        stated = (config.get("speculators_model_type"), isinstance(nested, dict) and nested.get("projector_type"))
        return name in stated or any(name in architecture.lower() for architecture in checkpoint.architectures)


# The later ones have parts that the earlier ones have too.
KINDS = (
    Kind("LiLiCorr", r"\blilicorr\."),
    Kind("XPress", r"\brefiner_head\."),
    Kind("Domino", r"\bprefix_gru\."),
    Kind("DFlare", r"\b(k_proj_target|layer_fusion_weights)\b"),
    Kind("Gemma-4 assistant", r"^pre_projection\.weight$", "mtp"),
    Kind("MTP", r"\b(mtp\.(fc|layers)\.|mtp_layers\.\d|eh_proj\.|mtp_linear_proj\.)", "mtp"),
)


def refuse_by_name(checkpoint: Checkpoint) -> None:
    """Raise `FormatError` for a draft of a kind that draftkit does not convert, with its name."""
    kind = next((kind for kind in KINDS if kind.has_tensors(checkpoint)), None)
    kind = kind or next((kind for kind in KINDS if kind.is_named(checkpoint)), None)
    if kind is not None:
        raise FormatError(
            f"this is a draft of the kind {kind.name}; draftkit cannot convert it yet",
            where=checkpoint.source.path,
            hint=f"vLLM loads such drafts as they are, with method {kind.method}" if kind.method else None,
        )
