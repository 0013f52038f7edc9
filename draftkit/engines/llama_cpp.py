"""llama.cpp (b11434): the drafts that it runs from GGUF files, the targets that it runs them with, and how."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from draftkit.errors import TargetError, command
from draftkit.layout.spec import DraftSpec
from draftkit.layout.target import TargetFacts, language_model

# By `model_type`, the targets whose graph hands out the inputs of its layers (`t_layer_inp` in `src/models/`).
WITH_LAYER_INPUTS = (
    "bailing_moe_v3", "deepseek_v4", "gemma4", "gemma4_text", "gpt_oss", "hunyuan_vl", "lfm2", "llama", "mimo_v2",
    "minimax", "minimax_m2", "mistral", "muse_glimmer", "nanbeige", "nemotron_h", "qwen3", "qwen3_5", "qwen3_5_moe",
    "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen4_exp", "qwen4_exp_text",
)  # fmt: skip
WITHOUT_LAST_STATE = ("llama", "mistral")  # whose graph keeps no state after its last layer for a draft

# By `model_type`, the targets for whose heads a graph is built (`LLM_GRAPH_TYPE_DECODER_MTP` in `src/models/`), and
# those of them whose graph takes more than one.
WITH_HEADS = (
    "cohere2_moe", "deepseek_v32", "deepseek_v4", "glm4_moe", "glm4_moe_lite", "glm5_next", "glm_moe_dsa", "hy_v3",
    "mimo_v2", "mimo_v2_flash", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next",
    "qwen4_exp", "qwen4_exp_text", "step3p5",
)  # fmt: skip
HEAD_TOKENS = 3  # draft tokens a round with heads in the target's file: the server's own default
WITH_SEVERAL_HEADS = ("hy_v3", "mimo_v2", "mimo_v2_flash", "step3p5")


def loads(spec: DraftSpec, layout: str) -> bool:
    """Whether llama.cpp runs a draft's file: one of GGUF."""
    return layout == "gguf" and spec.method in spec.architecture.SERVED_AS.get("llama.cpp", {})


def refusal_of_target(spec: DraftSpec, target: TargetFacts) -> str | None:
    """Why llama.cpp aborts with a target: its graph hands out none of the states that the draft reads; or None."""
    kind = _kind(target)
    if spec.architecture.aux_layer_ids is None or kind in WITH_LAYER_INPUTS:
        return None
    return f"llama.cpp b11434 hands out no layer inputs of {kind} targets, which this draft reads: the server aborts"


def refusal_of_heads(kind: str, count: int) -> str | None:
    """Why llama.cpp does not draft with the multi-token prediction heads of a type of target; None where it does."""
    if kind not in WITH_HEADS:
        return f"llama.cpp b11434 runs no multi-token prediction heads of {kind} targets"
    if count > 1 and kind not in WITH_SEVERAL_HEADS:
        return f"llama.cpp b11434 runs one head of {kind} targets, and there are {count}"
    return None


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


def serve_command(spec: DraftSpec, target: str, file: Path, tokens: int) -> str:
    """The command that serves the target with a draft; TARGET.gguf where the target is no GGUF file."""
    target = target if target.endswith(".gguf") else "TARGET.gguf"
    return command("llama-server", "-m", target, *draft_arguments(spec, file, tokens))


def serve_with_heads(file: Path) -> str:
    """The command that serves a target with the multi-token prediction heads in its file."""
    return command("llama-server", "-m", file, *_spec_type("draft-mtp", HEAD_TOKENS))


def _kind(target: TargetFacts) -> str:
    return str(language_model(target.config).get("model_type"))
