"""Which drafts and targets vLLM runs rightly, by its tables of releases."""

from __future__ import annotations

from pathlib import Path

from draftkit.engines.releases import Entry, Release, refusal, runs_in
from draftkit.engines.vllm.releases import PRESENT, RELEASES
from draftkit.errors import TargetError
from draftkit.io.tensors import gguf_file
from draftkit.layout.spec import DraftSpec


def refusal_by_vllm(spec: DraftSpec, layout: str = "unified") -> str | None:
    """Why vLLM must not load this draft (it would, and run it wrongly without a word), or None.

    `layout`: that of its folder, as `--to` names it.
    """
    return refusal(RELEASES, spec, layout, _class_of(spec))


def check_target(folder: Path) -> None:
    """Raise `TargetError` for a target that vLLM does not load, of any architecture."""
    if (file := gguf_file(folder)) is not None:
        raise TargetError(
            f"{PRESENT} does not load GGUF files",
            where=file,
            hint="leave vLLM out, or pass the folder or Hub id of the model that the file was made from",
        )


def tokens_taken(spec: DraftSpec, wanted: int) -> int:
    """As many draft tokens a round as are wanted, or the next fewer that vLLM takes: beyond one for each module that
    drafts, a multiple of them (`config/speculative.py`, n_predict)."""
    turn = spec.architecture.tokens_in_turn
    return wanted if wanted < turn else wanted - wanted % turn


def serving_notes_of(spec: DraftSpec, layout: str) -> list[str]:
    """What a user has to know who serves a draft from a folder in a layout, one sentence each."""
    method, turn = spec.architecture.SERVED_AS["vllm"][spec.method], spec.architecture.tokens_in_turn
    notes = []
    if what := next((what for what, row in _rows(PRESENT, spec, layout) if row.runner == "V2"), None):
        notes.append(
            f"vLLM runs {what} with its second model runner only, which it takes by itself where Triton is; "
            "VLLM_USE_V2_MODEL_RUNNER=1 asks for it."
        )
    if turn > 1:
        notes.append(f"vLLM drafts up to {turn} tokens a round with {turn} modules, or a multiple of {turn}.")
    running = [release for release in RELEASES if runs_in(release.methods.get(method), layout)]
    if running[-1] is not RELEASES[-1]:
        gone = RELEASES[RELEASES.index(running[-1]) + 1]
        notes.append(f"{gone} has dropped {spec.method}: {running[-1].number} is the newest release that runs it.")
    return notes


def _rows(release: Release, spec: DraftSpec, layout: str) -> list[tuple[str, Entry]]:
    """What a draft that a release runs takes of it, in words, and the release's row of it."""
    method = spec.architecture.SERVED_AS["vllm"][spec.method]
    rows = [(needed.what, release.capabilities[needed.name]) for needed in spec.architecture.needs(layout)]
    rows.append((f"{spec.method} drafts", release.methods[method]))
    if (architecture := _class_of(spec)) is not None:
        rows.append((f"{spec.method} drafts", release.architectures[architecture]))
    return rows


def _class_of(spec: DraftSpec) -> str | None:
    """The class under which vLLM looks for a draft, by its folder's config; None where the config is that of a whole
    model, or of the target, and where there is none."""
    draft = spec.architecture
    names = draft.engine_config().get("architectures")
    if draft.own_model or draft.closed or not isinstance(names, list):
        return None
    # vLLM puts its method before the class of a plain model (`transformers_utils/configs/eagle.py`).
    return f"Eagle{names[0]}" if draft.SERVED_AS.get("vllm", {}).get(spec.method) == "eagle" else str(names[0])
