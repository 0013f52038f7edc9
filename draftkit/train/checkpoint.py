"""A draft in training as a unified folder, and back; and what `--resume` goes on with.

A run is resumed from the newest whole checkpoint of its folder, and only where it is the run that wrote it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from draftkit.convert.unified import write_draft
from draftkit.data.sample_files import samples_sha256
from draftkit.data.states.shards import read_manifest
from draftkit.engines.serving import TOKENS_FACT
from draftkit.errors import DraftkitError
from draftkit.hub.local_paths import public_name
from draftkit.io.cache import local_file
from draftkit.io.handles import memory_handle
from draftkit.io.jsonfile import read_object
from draftkit.layout.digest import draft_sha256, weights_sha256
from draftkit.layout.folder import Draft, read_draft
from draftkit.layout.provenance import TRAINED_FACT, FactOrigin, Provenance
from draftkit.layout.spec import HF_DTYPES, DraftSpec
from draftkit.loading import OpenedTarget
from draftkit.train.config import TrainConfig, read_config
from draftkit.version import __version__


def save_draft(
    out: Path,
    spec: DraftSpec,
    tensors: Mapping[str, Tensor],
    *,
    target: str,
    files: tuple[Path, ...] = (),
    dtype: torch.dtype | None = None,
    speculative_tokens: int | None = None,
    longest: int | None = None,
    force: bool = False,
) -> None:
    """Write a unified draft folder. `dtype`: what floating-point weights are cast to, None to keep theirs.

    `speculative_tokens`: the draft tokens a round that it was trained for, None where more may be asked of it.
    `longest`: the tokens of the longest sample.
    `files`: the tokenizer of a causal language model. Raises `LayoutError` when the tensors do not fit the spec.
    """
    draft = draft_in_memory(
        spec, tensors, target=target, out=out, files=files, dtype=dtype,
        speculative_tokens=speculative_tokens, longest=longest,
    )  # fmt: skip
    write_draft(out, draft, force=force)


def draft_in_memory(
    spec: DraftSpec,
    tensors: Mapping[str, Tensor],
    *,
    target: str,
    out: Path = Path("in-memory"),
    files: tuple[Path, ...] = (),
    dtype: torch.dtype | None = None,
    speculative_tokens: int | None = None,
    longest: int | None = None,
) -> Draft:
    """The draft that `save_draft` would write to `out`, as it would be read from there."""
    handles = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu()
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        handles[name] = memory_handle(name, tensor.contiguous(), out)
    floats = [handle.dtype for name, handle in handles.items() if tensors[name].is_floating_point()]
    architecture = spec.architecture.stored_in(HF_DTYPES[floats[0]])
    spec = DraftSpec(architecture=architecture, dtype=floats[0])
    provenance = Provenance(
        source="draftkit train",
        source_revision=None,
        format="trained",
        files=(),
        target=public_name(target),
        target_revision=None,
        facts=_facts(spec, speculative_tokens, longest),
        dropped_config={},
        losses=(),
        draftkit_version=__version__,
    )
    return Draft(out, spec, provenance, handles, files)


def _facts(spec: DraftSpec, speculative_tokens: int | None, longest: int | None) -> tuple[FactOrigin, ...]:
    """The facts that the draft was trained with; the config of a causal language model has a file of its own."""
    facts = {name: (value, "as it was trained") for name, value in spec.facts().items() if name != "config"}
    if speculative_tokens is not None:
        facts[TOKENS_FACT] = (speculative_tokens, "the steps of its training")
    if longest is not None:
        facts[TRAINED_FACT] = (longest, "the longest sample of its training")
    return tuple(FactOrigin(name=n, value=str(v), origin="stated", note=note) for n, (v, note) in facts.items())


def load_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a draft that `save_draft` wrote."""
    return {name: handle.load() for name, handle in read_draft(folder).tensors.items()}


CONFIG_FILE = "train.yaml"  # in every checkpoint, as the next file is
INPUTS_FILE = "inputs.json"
STATE_FILE = "trainer_state.json"  # the last file of a checkpoint to be written
ROWS_PER_STEP = "rows_per_step"  # of all processes together: what a step learns from
ACCUMULATION = "optimization.accumulation"
# Settings that may change on the way: for how long, where and how fast the run computes, what it saves and says.
FREE = frozenset({
    "out", "device", "media_root", "verify_states", "keep", "save_every", "log_every", "report_to", "validation.every",
    "validation.keep", "validation.patience", "optimization.epochs", "optimization.max_steps",
    "optimization.compile", "optimization.recompute", "stream.python", "stream.folder",
    "stream.ahead", "stream.tensor_parallel", "stream.device",
})  # fmt: skip


