"""Which drafts and targets vLLM runs rightly, by its tables of releases."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from draftkit.engines.known import asked, known
from draftkit.engines.releases import Entry, Release, Verdict, against, verdict
from draftkit.errors import DraftkitError, TargetError
from draftkit.io.tensors import gguf_file
from draftkit.layout.spec import DraftSpec

ENGINE, QUANTIZED_HEAD, PASS_BOUNDS = "vLLM", "draft_lm_head_quantization", "draft-pass-bounds-sequences"
# The layouts of folders that vLLM loads, as `--to` names them.
LAYOUTS = ("unified", "vllm", "speculators", "dflash", "deepspec", "lilicorr", "hf", "pard")


def verdicts(spec: DraftSpec, layout: str = "unified", releases: Sequence[Release] | None = None) -> list[Verdict]:
    """What releases of vLLM do with a draft in a folder of a layout, as `--to` names it; None for those of which is
    spoken."""
    given = asked(ENGINE) if releases is None else releases
    return [verdict(release, spec, layout, _class_of(spec)) for release in given]


def refusal_by_vllm(spec: DraftSpec) -> str | None:
    """Why vLLM must not load this draft from a unified folder, of whatever release it is, or None.

    Some known release would run it, and wrongly without a word, or none has a class for it.
    """
    return against(verdicts(spec, releases=known()[ENGINE]))


def method_of(spec: DraftSpec) -> str | None:
    """What vLLM calls the method of a draft; None where it has no name for it."""
    return spec.architecture.SERVED_AS.get("vllm", {}).get(spec.method)


def check_target(folder: Path) -> None:
    """Raise `TargetError` for a target that vLLM does not load, of any architecture."""
    if (file := gguf_file(folder)) is not None:
        raise TargetError(
            f"{ENGINE} does not load GGUF files",
            where=file,
            hint="leave vLLM out, or pass the folder or Hub id of the model that the file was made from",
        )


def check_verification(name: object) -> None:
    """Raise `DraftkitError` for a way to accept draft tokens whose output is not drawn as the target's is."""
    rows = (release.verifications.get(str(name)) for release in known()[ENGINE])
    if (lossy := next((row for row in rows if row is not None and row.lossy), None)) is not None:
        raise DraftkitError(
            f"rejection_sample_method {name} is lossy: {lossy.when}, and the output is not the target's",
            hint="leave it out; --set verification=block accepts more than the usual one, and nothing is lost",
        )


def tokens_taken(spec: DraftSpec, wanted: int) -> int:
    """As many draft tokens a round as are wanted, or the next fewer that vLLM takes: beyond one for each module that
    drafts, a multiple of them (`config/speculative.py`, n_predict)."""
    turn = spec.architecture.tokens_in_turn
    return wanted if wanted < turn else wanted - wanted % turn


def runner_of(release: Release, spec: DraftSpec, layout: str) -> tuple[str, str] | None:
    """The only one of its model runners in which a release that runs a draft does, and what of the draft asks for it,
    in words; None where either will do."""
    return next(((row.runner, what) for what, row in _rows(release, spec, layout) if row.runner is not None), None)


def serving_notes_of(release: Release, spec: DraftSpec, layout: str) -> list[str]:
    """What a user has to know who serves a draft with a release from a folder in a layout, one sentence each."""
    notes, turn = [], spec.architecture.tokens_in_turn
    bound = runner_of(release, spec, layout)
    if bound is not None and bound[0] == "V2":
        notes.append(
            f"vLLM runs {bound[1]} with its second model runner (V2) only, which it takes by itself where Triton is; "
            "VLLM_USE_V2_MODEL_RUNNER=1 asks for it."
        )
    row = release.config_keys.get(QUANTIZED_HEAD)
    quantized = row is not None and method_of(spec) in (row.methods or ())
    if quantized and bound is None and spec.architecture.shares_head:
        notes.append(
            f"{release} (V2) can draft with a quantized copy of the target's output layer: "
            f'"{QUANTIZED_HEAD}": "fp8" or "nvfp4". Acceptance may move, the output does not.'
        )
    notes += _room_of(release, spec)
    if turn > 1:
        notes.append(f"vLLM drafts up to {turn} tokens a round with {turn} modules, or a multiple of {turn}.")
    return notes


def _room_of(release: Release, spec: DraftSpec) -> list[str]:
    """What drafting takes of a batch with K draft tokens a round."""
    method, parallel = method_of(spec), spec.architecture.parallel is not None
    slots = release.slots.get(f"{method} in parallel" if parallel else str(method))
    rows = release.rules.get(PASS_BOUNDS)
    notes = [] if slots is None else [f"{release} takes {slots.when} more of max_num_batched_tokens for each sequence."]
    if rows is not None and method in (rows.methods or ()):
        notes.append(
            f"{release} drafts up to {rows.when} rows of each sequence within max_num_batched_tokens, and runs no more "
            "sequences at a time than fit."
        )
    return notes


def _rows(release: Release, spec: DraftSpec, layout: str) -> list[tuple[str, Entry]]:
    """The capabilities of a release that a draft uses, in words, each with the release's row about it."""
    draft = spec.architecture
    rows = [(needed.what, release.capabilities[needed.name]) for needed in draft.needs(layout)]
    rows.append((f"{spec.method} drafts", release.methods[draft.SERVED_AS["vllm"][spec.method]]))
    if (architecture := _class_of(spec)) is not None:
        rows.append((f"{spec.method} drafts", release.architectures[architecture]))
    settings = draft.engine_settings.get("vllm", {})
    return rows + [(f"{spec.method} drafts", release.config_keys[name]) for name in settings]


def _class_of(spec: DraftSpec) -> str | None:
    """The class under which vLLM looks for a draft, by its folder's config; None where the config is that of a whole
    model, or of the target, and where there is none."""
    draft = spec.architecture
    names = draft.engine_config().get("architectures")
    if draft.own_model or draft.closed or not isinstance(names, list):
        return None
    # vLLM puts its method before the class of a plain model (`transformers_utils/configs/eagle.py`).
    return f"Eagle{names[0]}" if draft.SERVED_AS.get("vllm", {}).get(spec.method) == "eagle" else str(names[0])
