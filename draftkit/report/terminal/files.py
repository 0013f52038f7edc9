"""What else draftkit writes, as `inspect` names it: what it is, and which command takes it. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from draftkit.errors import DraftkitError
from draftkit.io.jsonfile import read_object
from draftkit.io.jsonl import read_lines

CHECKPOINTS = "checkpoint-*/trainer_state.json"  # of a run; the file is the last of a checkpoint to be written


@dataclass(frozen=True)
class Written:
    """`kind` in a word, `title` in a sentence, `lines` of what matters in it, `next` the command that takes it."""

    kind: str
    title: str
    lines: tuple[str, ...]
    next: tuple[object, ...]

    def to_dict(self, source: str) -> dict[str, object]:
        found = {"kind": self.kind, "is": self.title, "says": list(self.lines), "next": list(map(str, self.next))}
        return {"schema": 1, "source": source, "format": self.kind} | found


def written_at(path: Path) -> Written | None:
    """What a file or folder is that draftkit has written and that is no model; None for anything else."""
    readers = FOLDERS if path.is_dir() else FILES.get(path.suffix, ()) if path.is_file() else ()
    for reader in readers:
        with suppress(DraftkitError):
            if (found := reader(path)) is not None:
                return found
    return None


def show_written(console: Console, source: str, written: Written) -> None:
    console.print(Text.assemble(f"{source}: ", (written.title, "bold")))
    for line in written.lines:
        console.print(f"  {line}")


def _result(path: Path) -> Written | None:
    from draftkit.results.record import read_result

    if "cells" not in read_object(path):
        return None
    result = read_result(path)
    first, drafts = result.cells[0], list(dict.fromkeys(cell.draft for cell in result.cells))
    title = f"a measurement of {', '.join(drafts)} with {first.target}, {_counted(len(result.cells), 'cell')}"
    return Written("result", title, tuple(one.sentence for one in result.judged), ("report", path))


def _certificates(path: Path) -> Written | None:
    found = read_object(path).get("certificates")
    if not isinstance(found, list):
        return None
    lines = (f"{one.get('draft')} on {one.get('target')}: {one.get('verdict')}" for one in found)
    return Written("certificates", _counted(len(found), "certificate"), tuple(lines), ("certify", "--help"))


def _samples(path: Path) -> Written | None:
    if path.is_dir() and not (path / "dataset_info.json").exists():
        return None  # without the imports that reading Arrow takes
    from draftkit.data.sample_files import open_samples, read_origin

    target, samples = read_origin(path).target, open_samples(path)
    title = f"training data for {target}: {_counted(len(samples), 'sample')}, {samples.lengths.sum():,} tokens"
    return Written("samples", title, (), ("data", "check", path, "--target", target))


def _rows(path: Path) -> Written | None:
    """Rows that a target has answered, prompts, or conversations of anybody."""
    _, row = next(read_lines(path), (1, {}))
    title = f"rows with {', '.join(list(row)[:6])}: prompts to measure with, or what training data is made of"
    return Written("rows", title, (), ("data", "prepare", path, "OUT.jsonl", "--target", "TARGET")) if row else None


def _run(path: Path) -> Written | None:
    checkpoints = sorted(path.glob(CHECKPOINTS), key=lambda file: int(file.parent.name.rpartition("-")[2]))
    if not checkpoints:
        return None
    from draftkit.io.yaml_text import read_yaml_file

    state, settings = read_object(checkpoints[-1]), read_yaml_file(checkpoints[-1].parent / "train.yaml")
    of = f" of {settings.get('recipe')} for {settings.get('target')}" if isinstance(settings, Mapping) else ""
    done = f"step {state.get('global_step')} of {state.get('max_steps')}, {_counted(len(checkpoints), 'checkpoint')}"
    draft = path / "draft"
    has_draft = (draft / "config.json").is_file()
    lines = (done, *((f"its draft: {draft}",) if has_draft else ()))
    if _is_validated(state):
        taken: tuple[object, ...] = ("report", path)
    elif has_draft:
        target = settings.get("target") if isinstance(settings, Mapping) else None
        taken = ("eval", "--target", target or "TARGET", "--draft", draft)
    else:
        taken = ("train", "--config", checkpoints[-1].parent / "train.yaml", "--out", path, "--resume")
    return Written("run", f"a training run{of}", lines, taken)


def _is_validated(state: Mapping[str, object]) -> bool:
    """Whether acceptance lengths were measured as a run went on, which is what `report` shows."""
    history = state.get("log_history")
    entries = history if isinstance(history, list) else []
    return any(isinstance(entry, Mapping) and "eval_acceptance_length" in entry for entry in entries)


def _states(path: Path) -> Written | None:
    """Stored hidden states, which have a manifest."""
    manifest = read_object(min(path.glob("manifest*.json"), default=path / "manifest.json"))
    if not {"num_documents", "encoding", "shards"} <= manifest.keys():
        return None
    title = "hidden states of {target} for {num_documents:,} samples, stored as {encoding}".format(**manifest)
    return Written("states", title, (), ("train", "--target", manifest["target"], "--states", path, "--data", "DATA"))


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


Reader = Callable[[Path], Written | None]
FILES: Mapping[str, tuple[Reader, ...]] = {
    ".json": (_result, _certificates),
    ".jsonl": (_samples, _rows),
    ".arrow": (_samples,),
}
FOLDERS: tuple[Reader, ...] = (_run, _states, _samples)
