"""What `--resume` goes on with: the newest whole checkpoint of a folder, and only for the run that wrote it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

from draftkit.data.states.shards import SCHEMA, file_sha256, read_manifest
from draftkit.errors import DraftkitError
from draftkit.io.jsonfile import read_object
from draftkit.layout.digest import draft_sha256, weights_sha256
from draftkit.layout.folder import Draft
from draftkit.loading import OpenedTarget
from draftkit.train.config import TrainConfig, read_config

_log = logging.getLogger(__name__)
CONFIG_FILE = "train.yaml"  # beside every checkpoint, as the next
INPUTS_FILE = "inputs.json"
STATE_FILE = "trainer_state.json"  # the last file of a checkpoint to be written
# Settings that may change on the way: for how long, where and how fast the run computes, what it saves and says.
FREE = frozenset({
    "out", "device", "keep", "save_every", "log_every", "report_to", "validation.every", "validation.keep",
    "validation.patience", "validation.decode", "optimization.epochs", "optimization.max_steps", "optimization.compile",
    "optimization.recompute", "stream.python", "stream.folder", "stream.ahead", "stream.tensor_parallel",
    "stream.device",
})  # fmt: skip


def newest_checkpoint(out: Path) -> Path | None:
    """The newest checkpoint that was written completely."""
    complete = [path.parent for path in out.glob(f"checkpoint-*/{STATE_FILE}")]
    return max(complete, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def inputs_of(config: TrainConfig, target: OpenedTarget, draft: Draft | None, processes: int) -> dict[str, object]:
    """What a run is of besides its settings, some of them under the name of the setting that says where it lies.

    All of the target's weights are read. `draft`: the one that is gone on with. `processes`: how many train together.
    """
    states, stored_sha256 = None, None
    if config.states:
        manifest = read_manifest(Path(config.states))
        states = f"{manifest.encoding}, by {manifest.engine} in {manifest.dtype}"
        stored_sha256 = manifest.target_sha256 if manifest.schema == SCHEMA else None  # the run holds the target to it
    judges = config.validation.samples
    return {
        "target": stored_sha256 or weights_sha256(target.folder),
        "draft": None if draft is None else draft_sha256(draft),
        "data": file_sha256(Path(config.data)),
        "states": states,
        "validation.samples": file_sha256(Path(judges)) if judges else None,
        "processes": processes,
    }


def check_same_run(checkpoint: Path, config: TrainConfig, inputs: Mapping[str, object]) -> None:
    """Raise `DraftkitError` that lists in what a run, with `inputs_of` it, is another than a checkpoint's."""
    before = read_config(checkpoint / CONFIG_FILE, [], {})
    found: Mapping[str, object] = inputs
    if (checkpoint / INPUTS_FILE).exists():
        found = read_object(checkpoint / INPUTS_FILE)
    else:
        _log.warning("%s does not say which weights and data it is of: its settings alone are compared", checkpoint)
    differing = [*_other_settings(before, config, found, inputs), *_too_short(checkpoint, config)]
    if differing:
        raise DraftkitError(
            "the run was begun with other settings:" + "".join(f"\n    {line}" for line in differing),
            where=checkpoint,
            hint="give the same settings to go on with it, or train in another folder",
        )


def _other_settings(
    before: TrainConfig, now: TrainConfig, found: Mapping[str, object], inputs: Mapping[str, object]
) -> Iterator[str]:
    old, new = (
        {name: setting for name, setting in run.by_name().items() if setting not in ("", "None")}
        for run in (before, now)
    )
    for name in dict.fromkeys([*old, *new, *inputs]):
        if name in inputs:
            differs = found.get(name) != inputs[name]
        else:
            differs = name not in FREE and old.get(name) != new.get(name)
        if differs:
            yield f"{name}: {_said(old.get(name), found.get(name))}, now {_said(new.get(name), inputs.get(name))}"


def _too_short(checkpoint: Path, config: TrainConfig) -> Iterator[str]:
    """That less is asked for than is done."""
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
