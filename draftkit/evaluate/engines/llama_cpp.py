"""llama.cpp: its server is started with each draft, and measured as any server is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Self

from draftkit.convert.api import convert_checkpoint
from draftkit.engines.llama_cpp import draft_arguments, loads
from draftkit.engines.llama_cpp.process import llama_server
from draftkit.engines.servers.kinds.llama_cpp import LlamaCppServer
from draftkit.engines.servers.server import server_of
from draftkit.errors import DraftkitError
from draftkit.evaluate.engine import BaseEngine
from draftkit.evaluate.engines.server import served_heading, server_lane
from draftkit.evaluate.job import Job, made_by
from draftkit.evaluate.measure import Conversations, Lane, PromptProgress, Report
from draftkit.evaluate.options import LlamaCppSettings
from draftkit.hub.locate import Located
from draftkit.io.atomic import temporary_folder
from draftkit.io.settings import with_values
from draftkit.layout.digest import draft_sha256
from draftkit.layout.folder import Draft
from draftkit.layout.target import TargetFacts
from draftkit.loading import OpenedDraft
from draftkit.results.cell import Heading
from draftkit.results.settings import AS_STARTED, Settings

MEGABYTE = 1e6


@dataclass(frozen=True)
class _Served:
    """A draft, its content, its GGUF file and the log of the server that runs it."""

    draft: Draft
    sha256: str
    file: Path
    log: Path


class LlamaCppEngine(BaseEngine):
    """llama.cpp, from GGUF files; other models are converted on the way, in their dtype, once for all cells.

    A result calls each draft by its name and how large its file is.
    """

    name = LlamaCppServer.engine
    settings_type = LlamaCppSettings
    untold = LlamaCppServer.untold

    def __init__(self, settings: LlamaCppSettings):
        self.settings = settings

    @classmethod
    def of(cls, values: Mapping[str, object], out: Path | None = None) -> Self:
        """Make the engine; the logs of its servers go beside the result."""
        log = Path("llama-server.log") if out is None else out.with_suffix(".llama-server.log")
        return cls(with_values(LlamaCppSettings, values).logging_to(log))

    def check(self, job: Job) -> None:
        """Take on a job. Raises `DraftkitError` also for a draft that llama.cpp does not run, or only with fewer
        tokens."""
        super().check(job)
        AS_STARTED.check(job.sweep)
        self.opened = [_run_by_it(opened, job.sweep.first) for opened in job.opened.values()]

    def open(self, on_progress: PromptProgress) -> None:
        super().open(on_progress)
        job = self.job
        self.scratch = job.stack.enter_context(temporary_folder())
        target = job.opened_target
        self.file = _file(target.located, target.facts, self.scratch / "target.gguf")
        self._draft_stack = job.stack.enter_context(ExitStack())
        self._running: dict[str, str] = {}  # the draft whose server runs, and its address

    @cached_property
    def served(self) -> Mapping[str, _Served]:
        """The drafts that are served, by their names in the result."""
        found = {}
        for number, (opened, draft) in enumerate(zip(self.job.opened.values(), self.opened, strict=True)):
            assert opened.located is not None
            file = _file(opened.located, opened.target.facts, self.scratch / f"draft-{number}.gguf")
            log = _named(self.settings.log, str(number)) if len(self.opened) > 1 else self.settings.log
            name = f"{opened.name} ({file.stat().st_size / MEGABYTE:.2f} MB)"
            found[name] = _Served(draft, draft_sha256(draft), file, log)
        return found

    @property
    def provenance(self) -> dict[str, object]:
        return made_by() | {"server": {"engine": self.name}}

    @property
    def sources(self) -> Sequence[str]:
        return list(self.served)

    def heading(self, source: str, settings: Settings) -> Heading:
        served = self.served[source]
        heading = served_heading(self, self.job.opened_target.name, source, served.draft.spec.method, settings)
        return replace(self.job.seen(heading), target_sha256=self.job.target_sha256, draft_sha256=served.sha256)

    @contextmanager
    def lane(self, source: str | None, asked: Conversations, report: Report) -> Iterator[Lane]:
        server = server_of(LlamaCppServer, self._plain if source is None else self._drafting(source))
        yield server_lane(server, asked, self.job.opened_target.end_ids, report, speculates=source is not None)

    @cached_property
    def _plain(self) -> str:
        """The address of the server without a draft, which runs until all is measured."""
        return self._start(self.job.stack, [], _named(self.settings.log, "plain"))

    def _drafting(self, source: str) -> str:
        """The address of the server with a draft, which runs until another draft is asked for."""
        if source not in self._running:
            self._draft_stack.close()
            served, k = self.served[source], self.job.sweep.first.num_speculative_tokens
            arguments = draft_arguments(served.draft.spec, served.file, k)
            self._running = {source: self._start(self._draft_stack, arguments, served.log)}
        return self._running[source]

    def _start(self, stack: ExitStack, arguments: Sequence[str], log: Path) -> str:
        slots = str(max(self.job.sweep.concurrency))
        served = ["-m", str(self.file), "-np", slots, *arguments]
        return stack.enter_context(llama_server(self.settings.program, served, log))


def _run_by_it(opened: OpenedDraft, settings: Settings) -> Draft:
    """The draft, if llama.cpp runs it with so many tokens a round. Raises `DraftkitError` if not."""
    source = opened.name
    draft = opened.plan().require_draft() if opened.is_foreign else opened.draft
    spec, k = draft.spec, settings.num_speculative_tokens
    if not loads(spec, "gguf"):
        raise DraftkitError(f"llama.cpp runs no {spec.method} drafts", where=source)
    most = spec.architecture.draft_tokens
    if most is not None and k > most:
        raise DraftkitError(
            f"the draft proposes at most {most} tokens a round, and llama-server would propose no more with {k}",
            where=source,
            expected=f"--k from 1 to {most}",
        )
    return draft


def _named(log: Path, what: str) -> Path:
    return log.with_suffix(f".{what}{log.suffix}")


def _file(model: Located, target: TargetFacts, out: Path) -> Path:
    """The GGUF file of a model, written to `out` where it is none."""
    if model.path.is_file():
        return model.path
    model.fetch()
    return convert_checkpoint(model, out, to="gguf", target=target)
