"""What a measurement needs of an engine: one file in `engines/` for each, found by being there.

An engine is opened once for a measurement, with what serves all of its cells: weights that are loaded, drafts that are
converted. Its lanes run requests: one for each draft at each setting, and one without a draft beside them. What it
cannot tell, it leaves out of the answers and says in `untold`; `evaluate.py` asks no engine for its name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Self

from draftkit.errors import DraftkitError, NonFiniteError, UnsupportedTarget
from draftkit.evaluate.job import Job, environment
from draftkit.evaluate.measure import Conversations, Lane, PromptProgress, ReferenceAnswers, Report, Run
from draftkit.io.settings import with_values
from draftkit.layout.families import named
from draftkit.media import Modality
from draftkit.results.cell import Cell, Heading
from draftkit.results.record import SpeedModel
from draftkit.results.settings import Settings


class BaseEngine(ABC):
    """An engine that measures drafts. Everything but `lane` has a default."""

    name: str  # in results, and of `--engine`
    settings_type: ClassVar[type | None] = None  # the dataclass of what can be set of it, which it is made of
    compared: ClassVar[bool] = False  # whether draftkit's own engine runs the prompts too, where this one is asked for
    untold: Sequence[str] = ()  # figures of a measurement that it does not give, as a user calls them
    sees_weights: ClassVar[bool] = True  # whether what it runs are the target and the drafts that the user names
    takes: ClassVar[frozenset[Modality]] = frozenset()  # what else than text it is sent
    keeps_rounds: ClassVar[bool] = False  # whether its runs have `generations`: a record of every round

    job: Job  # once it is checked

    @classmethod
    def of(cls, values: Mapping[str, object], out: Path | None = None) -> Self:
        """The engine with those of the values by name that are settings of it; `out`: where the result is kept, beside
        which it may write. Raises `SettingError`."""
        return cls() if cls.settings_type is None else cls(with_values(cls.settings_type, values))  # type: ignore[call-arg]

    def check(self, job: Job) -> None:
        """Take on a job. Raise `DraftkitError` for what would be refused later, after other long work."""
        self.job = job

    def open(self, on_progress: PromptProgress) -> None:
        """Load and convert, for all cells; `job.stack` closes it. Raises `DraftkitError`."""
        self.on_progress = on_progress

    @property
    def provenance(self) -> dict[str, object]:
        """The provenance of a result: the device, the dtype and the versions that the engine runs with."""
        from draftkit.targets.devices import device_named, dtype_named  # needs torch

        settings = self.job.sweep.first
        device = device_named(settings.device)
        return environment(device, dtype_named(settings.dtype, device))

    @property
    def sources(self) -> Sequence[str]:
        """The drafts that it measures, as the user names them."""
        return self.job.sources

    def heading(self, source: str, settings: Settings) -> Heading:
        """The heading of a cell: what is measured and how. A cell that exists already is recognized by it."""
        heading = Heading.of(
            settings,
            engine=self.name,
            target=self.job.opened_target.name,
            draft=source,
            method=self.job.drafts[source].spec.method,
            dataset=self.job.prompts.name,
        )
        return self.job.weighed(drawn_as(heading, source))

    def matches(self, heading: Heading, cell: Cell) -> bool:
        """Whether an earlier cell is what the heading asks for."""
        return heading.key == cell.key

    @abstractmethod
    def lane(self, source: str | None, asked: Conversations, report: Report) -> AbstractContextManager[Lane]:
        """A lane: a function that runs requests with a draft, or without one, at the settings of `asked`.

        It is warm for all requests of these, and closed when the body ends. Raises `DraftkitError`."""

    def alone(self, settings: Settings) -> str | None:
        """Why the engine cannot run with a draft and without one at the same time; None where it can."""
        return None

    @property
    def without_plain(self) -> str | None:
        """Why there is no lane without a draft, and what to add; None where there is one."""
        return None

    def would_tell(self, cells: Sequence[Cell]) -> str | None:
        """What the user can do that more is told of these cells, which it has measured; None for nothing."""
        return None

    def told(self, cell: Cell, run: Run, plain: Run | None) -> Cell:
        """The cell with the figures that only this engine gives of a run. Raises `DraftkitError` for a run that is
        wrong."""
        return cell

    def speed_models(self, cells: Sequence[Cell]) -> list[SpeedModel]:
        """The speed models that follow from the engine's round times."""
        return []

    def reference(self, plain: Run) -> ReferenceAnswers | None:
        """The answers of another program to the requests of a greedy run without a draft; None where there is
        none, as for an engine that is only seen from outside."""
        return None


def able(
    engines: Sequence[BaseEngine], prepare: Callable[[BaseEngine], None], warn: Callable[[str], None]
) -> list[BaseEngine]:
    """The engines that can be prepared; `warn` is told why the others cannot.

    Raises `DraftkitError` where no engine is left, and for weights that are NaN or infinite, which would be garbage in
    any engine."""
    found = []
    for engine in engines:
        try:
            prepare(engine)
        except DraftkitError as error:
            if engine is engines[-1] or isinstance(error, NonFiniteError):
                raise
            why = error.problem if isinstance(error, UnsupportedTarget) else error
            warn(f"{engine.name}'s own engine does not run this pair: {why}")
        else:
            found.append(engine)
    return found


def drawn_as(heading: Heading, source: str) -> Heading:
    """The heading of a draft, which says greedy of one without a checkpoint: its tokens are certain, however it is
    asked to draw them."""
    if named(source) is None or heading.draft_sampling is None:
        return heading
    return replace(heading, draft_sampling="greedy")
