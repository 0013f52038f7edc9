"""A server measured as its users are served: by its address, whatever runs there and whatever it drafts with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from draftkit.checks.measurement import Asked
from draftkit.checks.registry import Evidence, findings
from draftkit.engines.records import Lane
from draftkit.engines.servers.connect import server_at
from draftkit.engines.servers.lane import server_lane
from draftkit.engines.servers.server import Server
from draftkit.engines.vllm.request import warm_up
from draftkit.errors import DraftkitError
from draftkit.evaluate.axes import with_slices
from draftkit.evaluate.certificate.served import (
    ServedCertificate,
    certified_samplings,
    certified_settings,
    certify_served,
)
from draftkit.evaluate.datasets import PromptSet, load_prompt_set
from draftkit.evaluate.engine_cell import measured_by
from draftkit.evaluate.measure import Conversations, Progress
from draftkit.evaluate.provenance import asked, made_by, seen_by
from draftkit.finding import Finding
from draftkit.hub.locate import locate
from draftkit.loading import load_target_tokenizer
from draftkit.requests import Request
from draftkit.results.record import Cell, Heading, Result, ResultWarning
from draftkit.results.saved import ResultFile
from draftkit.results.settings import AS_STARTED, Settings, Sweep
from draftkit.results.verdict import verdicts
from draftkit.targets.target import end_token_ids


@dataclass(frozen=True)
class ServerSettings:
    """Which servers are measured: `url` with a draft, `baseline_url` with the same target and none.

    Without the latter the first one runs without its draft, where it can be asked to; else nothing is told of speed.
    """

    url: str
    baseline_url: str | None = None


@dataclass(frozen=True)
class Serving:
    """A server that drafts, and what runs the same target without a draft, where there is one."""

    drafting: Server
    plain: Server | None

    @classmethod
    def of(cls, servers: ServerSettings) -> Serving:
        """Raises `DraftkitError` where a server does not answer, or drafts where it should not."""
        drafting = server_at(servers.url)
        plain = None if servers.baseline_url is None else server_at(servers.baseline_url)
        drafting.require(speculates=True)
        if plain is not None:
            plain.require(speculates=False)
        return cls(drafting, plain)


def evaluate_server(
    servers: ServerSettings,
    asked_for: Settings | Sweep | None = None,
    on_progress: Progress = lambda *_: None,
    *,
    target: str | None = None,
    draft: str | None = None,
    saved: ResultFile | None = None,
) -> Result:
    """Measure a running server, at one setting or those of a sweep over concurrency and temperature.

    `target` (path, Hub id, `zoo:NAME`): only its tokenizer and end tokens are read; without one the server is sent
    messages, and renders and ends them itself. `draft`: what the result calls the draft. K of the settings counts only
    where the server does not say how many tokens it drafts. Raises `DraftkitError`.
    """
    sweep = Sweep.of(asked_for or Settings())
    AS_STARTED.check(sweep)
    serving = Serving.of(servers)
    prompts = load_prompt_set(sweep.first.prompts, sweep.first.limit, strict=sweep.first.strict)
    questions = Questions.of(prompts, target, sweep.first)
    server = serving.drafting
    seen = Asked(
        prompts.source, [len(p.turns) for p in prompts.prompts], prompts.masked, *questions.begin, prompts.left_out
    )
    warned = findings(Evidence(asked=seen, settings=sweep.first), "measurement")
    warned += [Finding("not-told", "note", f"{server.engine} does not tell {what}") for what in server.untold]
    served = {"engine": server.engine, "version": server.version(), "model": server.model, "draft": server.draft()}
    made = made_by() | asked(prompts, sweep.first) | questions.provenance | {"server": served}
    if saved is not None:
        saved.begin(made)
    cells: list[Cell] = []
    heading = {"target": target or server.model, "draft": draft or server.draft() or "served", "method": "served"}
    for group in sweep.groups:
        for cell, concerns in _cells(serving, questions, group, heading, on_progress):
            known = with_slices(cell, prompts.prompts, sweep.first.slices)
            cells.append(replace(known, prompts_sha256=prompts.sha256))
            warned += [Finding("other-traffic", "warning", concern) for concern in concerns]
            if saved is not None:
                saved.add(cells[-1])
    warned += itertools.chain.from_iterable(
        findings(Evidence(cell=cell, settings=sweep.first), "measurement") for cell in cells
    )
    warnings = tuple(ResultWarning.of(finding) for finding in dict.fromkeys(warned))
    result = Result(tuple(cells), made, warnings, verdicts=verdicts(cells))
    if saved is not None:
        saved.write(result.to_dict())
    return result


def certify_server(
    servers: ServerSettings,
    asked_for: Settings | Sweep,
    on_progress: Progress = lambda *_: None,
    *,
    target: str | None = None,
    draft: str | None = None,
) -> ServedCertificate:
    """Whether a server answers with its draft as without: at temperature 0, and as the user draws, at every temperature
    of the sweep above 0, with as many requests together as it has at most.

    Arguments as of `evaluate_server`; a server without a draft is needed. Raises `DraftkitError`.
    """
    sweep = Sweep.of(asked_for)
    AS_STARTED.check(sweep)
    serving = Serving.of(servers)
    if serving.plain is None:
        raise DraftkitError("a certificate needs the same target without a draft", hint="add --server-baseline URL")
    settings = certified_settings(sweep)
    prompts = load_prompt_set(settings.prompts, settings.limit, strict=settings.strict)
    questions = Questions.of(prompts, target, settings)
    requests = questions.requests(settings)

    def certified(name: str, done: int, total: int, length: float) -> None:  # one lane has runs of several sizes
        on_progress(f"certificate, {name}", done, max(done, total), length)

    drafting, plain = lanes_of(serving, questions, requests, settings, certified)
    assert plain is not None
    return certify_served(
        plain,
        drafting,
        requests,
        certified_samplings(sweep),
        names=(
            target or serving.drafting.model,
            draft or serving.drafting.draft() or "served",
            serving.drafting.engine,
        ),
        concurrency=settings.concurrency,
    )


@dataclass(frozen=True)
class Questions:
    """What a server is asked: `requests` makes it for a setting; `end_ids` None: the server ends answers itself.

    `begin`: the first ids of the first prompt, and the token that begins a sequence.
    """

    categories: Sequence[str]
    requests: Callable[[Settings], list[Request]]
    end_ids: frozenset[int] | None
    begin: tuple[tuple[int, ...], int | None]
    provenance: dict[str, object]

    @classmethod
    def of(cls, prompts: PromptSet, target: str | None, settings: Settings) -> Questions:
        """Raises `DraftkitError` for what a server is not asked."""
        categories = [prompt.category for prompt in prompts.prompts]
        if target is None:
            return cls(categories, lambda at: _messages(prompts, at), None, ((), None), {})
        tokenizer: PreTrainedTokenizerBase = load_target_tokenizer(target)

        def encoded(at: Settings) -> list[Request]:
            return Conversations(prompts.prompts, tokenizer, at).first_requests

        first = encoded(settings)[0].prompt
        end_ids = end_token_ids(locate(target, weights=False).path)
        return cls(categories, encoded, end_ids, (first, tokenizer.bos_token_id), seen_by(tokenizer, first))


def _messages(prompts: PromptSet, settings: Settings) -> list[Request]:
    """Requests of messages, which the server renders."""
    if settings.context:
        raise DraftkitError("a context is filled token by token", hint="pass --target, for the target's tokenizer")
    if settings.template is False or any(prompt.plain for prompt in prompts.prompts):
        raise DraftkitError(
            "plain text, to which no chat template belongs, is sent as token ids",
            where=prompts.source,
            hint="pass --target, a folder or Hub id with the target's tokenizer",
        )
    return [
        Request(
            prompt.id,
            (),
            settings.max_new_tokens,
            settings.sampling.numbered(number),
            ignore_eos=settings.ignore_eos,
            messages=(*(("system", prompt.system) for _ in prompt.opening), ("user", prompt.text)),
            thinking=settings.thinking,
        )
        for number, prompt in enumerate(prompts.prompts)
    ]


def lanes_of(
    serving: Serving, questions: Questions, requests: Sequence[Request], settings: Settings, on_progress: Progress
) -> tuple[Lane, Lane | None]:
    """The server with its draft, and what runs without one, both warm."""

    def lane(server: Server, *, speculates: bool) -> Lane:
        name = server.engine if speculates else "no draft"
        return server_lane(
            server,
            warm_up(requests, settings.concurrency, settings.num_speculative_tokens),
            questions.end_ids,
            concurrency=settings.concurrency,
            speculates=speculates,
            on_progress=lambda done, length: on_progress(name, done, len(requests), length),
        )

    plain = None if serving.plain is None else lane(serving.plain, speculates=False)
    return lane(serving.drafting, speculates=True), plain


def _cells(
    serving: Serving,
    questions: Questions,
    group: Sequence[Settings],
    names: dict[str, str],
    on_progress: Progress,
) -> Iterator[tuple[Cell, tuple[str, ...]]]:
    """The cell of each setting, and what may be wrong with it."""
    for settings in group:
        requests = questions.requests(settings)
        drafting, plain = lanes_of(serving, questions, requests, settings, on_progress)
        heading = Heading.of(settings, engine=serving.drafting.engine, dataset=settings.prompts, **names)
        # How the server's draft is drawn and verified, it does not say.
        heading = replace(heading, draft_sampling=None, verification=None)
        cell, concerns = measured_by(
            heading, requests, settings, plain, drafting, questions.categories, settings.repeats
        )
        yield replace(cell, estimated=serving.drafting.estimates or None), concerns
