"""llama.cpp: the drafts that it runs from GGUF files, the targets that it runs them with, and how."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from draftkit.engines.known import asked
from draftkit.engines.llama_cpp.releases import (
    PRESENT,
    REPLAYED,
    WITH_HEADS,
    WITH_LAYER_INPUTS,
    WITH_SEVERAL_HEADS,
    WITHOUT_LAST_STATE,
)
from draftkit.errors import TargetError, command
from draftkit.layout.spec import DraftSpec
from draftkit.layout.target import TargetFacts, language_model

HEAD_TOKENS = 3  # draft tokens a round with heads in the target's file: the server's own default


def loads(spec: DraftSpec, layout: str) -> bool:
    """Whether llama.cpp runs a draft's file: one of GGUF."""
    kind = spec.architecture.SERVED_AS.get("llama.cpp", {}).get(spec.method)
    return layout == "gguf" and any(kind in release.methods for release in asked("llama.cpp"))


def refusal_of_target(spec: DraftSpec, target: TargetFacts) -> str | None:
    """Why llama.cpp aborts with a target, because its graph gives out none of the states that the draft reads; None
    where it does not."""
    kind = _kind(target)
    if spec.architecture.aux_layer_ids is None or kind in WITH_LAYER_INPUTS:
        return None
    return f"{PRESENT} hands out no layer inputs of {kind} targets, which this draft reads: the server aborts"


def refusal_of_heads(kind: str, count: int) -> str | None:
    """Why llama.cpp does not draft with the multi-token prediction heads of a type of target; None where it does."""
    if kind not in WITH_HEADS:
        return f"{PRESENT} runs no multi-token prediction heads of {kind} targets"
    if count > 1 and kind not in WITH_SEVERAL_HEADS:
        return f"{PRESENT} runs one head of {kind} targets, and there are {count}"
    return None


def differences_of_heads(feedback: str, model_type: str) -> list[str]:
    """What llama.cpp has heads read that vLLM does not (`common/speculative.cpp`, `src/models/`)."""
    found = ["reads a row more, of the first token beside the last state of the request before"]
    if feedback == "pre_norm":
        found.append("feeds the head's own state after its last norm, vLLM before it")
    if model_type in REPLAYED:
        found.append("runs the accepted draft tokens twice, and then reads the state of a rejected token")
    return found


def check_target(spec: DraftSpec, target: TargetFacts) -> None:
    """Raise `TargetError` for a target with which llama.cpp aborts."""
    if problem := refusal_of_target(spec, target):
        raise TargetError(problem, where=target.name, expected="a target of " + ", ".join(WITH_LAYER_INPUTS))


def last_state_of(target: TargetFacts, ids: Sequence[int]) -> str | None:
    """What llama.cpp makes of the state after the target's last layer, where a draft reads it and that is another."""
    last = target.num_hidden_layers
    if max(ids) < last:
        return None
    found = "stale memory" if _kind(target) in WITHOUT_LAST_STATE else "another state, or none"
    return f"the draft reads the state after layer {last}, the target's last, and llama.cpp gives it {found}"


def draft_arguments(spec: DraftSpec, file: Path, tokens: int) -> list[str]:
    """What `llama-server` is told of a draft that proposes at most `tokens` a round, or as many as it can.

    Without `--spec-type` it loads most drafts and does not use them. Chains over captured states lose drafts under
    several requests with sampling in the backend, its default, so that is switched off.
    """
    architecture = spec.architecture
    most = architecture.draft_tokens or tokens  # the server takes no more, and only warns
    found = ["-md", str(file), *_spec_type(architecture.SERVED_AS["llama.cpp"][spec.method], min(tokens, most))]
    chain = architecture.aux_layer_ids is not None and architecture.parallel is None  # each draft from the one before
    return [*found, "--no-spec-draft-backend-sampling"] if chain else found


def _spec_type(kind: str, tokens: int) -> list[str]:
    return ["--spec-type", kind, "--spec-draft-n-max", str(tokens)]


def serve_command(spec: DraftSpec, target: str, file: Path, tokens: int, layout: str = "gguf") -> str:
    """The command that serves the target with a draft; TARGET.gguf where the target is no GGUF file."""
    del layout
    target = target if target.endswith(".gguf") else "TARGET.gguf"
    return command("llama-server", "-m", target, *draft_arguments(spec, file, tokens))


def serve_with_heads(file: Path) -> str:
    """The command that serves a target with the multi-token prediction heads in its file."""
    return command("llama-server", "-m", file, *_spec_type("draft-mtp", HEAD_TOKENS))


def _kind(target: TargetFacts) -> str:
    return str(language_model(target.config).get("model_type"))
