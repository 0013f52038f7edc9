"""How vLLM is told of a draft: its `speculative_config`, and the command with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from draftkit.engines.vllm.accepts import refusal_by_vllm, serving_notes_of, tokens_taken
from draftkit.errors import command
from draftkit.layout.spec import DraftSpec

# The layouts of folders that vLLM loads, as `--to` names them.
LAYOUTS = ("unified", "vllm", "speculators", "dflash", "deepspec", "lilicorr", "hf", "pard")


def loads(spec: DraftSpec, layout: str) -> bool:
    """Whether vLLM runs a draft's folder in a layout, and rightly."""
    return layout in LAYOUTS and refusal_by_vllm(spec, layout) is None


def loaded_wrongly(spec: DraftSpec, layout: str) -> str | None:
    """Why vLLM runs a draft wrongly in a layout that it loads, and rightly in the unified; None otherwise."""
    in_layout = layout in LAYOUTS and refusal_by_vllm(spec) is None
    return refusal_by_vllm(spec, layout) if in_layout else None


def speculative_config(spec: DraftSpec, folder: Path | str, tokens: int) -> dict[str, object]:
    """vLLM's `speculative_config` for a draft in `folder` that proposes `tokens` a round."""
    where: dict[str, object] = {"model": str(folder)} if spec.architecture.has_checkpoint else {}
    return where | {
        "method": spec.architecture.SERVED_AS["vllm"][spec.method],
        "num_speculative_tokens": tokens,
        **_settings(spec),
    }


def serve_command(spec: DraftSpec, target: str, folder: Path | str, tokens: int) -> str:
    """The command that serves the target with a draft; TARGET where that is a GGUF file, which vLLM does not load."""
    target = "TARGET" if target.endswith(".gguf") else target
    settings = json.dumps(speculative_config(spec, folder, tokens_taken(spec, tokens)))
    return command("vllm", "serve", target, "--speculative-config", settings)


def method_note(spec: DraftSpec, layout: str = "unified") -> list[str]:
    """What a folder in a layout does not tell vLLM; nothing of a draft that vLLM does not load from it."""
    if not loads(spec, layout):
        return []
    notes, settings = serving_notes_of(spec, layout), _settings(spec)
    if settings and layout != "speculators":  # whose config says it
        names = " and ".join(f'"{name}"' for name in ("method", *settings))
        notes.append(f"vLLM cannot read {names} from the folder: without both it fails or drafts wrongly.")
    return notes


def _settings(spec: DraftSpec) -> Mapping[str, object]:
    """What `speculative_config` says of a draft besides its folder, its method and the tokens a round."""
    return spec.architecture.engine_settings.get("vllm", {})
