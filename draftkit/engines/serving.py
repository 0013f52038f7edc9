"""How engines are told of a draft's folder, or of the heads in a target's own: what they have in common."""

from __future__ import annotations

import os
from pathlib import Path

from draftkit import zoo
from draftkit.engines import llama_cpp, sglang, speculators, transformers
from draftkit.engines.known import chosen
from draftkit.engines.releases import told
from draftkit.engines.trees import DynamicTree
from draftkit.engines.vllm import serve as vllm
from draftkit.engines.vllm.accepts import ENGINE, LAYOUTS, verdicts
from draftkit.layout.folder import Draft
from draftkit.layout.mtp import HeadKind
from draftkit.layout.spec import DraftSpec

ENGINES = {"vLLM": vllm, "SGLang": sglang, "llama.cpp": llama_cpp}  # each with `loads` and `serve_command`
TOKENS_FACT = "speculative_tokens"  # the draft tokens a round that a draft was trained for


def serve_commands(
    draft: Draft,
    folder: Path | str,
    *,
    layout: str = "unified",
    target: str | None = None,
    k: int | None = None,
    local: bool = False,
) -> dict[str, str]:
    """Engine → the command that serves the target with the draft in `folder`; engines that cannot are left out.

    `layout`: that of the folder, as `--to` names it. `target`: the draft's own when None. `k`: draft tokens a round;
    None for what the draft states, or a usual number. `local`: with the paths of this machine, for its terminal;
    otherwise names stay as they are, as for a card.
    """
    target = target or draft.provenance.target or "TARGET"
    tokens = k or stated_tokens(draft) or draft.spec.architecture.usual_tokens
    if local:
        target, folder = local_name(target), Path(folder).absolute()
    return {
        name: engine.serve_command(draft.spec, target, folder, tokens, layout)
        for name, engine in ENGINES.items()
        if engine.loads(draft.spec, layout)
    }


def serve_trees(
    draft: Draft, folder: Path | str, tree: DynamicTree, *, target: str | None = None, local: bool = False
) -> dict[str, str]:
    """Engine → the command that serves the target with trees of the draft in `folder`, which has the layout that SGLang
    reads; empty where it drafts no trees with it."""
    target = target or draft.provenance.target or "TARGET"
    if local:
        target, folder = local_name(target), Path(folder).absolute()
    line = sglang.serve_tree(draft.spec, target, folder, tree)
    return {} if line is None else {sglang.ENGINE: line}


def serving_notes(draft: Draft, target: str) -> list[str]:
    """The vLLM command for a draft's folder on this machine, and what vLLM cannot read from the folder itself."""
    if not vllm.loads(draft.spec, "unified"):
        return []
    return [
        f"vLLM: {serve_commands(draft, draft.path, target=target, local=True)['vLLM']}",
        *refusal_notes(draft.spec),
        *vllm.method_note(draft.spec),
    ]


def release_notes(spec: DraftSpec, layout: str = "unified") -> list[str]:
    """What the releases of which is spoken do with a draft's folder in a layout, a line for each engine that loads such
    folders, and what to do where one has dropped such drafts. Of one that is asked for and loads no such folder, which
    it does load."""
    found = [*vllm.release_notes(spec, layout), *(told(each) for each in (sglang.verdicts(spec, layout),) if each)]
    release = chosen()
    if found or release is None:
        return found
    others = [name for name in ("unified", sglang.layout_of(spec), "gguf") if _loads(release.engine, spec, name)]
    instead = f", but one of convert --to {others[0]}" if others else ""
    return [f"{release}: loads no folder in the layout {layout} of such a draft{instead}"]


def refusal_notes(spec: DraftSpec) -> list[str]:
    """The lines of `release_notes` of a unified folder where a release does not run its draft; else none."""
    running = all(row["runs"] for rows in answers(spec).values() for row in rows)
    return [] if running else release_notes(spec)


def _loads(engine: str, spec: DraftSpec, layout: str) -> bool:
    return engine in ENGINES and ENGINES[engine].loads(spec, layout)


def serve_notes(spec: DraftSpec, layout: str = "unified") -> list[str]:
    """What the folder does not tell the engines that serve it, and what else they take."""
    return [*vllm.method_note(spec, layout), *sglang.notes_of(spec, layout)]


def answers(spec: DraftSpec, layout: str = "unified") -> dict[str, list[dict[str, object]]]:
    """Engine → what each of its releases of which is spoken does with a draft's folder in a layout, in JSON values."""
    found = [(ENGINE, verdicts(spec, layout))] if layout in LAYOUTS else []
    found.append((sglang.ENGINE, sglang.verdicts(spec, layout)))
    return {
        engine: [{"release": one.release.number, "runs": one.runs, "reason": one.reason or None} for one in each]
        for engine, each in found
        if each
    }


def local_name(source: str) -> str:
    """A source as other programs on this machine find it: the path of a zoo model, an absolute one for a folder."""
    if source.startswith("zoo:"):
        return str(zoo.path(source.removeprefix("zoo:")))
    return os.path.abspath(source) if os.path.exists(source) else source


def stated_tokens(draft: Draft) -> int | None:
    """The draft tokens a round that a draft's own file or its training names, None where nothing does."""
    for fact in draft.provenance.facts:
        if fact.name == TOKENS_FACT:
            return int(fact.value)
    return speculators.proposed_tokens(draft.provenance.dropped_config)


def most_tokens(draft: Draft) -> int | None:
    """The draft tokens a round beyond which a draft was not trained; None of a chain, which may go on."""
    own = draft.spec.architecture.draft_tokens
    return stated_tokens(draft) if own is None and draft.spec.architecture.parallel is not None else own


def uses_of_heads(kind: HeadKind, count: int, model_type: str) -> dict[str, str]:
    """Engine → how it drafts with `count` heads of a target, and where that differs from vLLM."""
    tokens, again = count, "more tokens than heads use the heads again"
    if count > 1 and kind.modules == "first":
        tokens, again = 1, f"only the first drafts, again for further tokens, beyond {count} a multiple of {count}"
    elif count > 1:
        again = (
            f"more tokens, a multiple of {count}, use the heads again, each draft step the next (runner V2; V1 the "
            "first alone)"
        )
    settings = f'{{"method": "mtp", "num_speculative_tokens": {tokens}}}'
    return {
        "vLLM": f"--speculative-config '{settings}'; {again}",
        "SGLang": "--speculative-algorithm NEXTN",
        str(transformers.PRESENT): transformers.use_of_heads(kind, model_type),
        "llama.cpp": _in_llama_cpp(kind, count, model_type),
    }


def _in_llama_cpp(kind: HeadKind, count: int, model_type: str) -> str:
    if reason := llama_cpp.refusal_of_heads(model_type, count):
        return f"none: {reason}"
    return "; it ".join(
        ["--spec-type draft-mtp, from GGUF", *llama_cpp.differences_of_heads(kind.feedback, model_type)]
    )
