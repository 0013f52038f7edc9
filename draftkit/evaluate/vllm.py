"""A draft measured with vLLM: how vLLM is told of it, the run, and its counts as a cell of the result."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from statistics import fmean

from draftkit.convert.api import convert_checkpoint
from draftkit.engines.vllm.accepts import check_target, refusal_by_vllm
from draftkit.engines.vllm.offline import OfflineEngine, engine_arguments, run_offline
from draftkit.engines.vllm.process import find_python
from draftkit.engines.vllm.records import DraftCounts, VllmRun
from draftkit.engines.vllm.request import warm_up
from draftkit.engines.vllm.serve import speculative_config
from draftkit.engines.vllm.server import run_on_server
from draftkit.engines.vllm.settings import VllmSettings
from draftkit.errors import DraftkitError
from draftkit.evaluate.measure import Progress
from draftkit.hub.locate import locate
from draftkit.io.atomic import temporary_folder
from draftkit.layout.folder import read_draft
from draftkit.loading import open_draft
from draftkit.models.devices import device_named, dtype_named
from draftkit.models.pretrained import describe
from draftkit.models.remote_code import trusts_remote_code
from draftkit.models.target import end_token_ids
from draftkit.requests import Request
from draftkit.results.record import Cell, Heading, Interval
from draftkit.results.settings import Settings
from draftkit.results.statistics import bootstrap_length, conditional_rates, known, percentiles, quantiles, repetition

BY_VLLM = "draftkit eval --engine vllm --vllm-python ENV/bin/python measures with vLLM, --vllm-url with a server of it"


def vllm_here() -> VllmSettings | None:
    """vLLM of the running environment, None where it has none."""
    return None if find_spec("vllm") is None else VllmSettings()


def check_with_vllm(target: str, drafts: Sequence[str], settings: Settings, vllm: VllmSettings) -> None:
    """Raise `DraftkitError` for what would be refused later, after other long work."""
    _require_first_turn(settings)
    if vllm.url is not None:
        return
    find_python(vllm.python)
    check_target(locate(target, weights=False).path)
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
        context=getattr(describe(folder), "max_position_embeddings", None) or sys.maxsize,
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


@dataclass(frozen=True)
class ServedDraft:
    """The method of a draft, and vLLM's `speculative_config`."""

    method: str
    speculative: dict[str, object]


@contextmanager
def served_draft(source: str, target: str, settings: Settings) -> Iterator[ServedDraft]:
    """A draft (path, Hub id, `zoo:NAME`, `ngram[:MIN-MAX]`, `suffix`) in a folder that vLLM loads.

    Foreign checkpoints are converted into a temporary folder, and so are drafts of which vLLM runs another form only.
    Raises `DraftkitError` with the reason when vLLM cannot run the draft, or cannot draft as `settings` say.
    """
    k, drawing = settings.num_speculative_tokens, _drawing(settings)
    with open_draft(source, target) as draft, temporary_folder() as scratch:
        if refusal_by_vllm(draft.spec) is not None:
            draft = read_draft(convert_checkpoint(source, scratch / "draft", to="vllm", target=target))
        yield ServedDraft(draft.spec.method, speculative_config(draft.spec, draft.path, k) | drawing)


def _drawing(settings: Settings) -> dict[str, object]:
    """How drafts are drawn and verified, where that is not vLLM's default."""
    beyond = {
        f"{settings.verification} verification": settings.verification not in ("rejection", "block"),
        "a draft length for each batch size": settings.k_by_batch is not None,
        "a temperature of the draft's own": settings.draft_sampling.temperature is not None,
        "a floor for the draft's confidence": settings.draft_sampling.min_confidence > 0,
    }
    for what, wanted in beyond.items():
        if wanted:
            raise DraftkitError(f"{what} is not measured with vLLM", hint="leave it out, or take draftkit's engine")
    fields: dict[str, object] = {}
    if settings.draft_mode == "probabilistic":
        fields["draft_sample_method"] = "probabilistic"
    if settings.verification == "block":
        fields["rejection_sample_method"] = "block"
    return fields