def newest_checkpoint(out: Path) -> Path | None:
    """The newest checkpoint that was written completely. A copy such as `checkpoint-10-backup` is none."""
    names = (path.parent.name for path in out.glob(f"checkpoint-*/{STATE_FILE}"))
    steps = [int(step) for name in names if (step := name.removeprefix("checkpoint-")).isdecimal()]
    return out / f"checkpoint-{max(steps)}" if steps else None


def inputs_of(config: TrainConfig, target: OpenedTarget, draft: Draft | None, rows: int) -> dict[str, object]:
    """The weights, data and batch of a run, each under the name of the setting that names it, if one does.

    All of the target's weights are read. `draft`: the one that is gone on with. `rows`: those of a step, of all
    processes.
    """
    states, target_sha256 = None, None
    if config.states:
        manifest = read_manifest(config.states)
        states = f"{manifest.encoding}, by {manifest.engine} in {manifest.dtype}"
        target_sha256 = manifest.target_sha256  # the run holds the target to it
    judges = config.validation.samples
    return {
        "target": target_sha256 or target.mark(weights_sha256(target.folder)),
        "draft": None if draft is None else draft_sha256(draft),
        "data": samples_sha256(local_file(config.data)),
        "states": states,
        "validation.samples": samples_sha256(local_file(judges)) if judges else None,
        ROWS_PER_STEP: rows,
    }


def rows_of_process(checkpoint: Path | None, config: TrainConfig, processes: int) -> int:
    """The rows that each of `processes` reads for a step: `optimization.accumulation` for a new run; for one that goes
    on as it was begun, what keeps the rows of all processes together as many as they were.

    Raises `DraftkitError` where these cannot be shared equally.
    """
    asked = config.optimization.accumulation
    if checkpoint is None:
        return asked
    rows = read_object(checkpoint / INPUTS_FILE).get(ROWS_PER_STEP)
    if not isinstance(rows, int) or rows == asked * processes:
        return asked
    if asked != read_config(checkpoint / CONFIG_FILE, [], {}).optimization.accumulation:
        return asked  # refused with what else is another
    if rows % processes:
        raise DraftkitError(
            f"a step of the run has {rows} rows, which {processes} processes cannot share equally",
            where=checkpoint,
            expected=f"a number of processes that divides {rows}",
            hint="go on with such a number, or train in another folder",
        )
    return rows // processes


def check_same_run(checkpoint: Path, config: TrainConfig, inputs: Mapping[str, object]) -> list[str]:
    """Raise `DraftkitError` that lists in what a run, with `inputs_of` it, is another than a checkpoint's.

    Returns the settings that have changed and may.
    """
    before, found = read_config(checkpoint / CONFIG_FILE, [], {}), read_object(checkpoint / INPUTS_FILE)
    free = FREE | {ACCUMULATION} if found.get(ROWS_PER_STEP) == inputs[ROWS_PER_STEP] else FREE
    others = dict(_other_settings(before, config, found, inputs))
    differing = [*(f"{name}: {said}" for name, said in others.items() if name not in free)]
    differing += _too_short(checkpoint, config)
    if differing:
        raise DraftkitError(
            "the run was begun with other settings:" + "".join(f"\n    {line}" for line in differing),
            where=checkpoint,
            hint="give the same settings to go on with it, or train in another folder",
        )
    return [f"{name} {said}" for name, said in others.items()]


def _other_settings(
    before: TrainConfig, now: TrainConfig, found: Mapping[str, object], inputs: Mapping[str, object]
) -> Iterator[tuple[str, str]]:
    """The settings and inputs that differ, by name, and how."""
    old, new = (
        {name: setting for name, setting in run.by_name().items() if setting not in ("", "None")}
        for run in (before, now)
    )
    for name in dict.fromkeys([*old, *new, *inputs]):
        is_setting = name not in inputs
        if old.get(name) != new.get(name) if is_setting else found.get(name) != inputs[name]:
            yield name, f"{_said(old.get(name), found.get(name))}, now {_said(new.get(name), inputs.get(name))}"


def _too_short(checkpoint: Path, config: TrainConfig) -> Iterator[str]:
    """What is wrong with a run that asks for fewer steps or epochs than the checkpoint has done."""
    state, settings = read_object(checkpoint / STATE_FILE), config.optimization
    name, asked, done = "max_steps", float(settings.max_steps), state.get("global_step")
    if not settings.max_steps:
        name, asked, done = "epochs", settings.epochs, state.get("epoch")
    if isinstance(done, int | float) and done > asked:
        yield f"optimization.{name}: {done:g} are done, now {asked:g}"


def _said(setting: object, content: object) -> str:
    """A setting and what was found where it points to, of a digest the beginning; either may be None."""
    if isinstance(content, str):
        return f"{setting or 'none'} ({content[:12] + '…' if len(content) == 64 else content})"
    found = setting if content is None else content
    return "none" if found is None else str(found)
