"""Drafts measured in llama.cpp: its server is started with each, and measured as any server is."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from draftkit.convert.api import convert_checkpoint, plan_conversion
from draftkit.engines.llama_cpp import draft_arguments, loads
from draftkit.engines.llama_cpp.process import llama_server
from draftkit.errors import DraftkitError
from draftkit.evaluate.measure import Progress
from draftkit.evaluate.options import LlamaCppSettings
from draftkit.evaluate.server import ServerSettings, evaluate_server
from draftkit.hub.locate import locate
from draftkit.io.atomic import temporary_folder
from draftkit.layout.digest import draft_sha256
from draftkit.layout.folder import Draft, is_unified, read_draft
from draftkit.results.record import Result
from draftkit.results.saved import ResultFile
from draftkit.results.settings import AS_STARTED, Settings, Sweep
from draftkit.results.verdict import verdicts

MEGABYTE = 1e6


def evaluate_llama_cpp(
    target: str,
    drafts: Sequence[str],
    asked_for: Settings | Sweep,
    settings: LlamaCppSettings,
    on_progress: Progress = lambda *_: None,
    *,
    saved: ResultFile | None = None,
) -> Result:
    """Measure drafts in llama.cpp, one server after another. What is no GGUF file is made one on the way, in its dtype.

    The result calls each draft by its file and how large that is. Beside each runs the same program without a draft, by
    turns, for the speed-up. Raises `DraftkitError`, also for a draft that llama.cpp does not run, or with fewer tokens.
    """
    sweep = Sweep.of(asked_for)
    AS_STARTED.check(sweep)
    k, results = sweep.k[0], []
    slots = str(max(sweep.concurrency))
    opened = [_run_by_it(source, target, k) for source in drafts]
    with temporary_folder() as scratch:
        target_file = _file(target, target, scratch / "target.gguf")
        served = ["-m", str(target_file), "-np", slots]
        for number, (source, draft) in enumerate(zip(drafts, opened, strict=True)):
            file = _file(source, target, scratch / f"draft-{number}.gguf")
            log = _named(settings.log, str(number)) if len(drafts) > 1 else settings.log
            with (
                llama_server(settings.program, [*served, *draft_arguments(draft.spec, file, k)], log) as url,
                llama_server(settings.program, served, _named(log, "plain")) as plain_url,
            ):
                name = f"{source} ({file.stat().st_size / MEGABYTE:.2f} MB)"
                servers = ServerSettings(url, plain_url)
                found = evaluate_server(servers, sweep, on_progress, target=target, draft=name)
            method, sha256 = draft.spec.method, draft_sha256(draft)
            own = tuple(replace(cell, method=method, draft_sha256=sha256) for cell in found.cells)
            results.append(replace(found, cells=own))
    cells = tuple(itertools.chain.from_iterable(result.cells for result in results))
    warnings = tuple(dict.fromkeys(itertools.chain.from_iterable(result.warnings for result in results)))
    whole = Result(cells, results[0].provenance, warnings, verdicts=verdicts(cells))
    if saved is not None:
        saved.write(whole.to_dict())
    return whole


def _run_by_it(source: str, target: str, k: int) -> Draft:
    """A draft. Raises `DraftkitError` for one that llama.cpp does not run, or not with so many tokens a round."""
    located = locate(source, as_file=True)
    unified = is_unified(located.path)
    draft = read_draft(located.path) if unified else plan_conversion(source, target=target).require_draft()
    spec = draft.spec
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


def _file(source: str, target: str, out: Path) -> Path:
    """The GGUF file of a model, written to `out` where it is none."""
    located = locate(source, as_file=True)
    if located.path.is_file():
        return located.path
    return convert_checkpoint(source, out, to="gguf", target=target)
