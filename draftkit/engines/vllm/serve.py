"""How vLLM is told of a draft: its `speculative_config`, and the command with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from draftkit.engines.known import known
from draftkit.engines.releases import Release, told
from draftkit.engines.vllm.accepts import (
    ENGINE,
    LAYOUTS,
    refusal_by_vllm,
    serving_notes_of,
    tokens_taken,
    verdicts,
)
from draftkit.errors import command
from draftkit.layout.spec import DraftSpec


def loads(spec: DraftSpec, layout: str) -> bool:
    """Whether a release of vLLM of which is spoken runs a draft's folder in a layout, and rightly."""
    return serving_release(spec, layout) is not None


def serving_release(spec: DraftSpec, layout: str) -> Release | None:
    """The newest release of which is spoken that runs a draft's folder in a layout; None where none does, and where the
    folder is marked so that none loads it."""
    if layout not in LAYOUTS or (layout == "unified" and refusal_by_vllm(spec) is not None):
        return None
    return next((one.release for one in verdicts(spec, layout) if one.runs), None)


def loaded_wrongly(spec: DraftSpec, layout: str) -> str | None:
    """Why vLLM runs a draft wrongly in a layout that it loads, and rightly in the unified; None otherwise."""
    if layout not in LAYOUTS or refusal_by_vllm(spec) is not None:
        return None
    return next((one.sentence for one in verdicts(spec, layout) if one.outcome in ("wrong", "unknown")), None)


def speculative_config(
    spec: DraftSpec, folder: Path | str, tokens: int, release: Release | None = None
) -> dict[str, object]:
    """vLLM's `speculative_config` for a draft in `folder` that proposes `tokens` a round, in the words of a release;
    None for the newest known."""
    release = release or known()[ENGINE][0]
    where: dict[str, object] = {"model": str(folder)} if spec.architecture.has_checkpoint else {}
    config = where | {
        "method": spec.architecture.SERVED_AS["vllm"][spec.method],
        "num_speculative_tokens": tokens,
        **_settings(spec),
    }
    return {_called(release, name): value for name, value in config.items()}


def serve_command(spec: DraftSpec, target: str, folder: Path | str, tokens: int, layout: str = "unified") -> str:
    """The command that serves the target with a draft; TARGET where that is a GGUF file, which vLLM does not load."""
    target = "TARGET" if target.endswith(".gguf") else target
    config = speculative_config(spec, folder, tokens_taken(spec, tokens), serving_release(spec, layout))
    settings = json.dumps(config)
    return command("vllm", "serve", target, "--speculative-config", settings)


def release_notes(spec: DraftSpec, layout: str = "unified") -> list[str]:
    """What the releases of vLLM of which is spoken do with a draft's folder in a layout, in one line, and what to do
    where one has dropped such drafts; nothing where vLLM is not spoken of, or does not load the layout."""
    found = verdicts(spec, layout) if layout in LAYOUTS else []
    instead = [f"instead: {text}" for text in dict.fromkeys(one.instead for one in found) if text]
    return [told(found), *instead] if found else []


def method_note(spec: DraftSpec, layout: str = "unified") -> list[str]:
    """What a folder in a layout does not tell vLLM, and what else has to be known to serve it; nothing of a draft that
    no release of which is spoken loads from it."""
    release = serving_release(spec, layout)
    if release is None:
        return []
    notes = serving_notes_of(release, spec, layout)
    settings = [_called(release, name) for name in _settings(spec)]
    if settings and layout != "speculators":  # whose config says it
        names = " and ".join(f'"{name}"' for name in ("method", *settings))
        notes.append(f"vLLM cannot read {names} from the folder: without both it fails or drafts wrongly.")
    return notes


def _settings(spec: DraftSpec) -> Mapping[str, object]:
    """What `speculative_config` says of a draft besides its folder, its method and the tokens a round."""
    return spec.architecture.engine_settings.get("vllm", {})


def _called(release: Release, name: str) -> str:
    """The name that a release has for a setting."""
    row = release.config_keys.get(name)
    return name if row is None else row.called or name
