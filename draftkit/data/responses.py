"""Answers to prompts, by the target in draftkit's own engine, and the file of the answers.

The file grows by whole lines, so that a killed run goes on where it stopped. `endpoints` has answers by servers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Protocol

from torch import Tensor
from transformers import PreTrainedModel

from draftkit.data.journals import journal_at, not_ours
from draftkit.data.rows import REGENERATED, Message, Row
from draftkit.data.samples import Reason
from draftkit.errors import DraftkitError, FormatError, command
from draftkit.hub.local_paths import public_name
from draftkit.io.jsonl import dump_line
from draftkit.layout.digest import weights_sha256
from draftkit.loading import OpenedTarget, open_target
from draftkit.media import MediaFolder, for_servers
from draftkit.requests import Request, SamplingParameters
from draftkit.runtime.engine import Engine
from draftkit.targets.devices import device_named, dtype_named, tune_for_cpu
from draftkit.targets.target import Target


@dataclass(frozen=True)
class MediaPrompt:
    """What a prompt with images or sounds is to a server, `messages` with files in `folder` and what else it is asked
    with, `chat`; and what the target in this process is given besides the ids, its `inputs`."""

    messages: tuple[Message, ...]
    folder: MediaFolder
    inputs: Mapping[str, Tensor]
    chat: Mapping[str, object] = field(default_factory=dict)

    def sent(self) -> tuple[tuple[str, object], ...]:
        """The messages as a server takes them. Raises `RefusedMedia`."""
        return tuple((said["role"], said["content"]) for said in for_servers(self.messages, self.folder))


@dataclass(frozen=True)
class RowPrompt:
    """Token ids to answer, the id of the row, and the seed of the answer's random numbers, below 2⁶³.

    `goes_on`: whether the row has been answered before, so that a server may still have what it read then. `media`: of
    a prompt with images or sounds; with sounds only the server knows the ids, and there are none here.
    """

    id: str
    tokens: tuple[int, ...]
    seed: int
    goes_on: bool = False
    media: MediaPrompt | None = None


@dataclass(frozen=True)
class Refusal:
    """A prompt that is not answered, and why: `kind` in short."""

    reason: str
    kind: Reason = Reason.REFUSED


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn and what ends them. `max_new_tokens` bounds each."""

    parameters: SamplingParameters
    max_new_tokens: int
    end_ids: frozenset[int]


Responded = tuple[RowPrompt, tuple[int, ...] | Refusal]
NextRow = Callable[[], RowPrompt | None]


class Responder(Protocol):
    """Answers prompts with the very token ids; the one that ended an answer is its last."""

    def respond(self, ask: NextRow) -> Iterator[Responded]:
        """Answer what `ask` gives, as soon as there is room, and give each answer once it is there.

        `ask` gives None where there is nothing to ask now; it is asked again when the next answer was taken. The end is
        where it gives None and no answer is waited for. At most one prompt of an id is under way.
        """
        ...


class EngineResponder:
    """The target in draftkit's engine, `concurrency` sequences at a time."""

    def __init__(self, model: PreTrainedModel, sampling: Sampling, concurrency: int):
        self.sampling = sampling
        self.engine = Engine(Target(model), None, num_speculative_tokens=0, num_slots=concurrency)

    def respond(self, ask: NextRow) -> Iterator[Responded]:
        """The answers; a prompt that fills the target's context is refused."""
        positions, sampling = self.engine.target.positions, self.sampling
        asked: dict[str, RowPrompt] = {}
        refused: list[Responded] = []

        def request() -> Request | None:
            while (prompt := ask()) is not None:
                if room := max(positions.room(len(prompt.tokens)), 0):
                    asked[prompt.id] = prompt
                    most, drawn = min(sampling.max_new_tokens, room), replace(sampling.parameters, seed=prompt.seed)
                    inputs = None if prompt.media is None else prompt.media.inputs
                    return Request(prompt.id, prompt.tokens, most, drawn, sampling.end_ids, media=inputs)
                why = f"{len(prompt.tokens)} prompt tokens: its tokens fill the target's context of {positions.most}"
                refused.append((prompt, Refusal(why)))
            return None

        while True:
            for generation in self.engine.stream(request):
                yield asked.pop(generation.request.id), tuple(generation.tokens)
                while refused:
                    yield refused.pop()
            if not refused:
                return
            while refused:  # whoever takes these may have more to ask
                yield refused.pop()


