"""A draft measured with vLLM: how vLLM is told of it, the run, and its counts as a cell of the result."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec

from draftkit.convert.api import convert_checkpoint
from draftkit.engines.records import Lane
from draftkit.engines.servers.connect import server_of
from draftkit.engines.servers.kinds.vllm import VllmServer
from draftkit.engines.servers.lane import server_lane
from draftkit.engines.vllm.accepts import check_target, refusal_by_vllm
from draftkit.engines.vllm.offline import OfflineEngine, engine_arguments, offline_lane
from draftkit.engines.vllm.process import check_python, find_python
from draftkit.engines.vllm.request import warm_up
from draftkit.engines.vllm.serve import speculative_config
from draftkit.engines.vllm.settings import VllmSettings
from draftkit.errors import DraftkitError
from draftkit.evaluate.cells import drawn_as
from draftkit.evaluate.certificate.served import (
    ServedCertificate,
    certified_samplings,
    certified_settings,
    certify_served,
)
from draftkit.evaluate.datasets import load_prompt_set
from draftkit.evaluate.engine_cell import measured_by
from draftkit.evaluate.measure import Conversations, Progress
from draftkit.hub.locate import locate
from draftkit.io.atomic import temporary_folder
from draftkit.layout.folder import read_draft
from draftkit.loading import load_target_tokenizer, open_draft
from draftkit.requests import Request
from draftkit.results.record import Cell, Heading
from draftkit.results.settings import AS_STARTED, VLLM, Settings, Sweep
from draftkit.targets.devices import device_named, dtype_named
from draftkit.targets.pretrained import describe
from draftkit.targets.remote_code import trusts_remote_code
from draftkit.targets.target import end_token_ids

BY_VLLM = "draftkit eval --engine vllm --vllm-python ENV/bin/python measures with vLLM, --server with a server of it"


def vllm_here() -> VllmSettings | None:
    """vLLM of the running environment, None where it has none."""
    return None if find_spec("vllm") is None else VllmSettings()


def check_with_vllm(target: str, drafts: Sequence[str], sweep: Sweep, vllm: VllmSettings) -> None:
    """Raise `DraftkitError` for what would be refused later, after other long work."""
    (VLLM if vllm.url is None else AS_STARTED).check(sweep)
    if vllm.url is not None:
        return
    check_target(locate(target, weights=False).path)
    check_python(vllm.python)
    for draft in drafts:
        with served_draft(draft, target, sweep.first):
            pass


def measure_with_vllm(
    target: str,
    draft: str,
    requests: Sequence[Request],
    settings: Settings,
    vllm: VllmSettings,
    *,
    plain: Lane | None = None,
    categories: Sequence[str] | None = None,
    on_progress: Progress = lambda *_: None,
) -> tuple[Cell, tuple[str, ...]]:
    """The cell of a draft, and what may be wrong with it.

    `requests` go through vLLM's offline engine, or through the server of `vllm.url`. `target` and `draft` as in
    `evaluate_draft`; a server has its own draft, and `draft` only names it. `plain`: what runs the same requests
    without a draft, by turns with it; None for a server without a baseline. `categories`: one for each request. Raises
    `DraftkitError`; for a draft that vLLM cannot run, before anything is started.
    """
    (VLLM if vllm.url is None else AS_STARTED).check(Sweep.of(settings))
    with drafting_lane(target, draft, requests, settings, vllm, on_progress) as (method, drafting):
        heading = _heading(target, draft, method, settings)
        if vllm.url is not None:  # how the server's draft is built, drawn and verified, its metrics do not say
            heading = replace(heading, draft_sampling=None, verification=None)
        else:
            heading = drawn_as(heading, draft)
        return measured_by(heading, requests, settings, plain, drafting, categories, _repeats(settings, vllm))


def certify_with_vllm(
    target: str,
    draft: str,
    asked: Settings | Sweep,
    vllm: VllmSettings,
    on_progress: Progress = lambda *_: None,
) -> ServedCertificate:
    """Whether vLLM answers with the draft as without, at the most draft tokens of the sweep: at temperature 0, and at
    every temperature of it above. `target` and `draft` as of `measure_with_vllm`. Raises `DraftkitError`.
    """
    sweep = Sweep.of(asked)
    (VLLM if vllm.url is None else AS_STARTED).check(sweep)
    sweep.require_certifiable()
    check_certifiable(sweep.first, vllm)
    # Above temperature 0 drafts may be drawn, which vLLM has to be told when it starts.
    settings = certified_settings(sweep).at(temperature=max(sweep.temperature))
    prompts = load_prompt_set(settings.prompts, settings.limit, strict=settings.strict)
    requests = Conversations(prompts.prompts, load_target_tokenizer(target), settings).first_requests

    def certified(name: str, done: int, total: int, length: float) -> None:  # one lane has runs of several sizes
        on_progress(f"certificate, {name}", done, max(done, total), length)

    with (
        plain_lane(target, requests, replace(settings, repeats=1), vllm, certified) as plain,
        drafting_lane(target, draft, requests, settings, vllm, certified) as (_, drafting),
    ):
        assert plain is not None
        names = (target, draft, "vllm")
        samplings = certified_samplings(sweep)
        return certify_served(plain, drafting, requests, samplings, names=names, concurrency=settings.concurrency)


def check_certifiable(settings: Settings, vllm: VllmSettings) -> None:
    """Raise `DraftkitError` where vLLM cannot run with a draft and without one at a time."""
    if vllm.url is not None and vllm.baseline_url is None:
        raise DraftkitError("a certificate needs the same target without a draft", hint="set VllmSettings.baseline_url")
    if not _both_fit(settings, vllm):
        raise DraftkitError(
            "a certificate runs vLLM with the draft and without one at a time, and each takes most of the GPU",
            hint="--set gpu_memory_utilization=0.45",
        )


@contextmanager
def drafting_lane(
    target: str,
    draft: str,
    requests: Sequence[Request],
    settings: Settings,
    vllm: VllmSettings,
    on_progress: Progress = lambda *_: None,
) -> Iterator[tuple[str, Lane]]:
    """The method of a draft as vLLM names it, and what runs requests with it."""
    if vllm.url is not None:
        yield "served", _on_server(draft, vllm.url, target, requests, settings, on_progress, speculates=True)
        return
    with (
        served_draft(draft, target, settings) as served,
        _offline(draft, target, requests, settings, vllm, served.speculative, on_progress) as drafting,
    ):
        yield served.method, drafting


@contextmanager
def plain_lane(
    target: str,
    requests: Sequence[Request],
    settings: Settings,
    vllm: VllmSettings,
    on_progress: Progress = lambda *_: None,
) -> Iterator[Lane | None]:
    """What runs requests without a draft, for all drafts; None for a server without a `baseline_url`.

    Two engines of vLLM share a GPU only where each was told to take at most half of it; else this one runs the
    requests before all drafts, and gives what it found then whenever it is asked.
    """
    if vllm.url is not None:
        if vllm.baseline_url is None:
            yield None
        else:
            yield _on_server("no draft", vllm.baseline_url, target, requests, settings, on_progress, speculates=False)
        return
    with _offline("no draft", target, requests, settings, vllm, None, on_progress) as lane:
        if _repeats(settings, vllm):
            yield lane
            return
        run = lane(requests)
    yield lambda _: run


def _repeats(settings: Settings, vllm: VllmSettings) -> int:
    """Passes by turns at most: none where the two engines do not fit a device together."""
    return settings.repeats if _both_fit(settings, vllm) else 0


def _both_fit(settings: Settings, vllm: VllmSettings) -> bool:
    """Whether vLLM can run with a draft and without one at a time."""
    on_cpu = device_named(settings.device) == "cpu"
    return vllm.url is not None or on_cpu or (vllm.gpu_memory_utilization or 1.0) <= 0.5


def _offline(
    name: str,
    target: str,
    requests: Sequence[Request],
    settings: Settings,
    vllm: VllmSettings,
    speculative: Mapping[str, object] | None,
    on_progress: Progress,
) -> AbstractContextManager[Lane]:
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
    return offline_lane(engine, _warming(requests, settings), _named_progress(name, requests, on_progress))


def _on_server(
    name: str,
    url: str,
    target: str,
    requests: Sequence[Request],
    settings: Settings,
    on_progress: Progress,
    *,
    speculates: bool,
) -> Lane:
    return server_lane(
        server_of(VllmServer, url),
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
    fields: dict[str, object] = {}
    if settings.draft_mode == "probabilistic":
        fields["draft_sample_method"] = "probabilistic"
    if settings.verification == "block":
        fields["rejection_sample_method"] = "block"
    return fields
