"""SGLang: the drafts that it serves, and how it is started."""

from __future__ import annotations

from pathlib import Path

from draftkit.engines.known import asked
from draftkit.engines.releases import Release, Verdict, verdict
from draftkit.engines.sglang.releases import DRAFTED_ALONE, OFFERED, SINKS, WINDOW
from draftkit.engines.trees import DynamicTree
from draftkit.errors import command
from draftkit.layout.architecture import Architecture
from draftkit.layout.spec import DraftSpec

ENGINE = "SGLang"
# The layouts, as `--to` names them, in which SGLang finds drafts of a method; those of others are its own.
LAYOUTS = {"dflash": "dflash", "dflash2": "dflash", "lilicorr": "lilicorr", "dspark": "deepspec"}


def layout_of(spec: DraftSpec) -> str:
    """The layout, as `--to` names it, in which SGLang serves a draft that is no language model."""
    return LAYOUTS.get(spec.method, "sglang")


def serves(spec: DraftSpec) -> bool:
    """Whether a release of SGLang of which is spoken serves a draft, in the layout that it is for."""
    return loads(spec, layout_of(spec))


def loads(spec: DraftSpec, layout: str) -> bool:
    """Whether SGLang serves a draft's folder in a layout: its own, or any of a whole language model but vLLM's; no
    GGUF file."""
    return any(one.runs for one in verdicts(spec, layout))


def verdicts(spec: DraftSpec, layout: str) -> list[Verdict]:
    """What the releases of SGLang of which is spoken do with a draft in a folder of a layout; none where they load no
    such folder.

    `--to sglang` says itself what SGLang would compute otherwise.
    """
    algorithm = _algorithm(spec)
    whole = spec.architecture.own_model and layout not in ("vllm", "gguf")
    if algorithm is None or not (layout == layout_of(spec) or whole):
        return []
    found = [verdict(release, spec, layout, None) for release in asked(ENGINE)]
    if spec.method in LAYOUTS:
        return found
    # What else SGLang computes otherwise, `--to sglang` has refused.
    taken = (one.outcome == "unknown" and algorithm in one.release.methods for one in found)
    return [Verdict(one.release, "runs") if known else one for one, known in zip(found, taken, strict=True)]


def serve_command(spec: DraftSpec, target: str, folder: Path | str, tokens: int, layout: str = "sglang") -> str:
    """The command that serves the target with a draft, of which `tokens` are verified at a time."""
    del layout
    algorithm = _algorithm(spec)
    assert algorithm is not None
    options = {
        "model-path": target,
        "speculative-algorithm": algorithm,
        "speculative-draft-model-path": str(folder),
    }
    if algorithm == "DSPARK":
        options["speculative-dspark-block-size"] = str(tokens)
    elif algorithm == "DFLASH":
        options["speculative-num-draft-tokens"] = str(tokens + 1)
    else:
        options |= {
            "speculative-num-steps": str(tokens),
            "speculative-eagle-topk": "1",
            "speculative-num-draft-tokens": str(tokens + 1),
        }
    options |= {name.replace("_", "-"): str(value) for name, value in _sight(spec).items()}
    return _launch(options)


def drafts_trees(spec: DraftSpec) -> bool:
    """Whether a release of SGLang of which is spoken drafts trees with a draft; it drafts chains alone with others."""
    trees = (release.rules.get("trees") for release in asked(ENGINE))
    return any(row is not None and _algorithm(spec) in (row.methods or ()) for row in trees)


def serve_tree(spec: DraftSpec, target: str, folder: Path | str, tree: DynamicTree) -> str | None:
    """The command that serves the target with trees of a draft, in SGLang's counting, where the root is a token; None
    for a draft of which SGLang drafts none."""
    if not drafts_trees(spec):
        return None
    return _launch(
        {
            "model-path": target,
            "speculative-algorithm": str(_algorithm(spec)),
            "speculative-draft-model-path": str(folder),
            "speculative-num-steps": str(tree.depth),
            "speculative-eagle-topk": str(tree.width),
            "speculative-num-draft-tokens": str(tree.nodes + 1),
        }
    )


def notes_of(spec: DraftSpec, layout: str) -> list[str]:
    """What else SGLang takes for a draft that it serves from a layout, a sentence each; nothing of others."""
    if not loads(spec, layout):
        return []
    algorithm, release = _algorithm(spec), asked(ENGINE)[0]
    said = _sight(spec)
    offered = {name: row for name, row in OFFERED.items() if name not in said}
    flags = [f"{_flag(name)} ({row.when})" for name, row in offered.items() if _takes(release, name, str(algorithm))]
    if algorithm in (release.rules["adapters-beside-drafts"].methods or ()):
        flags.append("--lora-paths (adapters of the target)")
    also = [f"{release} also takes {', '.join(flags)}"] if flags else []
    notes = [f"{release} learns the draft's window from {' and '.join(map(_flag, said))} alone"] if said else []
    if said and algorithm in DRAFTED_ALONE:
        notes.append(f"{release} narrows the drafted tokens alone: what takes in the text sees all of it")
    return notes + also


def window_of(architecture: Architecture) -> int | None:
    """The window of all layers, as SGLang can be told of an EAGLE-3 draft's; None where some layers have none, and for
    one that is too short for its flag."""
    windows = set(architecture.windows)
    window = next(iter(windows)) if len(windows) == 1 else None
    return None if window is None or window < 2 else window


def _sight(spec: DraftSpec) -> dict[str, int]:
    """What SGLang is told of that window, by the names of its settings: the tokens before a row, without its own
    (`models/llama_eagle3.py`); and where it drafts so, the first ones that are seen besides."""
    algorithm, window = _algorithm(spec), window_of(spec.architecture)
    if window is None or algorithm not in ("EAGLE3", *DRAFTED_ALONE):
        return {}
    sinks = spec.architecture.sink_tokens if algorithm in DRAFTED_ALONE else 0
    return {WINDOW: window - 1} | ({SINKS: sinks} if sinks else {})


def _takes(release: Release, name: str, algorithm: str) -> bool:
    row = release.config_keys.get(name)
    return row is not None and row.there and algorithm in (row.methods or ())


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _algorithm(spec: DraftSpec) -> str | None:
    """What SGLang calls the way of a draft; None where it has no name for it."""
    return spec.architecture.SERVED_AS.get("sglang", {}).get(spec.method)


def _launch(options: dict[str, str]) -> str:
    flags = (word for name, value in options.items() for word in (f"--{name}", value))
    return command("python", "-m", "sglang.launch_server", *flags)
