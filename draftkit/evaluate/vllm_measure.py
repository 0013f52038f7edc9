"""A draft measured with vLLM instead of draftkit's own engine."""

from __future__ import annotations

from collections.abc import Sequence

from draftkit.engines.vllm.offline import find_python, offline_engine, run_offline
from draftkit.engines.vllm.records import VllmRun
from draftkit.engines.vllm.request import end_token_ids
from draftkit.engines.vllm.server import run_on_server
from draftkit.engines.vllm.settings import VllmSettings
from draftkit.errors import DraftkitError
from draftkit.evaluate.measure import Progress
from draftkit.evaluate.vllm_cells import vllm_cell
from draftkit.evaluate.vllm_drafts import served_draft
from draftkit.hub.locate import locate
from draftkit.requests import Request
from draftkit.results.settings import Settings


def check_with_vllm(target: str, drafts: Sequence[str], settings: Settings, vllm: VllmSettings) -> None:
    """Raise `DraftkitError` for what would be refused later, after other long work."""
    _require_first_turn(settings)
    if vllm.url is not None:
        return
    find_python(vllm.python)
    for draft in drafts:
        with served_draft(draft, target, settings):
            pass


def measure_with_vllm(
    target: str,
    draft: str,
    requests: Sequence[Request],
    settings: Settings,
    vllm: VllmSettings,
    *,
    plain: VllmRun | None = None,
    categories: Sequence[str] | None = None,
    on_progress: Progress = lambda *_: None,
) -> dict[str, object]:
    """The cell of a draft: `requests` through vLLM's offline engine, or through the server of `vllm.url`.

    `target` and `draft` as in `evaluate_draft`; a server has its own draft, and `draft` only names it. `plain` is what
    `run_plain` gave for the same target, requests and settings; it is run here when None. `categories`: one for each
    request. Raises `DraftkitError`; for a draft that vLLM cannot run, before anything is started.
    """
    _require_first_turn(settings)
    if vllm.url is not None:
        plain = plain or run_plain(target, requests, settings, vllm, on_progress)
        ends = _end_ids(target)
        run = run_on_server(draft, vllm.url, requests, settings, ends, speculates=True, on_progress=on_progress)
        # How the server's draft is built, drawn and verified, its metrics do not say.
        cell = vllm_cell(run, plain, settings, categories) | {"draft_sampling": None, "verification": None}
        return _named(target, draft, "served", settings) | cell
    with served_draft(draft, target, settings) as served:
        engine = offline_engine(target, requests, settings, vllm, served.speculative)
        plain = plain or run_plain(target, requests, settings, vllm, on_progress)
        run = run_offline(draft, engine, requests, settings, on_progress)
    return _named(target, draft, served.method, settings) | vllm_cell(run, plain, settings, categories)


def run_plain(
    target: str,
    requests: Sequence[Request],
    settings: Settings,
    vllm: VllmSettings,
    on_progress: Progress = lambda *_: None,
) -> VllmRun | None:
    """The same requests without a draft, once for all drafts; None for a server without a `baseline_url`."""
    if vllm.url is None:
        engine = offline_engine(target, requests, settings, vllm, None)
        return run_offline("no draft", engine, requests, settings, on_progress)
    if vllm.baseline_url is None:
        return None
    return run_on_server(
        "no draft", vllm.baseline_url, requests, settings, _end_ids(target), speculates=False, on_progress=on_progress
    )


def _require_first_turn(settings: Settings) -> None:
    if settings.turns != "first":
        raise DraftkitError("vLLM is asked the first turn of each prompt only", hint="leave out --turns all")


def _end_ids(target: str) -> frozenset[int]:
    return end_token_ids(locate(target, weights=False).path)


def _named(target: str, draft: str, method: str, settings: Settings) -> dict[str, object]:
    return {"target": target, "draft": draft, "method": method, "dataset": settings.prompts}
