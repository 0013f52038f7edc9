"""A draft measured with vLLM instead of draftkit's own engine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from draftkit.engines.vllm.offline import OfflineEngine, engine_arguments, run_offline
from draftkit.engines.vllm.process import find_python
from draftkit.engines.vllm.records import VllmRun
from draftkit.engines.vllm.request import warm_up
from draftkit.engines.vllm.server import run_on_server
from draftkit.engines.vllm.settings import VllmSettings
from draftkit.errors import DraftkitError
from draftkit.evaluate.measure import Progress
from draftkit.evaluate.vllm_cells import vllm_cell
from draftkit.evaluate.vllm_drafts import served_draft
from draftkit.hub.locate import locate
from draftkit.models.devices import device_named, dtype_named
from draftkit.models.remote_code import trusts_remote_code
from draftkit.models.target import end_token_ids, read_config
from draftkit.requests import Request
from draftkit.results.record import Cell, Heading
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
) -> tuple[Cell, tuple[str, ...]]:
    """The cell of a draft, and what may be wrong with it.

    `requests` go through vLLM's offline engine, or through the server of `vllm.url`. `target` and `draft` as in
    `evaluate_draft`; a server has its own draft, and `draft` only names it. `plain` is what `run_plain` gave for the
    same target, requests and settings; it is run here when None. `categories`: one for each request. Raises
    `DraftkitError`; for a draft that vLLM cannot run, before anything is started.
    """
    _require_first_turn(settings)
    if vllm.url is not None:
        plain = plain or run_plain(target, requests, settings, vllm, on_progress)
        run = _run_on_server(draft, vllm.url, target, requests, settings, on_progress, speculates=True)
        # How the server's draft is built, drawn and verified, its metrics do not say.
        heading = replace(_heading(target, draft, "served", settings), draft_sampling=None, verification=None)
        return vllm_cell(heading, run, plain, settings, categories), run.concerns
    with served_draft(draft, target, settings) as served:
        plain = plain or run_plain(target, requests, settings, vllm, on_progress)
        run = _run_offline(draft, target, requests, settings, vllm, served.speculative, on_progress)
    heading = _heading(target, draft, served.method, settings)
    return vllm_cell(heading, run, plain, settings, categories), run.concerns


def run_plain(
    target: str,
    requests: Sequence[Request],
    settings: Settings,
    vllm: VllmSettings,
    on_progress: Progress = lambda *_: None,
) -> VllmRun | None:
    """The same requests without a draft, once for all drafts; None for a server without a `baseline_url`."""
    if vllm.url is None:
        return _run_offline("no draft", target, requests, settings, vllm, None, on_progress)
    if vllm.baseline_url is None:
        return None
    return _run_on_server("no draft", vllm.baseline_url, target, requests, settings, on_progress, speculates=False)


def _run_offline(
    name: str,
    target: str,
    requests: Sequence[Request],
    settings: Settings,
    vllm: VllmSettings,
    speculative: Mapping[str, object] | None,
    on_progress: Progress,
) -> VllmRun:
    folder = locate(target).path
    device = device_named(settings.device)
    arguments = engine_arguments(
        folder,
        vllm,
        speculative,
        dtype=str(dtype_named(settings.dtype, device)).removeprefix("torch."),
        eager=settings.eager or device == "cpu",
        longest=max(request.max_length for request in requests),
        # A target without such a number, as state space models, has no limit.
        context=getattr(read_config(folder).get_text_config(), "max_position_embeddings", sys.maxsize),
        num_speculative_tokens=settings.num_speculative_tokens,
        max_num_seqs=min(settings.concurrency, len(requests)),
        trust_remote_code=trusts_remote_code(),
    )
    engine = OfflineEngine(
        python=find_python(vllm.python),
        arguments=arguments,
        end_ids=end_token_ids(folder),
        device=settings.device,
    )
    return run_offline(engine, requests, _warming(requests, settings), _named_progress(name, requests, on_progress))


def _run_on_server(
    name: str,
    url: str,
    target: str,
    requests: Sequence[Request],
    settings: Settings,
    on_progress: Progress,
    *,
    speculates: bool,
) -> VllmRun:
    return run_on_server(
        url,
        requests,
        _warming(requests, settings),
        end_token_ids(locate(target, weights=False).path),
        concurrency=settings.concurrency,
        speculates=speculates,
        on_progress=_named_progress(name, requests, on_progress),
    )


def _warming(requests: Sequence[Request], settings: Settings) -> list[Request]:
    return warm_up(requests, settings.concurrency, settings.num_speculative_tokens)


def _named_progress(name: str, requests: Sequence[Request], on_progress: Progress) -> Callable[[int, float], None]:
    return lambda done, length: on_progress(name, done, len(requests), length)


def _require_first_turn(settings: Settings) -> None:
    if settings.turns != "first":
        raise DraftkitError("vLLM is asked the first turn of each prompt only", hint="leave out --turns all")


def _heading(target: str, draft: str, method: str, settings: Settings) -> Heading:
    return Heading.of(settings, engine="vllm", target=target, draft=draft, method=method, dataset=settings.prompts)