def engine_weights(target: str | OpenedTarget) -> str:
    """The digest of the weights that `engine_responder` loads. Raises `DraftkitError` where it would not load them."""
    target = open_target(target)
    target.require_runtime(_served_instead(target.name))  # before all of them are read
    return target.mark(weights_sha256(target.folder))


def engine_responder(
    target: str | OpenedTarget,
    sampling: Sampling,
    concurrency: int,
    *,
    device: str | None = None,
    dtype: str | None = None,
) -> EngineResponder:
    """Load a target (path, Hub id or `zoo:target`) to answer; `device` and `dtype` as in `evaluate.Settings`."""
    target = open_target(target)
    target.require_runtime(_served_instead(target.name))
    place = device_named(device)
    model = target.load(device=place, dtype=dtype_named(dtype, place))
    tune_for_cpu(model)
    return EngineResponder(model, sampling, concurrency)


def _served_instead(target: str) -> str:
    return f"{command('vllm', 'serve', target)}, and --endpoint http://HOST:PORT/v1 of that server"


PLACES = ("source", "target", "media_root")  # settings that say where something lies, of which the name counts


class ResponseFile:
    """JSONL: a first line with the settings, then a line for each row that is done; `done` holds their ids, each with
    the digest of the row that it was made of, where there was one.

    `place`: of a file, or an address, beneath which the lines are in parts. Raises `DraftkitError` when it was made
    with other settings (of source and target the name counts) and while another process has it open, `FormatError`
    naming a damaged line. `format`: what the first line says it is.
    """

    def __init__(self, place: Path | str, settings: Mapping[str, object], format: str = REGENERATED):
        self.path = place
        self.settings = dict(settings)
        self.format = format
        self.done: dict[str, object] = {}
        self._journal = journal_at(place, format)
        if self._journal.begun():
            self._resume()

    @property
    def begun(self) -> bool:
        """Whether anything is there."""
        return self._journal.begun()

    @property
    def every(self) -> float:
        """The seconds between two times that it is best added to."""
        return self._journal.every

    def append(self, rows: Iterable[Mapping[str, object]]) -> None:
        """Add rows and wait until they are kept. On failure what was there is what it was; raises `DraftkitError`."""
        added = list(rows)
        header = dump_line({"format": self.format, "version": 1, "settings": self.settings})
        self._journal.append(header, [dump_line(row) for row in added])
        self.done.update((str(row["id"]), row.get("row_sha256")) for row in added)

    def rows(self) -> Iterator[tuple[str, dict[str, object]]]:
        """The rows that are there, each with its place."""
        return itertools.islice(self._journal.lines() if self.begun else (), 1, None)

    def has(self, row: Row, begun: Mapping[str, str] = MappingProxyType({})) -> bool:
        """Whether a row is done, or among those that are `begun`, by id and digest. Raises `DraftkitError` where
        another one is, of the same id."""
        found = self.done.get(row.id, begun.get(row.id, ...))
        if found not in (..., row.sha256):
            raise DraftkitError(
                f"{PurePath(self.path).name} has the answer to another row {row.id}, which has changed since",
                where=row.where,
                hint="give the rows that it was begun with to go on with it, or write to another file",
            )
        return found is not ...

    def _resume(self) -> None:
        _, header = next(self._journal.lines(), ("", None))
        if header is None:
            return
        _check_header(header, self.format, self.settings, self.path)
        for where, row in self.rows():
            if not isinstance(row.get("id"), str):
                raise FormatError("the row has no id", where=where, hint="remove the line")
            self.done[str(row["id"])] = row.get("row_sha256")


def _check_header(header: Mapping[str, object], format: str, settings: Mapping[str, object], path: Path | str) -> None:
    made_with = header.get("settings")
    if header.get("format") != format or not isinstance(made_with, dict):
        raise not_ours(path)
    # The source and the target may have been moved since. What is in the target, the digests say.
    before, now = ({k: public_name(str(v)) if k in PLACES else v for k, v in s.items()} for s in (made_with, settings))
    differing = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    if differing:
        raise DraftkitError(
            "the file was begun with other settings:"
            + "".join(f"\n    {key}: {made_with.get(key)!r}, now {settings.get(key)!r}" for key in differing),
            where=path,
            hint="give the same settings to go on with it, or write to another file",
        )