def vllm_cell(
    heading: Heading,
    run: VllmRun,
    plain: VllmRun | None,
    settings: Settings,
    categories: Sequence[str] | None = None,
) -> Cell:
    """The cell of a run with a draft; `plain`: the same requests without one; `categories`: one for each request.

    Where vLLM counts only all requests together, there is no interval: `low` and `high` are the mean,
    `interval_known` is false and `by_category` empty. Raises `DraftkitError` for a run that drafted nothing.
    """
    drafts = run.drafts
    if drafts is None or not drafts.num_drafts:
        raise DraftkitError("vLLM has drafted nothing", hint="are the prompts and --max-new-tokens too short?")
    own = run.counted_by_request
    mean = drafts.acceptance_length
    by_category = {} if own is None or categories is None else _by_category(own, categories)
    ttft = [a.ttft for a in run.answers if a.ttft is not None]
    tpot = [a.tpot for a in run.answers if a.tpot is not None]
    itl = [gap for a in run.answers for gap in a.gaps or ()]
    counted = replace(heading, num_speculative_tokens=len(drafts.num_accepted_tokens_per_pos))
    cell = Cell(
        **vars(counted),
        engine_version=run.version,
        num_prompts=len(run.answers),
        output_tokens=run.output_tokens,
        num_drafts=drafts.num_drafts,
        num_draft_tokens=drafts.num_draft_tokens,
        num_accepted_tokens=drafts.num_accepted_tokens,
        num_accepted_tokens_per_pos=drafts.num_accepted_tokens_per_pos,
        acceptance_per_pos=tuple(n / drafts.num_drafts for n in drafts.num_accepted_tokens_per_pos),
        conditional_acceptance_per_pos=tuple(conditional_rates(drafts.num_accepted_tokens_per_pos, drafts.num_drafts)),
        acceptance_length=Interval(mean, mean, mean) if own is None else _length(own),
        interval_known=own is not None,
        acceptance_length_by_convention=_by_convention(run, drafts, by_category),
        by_category={**by_category},
        runtime_s=run.seconds,
        tokens_per_second=run.tokens_per_second,
        ttft_ms=percentiles(ttft),
        tpot_ms=percentiles(tpot),
        itl_ms=percentiles(itl),
        ttft_quantiles_ms=quantiles(ttft),
        tpot_quantiles_ms=quantiles(tpot),
        itl_quantiles_ms=quantiles(itl),
        repetition=fmean(repetition(answer.tokens) for answer in run.answers),
    )
    return cell if plain is None else _beside(cell, run, plain, settings)


def _length(counts: Sequence[DraftCounts]) -> Interval:
    """The acceptance length with its interval, from the counts of each prompt."""
    return bootstrap_length([(c.num_accepted_tokens, c.num_drafts) for c in counts if c.num_drafts])


def _by_category(own: Sequence[DraftCounts], categories: Sequence[str]) -> dict[str, Interval | None]:
    return {
        name: known(_length([c for c, category in zip(own, categories, strict=True) if category == name]))
        for name in sorted(set(categories))
    }


def _by_convention(
    run: VllmRun, drafts: DraftCounts, by_category: dict[str, Interval | None]
) -> dict[str, float | None]:
    """Those conventions that can be had without the record of each round."""
    lengths: dict[str, float | None] = {
        "vllm": drafts.acceptance_length,
        "sglang": run.output_tokens / drafts.num_drafts,
    }
    own = [counts.acceptance_length for counts in run.counted_by_request or () if counts.num_drafts]
    if own:
        lengths["macro by prompt"] = fmean(own)
    if by_category:
        lengths["macro by category"] = fmean(interval.mean for interval in by_category.values() if interval)
    return lengths


def _beside(cell: Cell, run: VllmRun, plain: VllmRun, settings: Settings) -> Cell:
    """The cell with speed and output of plain decoding."""
    matching = sum(a.tokens == b.tokens for a, b in zip(run.answers, plain.answers, strict=True))
    return replace(
        cell,
        baseline_tokens_per_second=plain.tokens_per_second,
        baseline_ttft_ms=percentiles([a.ttft for a in plain.answers if a.ttft is not None]),
        baseline_output_tokens=plain.output_tokens,
        speedup=run.tokens_per_second / plain.tokens_per_second,
        matches_greedy=matching == len(run.answers) if settings.sampling.temperature == 0 else None,
        num_matching_prompts=matching if settings.exact else None,
    )
