"""A draft for a target that was fine-tuned, or traffic that has shifted: `draftkit adapt`.

The log's requests are answered by the target itself, and general prompts beside them, so that nothing is lost
elsewhere. A part of both is held out; on it the draft is judged before and after, slice by slice.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from draftkit.checks.evidence import Evidence
from draftkit.checks.registry import findings
from draftkit.data.categories import category_of, sliced
from draftkit.data.endpoints import EndpointResponder
from draftkit.data.loss_mask import Renderer
from draftkit.data.packing import pack
from draftkit.data.prepare import origin_of_rows, root_from, samples_of
from draftkit.data.regenerate import regenerate
from draftkit.data.request_logs import Logged, read_request_logs
from draftkit.data.responses import Responder, ResponseFile, Sampling, engine_responder
from draftkit.data.rows import Conversation, LeftOutRows, Row, media_root_of, read_rows, rows_read_by
from draftkit.data.sample_files import held_out, write_samples
from draftkit.data.sample_media import SampleMedia, no_media
from draftkit.data.samples import CONSEQUENCES, LEFT_OUT, RowCounts, Sample
from draftkit.data.states.online import load_training_target
from draftkit.data.synthesize import Opening, PromptFile, SynthesizeSettings, opening, synthesize
from draftkit.data.tokenizer import TargetTokenizer, load_tokenizer
from draftkit.errors import DraftkitError, require_count, require_setting
from draftkit.hub.local_paths import named, public_name
from draftkit.io.atomic import atomic_file, is_empty
from draftkit.io.jsonfile import dump, finite, read_object
from draftkit.io.lock import sole_writer
from draftkit.io.shown import Rows, Shown
from draftkit.layout.digest import draft_sha256, weights_sha256
from draftkit.layout.folder import Draft
from draftkit.loading import OpenedDraft, OpenedTarget, open_target
from draftkit.media import media_of
from draftkit.requests import SamplingParameters
from draftkit.results import metrics
from draftkit.results.cell import Interval
from draftkit.results.statistics import contrast, gain, length_over_prompts
from draftkit.targets.devices import device_named, dtype_named, tune_for_cpu
from draftkit.train.config import TrainConfig, read_config
from draftkit.train.run import train_draft
from draftkit.train.tuner import DraftTuner, SimulatedAcceptance, recipe_of

SETTINGS_FILE, REPORT_FILE = "adapt-settings.json", "adapt.json"
# Settings that say who answers and where things lie, not what: they may change on the way.
WHERE = ("endpoints", "served_model", "concurrency", "media_root")
SYNTHESIZED, NOTHING = "synthesized", "none"  # values of `replay` besides a source of rows
LEAST_GENERAL = 16  # how many general prompts there are at least, where there are to be any
VALIDATIONS = 8  # how many validations a run has, about
SMALLEST_SLICE = 5  # how many samples a slice has at least that is reported

Said = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class AdaptSettings:
    """The settings of an adaptation. A folder is continued only with those that it was begun with, except for the
    server's. Raises `SettingError` for values outside their range.

    - `traffic`: a file or folder of logs (`draftkit.data.request_logs`). `own`: model names in it whose answers are the
      target's own; all others are answered anew.
    - `replay`: where general rows come from: any source of `read_rows`, `synthesized` by the target, or `none`.
      `replay_share`: their share of all rows.
    - `media_root`: the folder below which the images of requests lie; None: that of the log. Of general rows in another
      folder, those with images in files are left out.
    - `endpoints`: servers that answer, as `EndpointResponder` takes them; none: the target in this process.
    - `held_out`: the share of both that judges. `k`: draft tokens a round. `temperature`: of serving.
    - `training`: settings of `TrainConfig` by name, as `optimization.lr=1e-4`; `lora`: of its adapters, None for all
      weights.
    """

    draft: str
    target: str
    traffic: str
    out: str
    own: tuple[str, ...] = ()
    replay: str = SYNTHESIZED
    replay_share: float = 0.25
    held_out: float = 0.1
    limit: int | None = None
    temperature: float = 0.0
    max_new_tokens: int = 512
    max_length: int = 4096
    k: int = 4
    seed: int = 0
    lora: Mapping[str, object] | None = None
    training: tuple[str, ...] = ()
    endpoints: tuple[str, ...] = ()
    served_model: str | None = None
    concurrency: int = 16
    device: str | None = None
    media_root: str | None = None

    def __post_init__(self) -> None:
        for name in ("replay_share", "held_out"):
            require_setting(0 < getattr(self, name) < 1, name, getattr(self, name), "between 0 and 1")
        for name, least in {"max_new_tokens": 1, "max_length": 2, "k": 1, "seed": 0, "concurrency": 1}.items():
            require_count(name, getattr(self, name), least=least)
        if self.limit is not None:
            require_count("limit", self.limit)
        SamplingParameters(self.temperature)

    @property
    def mode(self) -> Literal["greedy", "sampled"]:
        return "sampled" if self.temperature else "greedy"


@dataclass(frozen=True)
class AdaptedSlice:
    """What the draft accepted of a slice of the held-out answers before and after.

    `gained`: after − before on the same answers. `behind`: before, how far the slice was above or below the general
    answers, None for these themselves and where there are none.
    """

    name: str
    samples: int
    before: Interval
    after: Interval
    gained: Interval
    behind: Interval | None

    @property
    def lost(self) -> bool:
        """Whether the draft accepted less here than of general text, beyond chance."""
        return self.behind is not None and self.behind.below(0)


@dataclass(frozen=True)
class Adaptation(Shown):
    """`draft`: the folder of the adapted draft; None where the training was stopped. `answers`: those trained on."""

    draft: Path | None
    answers: int
    slices: tuple[AdaptedSlice, ...] = ()
    stopped_by: int | None = None

    def to_dict(self) -> dict[str, object]:
        """The adaptation as `adapt --json` prints it."""
        slices = [{**asdict(found), "lost": found.lost} for found in self.slices]
        return {"schema": 1, "draft": None if self.draft is None else str(self.draft), "answers": self.answers,
                "slices": slices}  # fmt: skip

    def shown(self) -> Iterator[str | Rows]:
        """Where the draft is, and a row for each slice of the answers held out."""
        rows = [
            (s.name, f"{s.samples:,}", *map(metrics.length, (s.before, s.behind, s.after, s.gained)))
            for s in self.slices
        ]
        head = ("slice", "answers", "before", "against general", "after", "gained")
        yield "stopped" if self.draft is None else f"{self.draft}, trained on {self.answers:,} answers"
        yield Rows(head, rows)


def _say_what_changed(name: str, draft: Draft, target: OpenedTarget, said: Said) -> None:
    """Say what the draft was made for, where that is not this target: another one, its revision, its precision."""
    for finding in findings(Evidence(draft=draft, draft_name=name, target=target.facts), "pair"):
        said(finding.message)


@dataclass
class _Requests:
    """The rows that are read before anything is written: the log, with images below `root`, and the general rows, None
    where the target has yet to write them from `cut`, its chat template up to the user's words."""

    logged: list[Logged]
    renderer: Renderer
    root: Path | None = None
    general: list[Row] | None = None
    cut: Opening | None = None

    @property
    def show_images(self) -> bool:
        """Whether some row has an image or a sound."""
        rows = [*(entry.row for entry in self.logged), *(self.general or ())]
        return any(isinstance(row.content, Conversation) and media_of(row.content.messages) for row in rows)


@dataclass
class _Samples:
    """Samples to train on, and those that judge; general ones have their source in their category."""

    training: list[Sample] = field(default_factory=list)
    judging: list[Sample] = field(default_factory=list)


def adapt_draft(settings: AdaptSettings, *, said: Said = lambda _: None) -> Adaptation:
    """Adapt a draft of any format that draftkit trains to a target and its traffic.

    Writes into `settings.out` the answers, the samples, checkpoints, `draft` (a folder that engines take) and a report.
    Called again, it goes on where it was interrupted. `said` is told what is being done. Raises `DraftkitError`, also
    while another process writes to `settings.out`.
    """
    out = Path(settings.out)
    with sole_writer(out, folder=True), ExitStack() as stack:
        target = open_target(settings.target)
        draft = OpenedDraft(settings.draft, target, stack)
        recipe = recipe_of(draft.draft.spec.method)
        _say_what_changed(settings.draft, draft.draft, target, said)
        requests, run = _requests(settings, target, said), _run(settings, recipe)
        weights = target.mark(weights_sha256(target.folder))
        digests = {"target_sha256": weights, "draft_sha256": draft_sha256(draft.draft)}
        answering = target.with_images() if target.reads_images and requests.show_images else target
        responder = _Responder(settings, answering, requests.renderer.target)
        if settings.endpoints and not (out / SETTINGS_FILE).exists():
            responder.get()  # a server that cannot be asked is known before anything is written
        _check_settings(out / SETTINGS_FILE, settings, digests)
        samples = _samples(settings, requests, responder, said)
        config = _judged_by(run, samples)
        said(f"judging {settings.draft} on {len(samples.judging):,} answers")
        before = _judge(settings, draft, samples)
        said(f"training on {len(samples.training):,} answers")
        trained = train_draft(config, resume=True, target=target, draft=draft)
        if trained.draft is None:
            return Adaptation(None, len(samples.training), stopped_by=trained.stopped_by)
        after = _judge(settings, OpenedDraft(str(trained.draft), target, stack), samples)
        adapted = Adaptation(trained.draft, len(samples.training), tuple(compare(before, after)))
        with atomic_file(out / REPORT_FILE, force=True) as file:
            file.write(dump(named(finite(adapted.to_dict()))).encode())
        return adapted


def compare(before: SimulatedAcceptance, after: SimulatedAcceptance) -> Iterator[AdaptedSlice]:
    """Each slice of the same samples before and after: the traffic, the general text, and then by language, tools,
    thinking and length of the traffic."""
    numbers = sorted(before.sums.keys() & after.sums.keys())
    parts = {number: before.categories[number].split() for number in numbers}
    names = sorted({part for of in parts.values() for part in of}, key=lambda name: ("source=" not in name, name))
    general = [before.sums[number] for number in numbers if "source=general" in parts[number]]
    comparisons = len(names)
    for name in names:
        inside = [
            number for number in numbers
            if name in parts[number] and ("source=" in name or "source=traffic" in parts[number])
        ]  # fmt: skip
        if len(inside) < (1 if "source=" in name else SMALLEST_SLICE):
            continue
        old, new = ([found.sums[number] for number in inside] for found in (before, after))
        yield AdaptedSlice(
            name=name.removeprefix("source="),
            samples=len(inside),
            before=length_over_prompts(old),
            after=length_over_prompts(new),
            gained=gain(old, new, comparisons),
            behind=contrast(old, general) if general and name != "source=general" else None,
        )


def _check_settings(path: Path, settings: AdaptSettings, digests: Mapping[str, object]) -> None:
    """Raise `DraftkitError` for a folder that was begun with other settings or models, or that is not an adaptation's.

    `digests` of target and draft: what lies at their names may have been replaced, and may be somewhere else by now,
    so that the file has no paths.
    """
    stated = named(json.loads(json.dumps(asdict(settings)))) | digests
    if path.exists():
        before = named(read_object(path))
        differing = [name for name in stated if name not in WHERE and before.get(name) != stated[name]]
        if differing:
            raise DraftkitError(
                "the folder was begun with other settings:"
                + "".join(f"\n    {name}: {before.get(name)!r}, now {stated[name]!r}" for name in differing),
                where=path.parent,
                hint="give the same settings to go on with it, or another folder",
            )
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if not is_empty(path.parent):
        raise DraftkitError("the output is already there", where=path.parent, hint="choose another folder")
    with atomic_file(path, force=False) as file:
        file.write(dump(stated).encode())


def _requests(settings: AdaptSettings, target: OpenedTarget, said: Said) -> _Requests:
    """The log, and the general rows; `said` is told of those that are left out.

    Raises `DraftkitError` for what cannot be read or written by the target.
    """
    served = bool(settings.endpoints)
    left_out, general_left_out = rows_read_by(target, served=served), rows_read_by(target, served=served)
    root = media_root_of(settings.traffic, None if settings.media_root is None else Path(settings.media_root))
    logged = read_request_logs(Path(settings.traffic), settings.own, left_out, root)
    requests = _Requests(
        list(itertools.islice(logged, settings.limit)),
        Renderer(load_tokenizer(target), load_vision=lambda: target.vision),
        root,
    )
    if not requests.logged:
        raise DraftkitError(
            "there are no requests in the log" + (f": {left_out}" if left_out.rows else ""), where=settings.traffic
        )
    if settings.replay == SYNTHESIZED:
        requests.cut = opening(requests.renderer)
    elif settings.replay == NOTHING:
        requests.general = []
    else:
        count = _general_count(settings, len(requests.logged))
        beside = media_root_of(settings.replay, root if settings.media_root else None)
        if target.reads_images and beside != root:
            general_left_out = LeftOutRows(why="general rows with images lie in the folder of the log, or --media-root")
        requests.general = list(read_rows(settings.replay, limit=count, left_out=general_left_out, media_root=root))
    for found in (left_out, general_left_out):
        if found.rows:
            said(str(found))
    return requests


def _general_count(settings: AdaptSettings, requests: int) -> int:
    """How many general rows are trained on beside so many requests."""
    share = settings.replay_share
    return max(round(requests * share / (1 - share)), LEAST_GENERAL)


def _samples(settings: AdaptSettings, requests: _Requests, responder: _Responder, said: Said) -> _Samples:
    """Answers of the target's own to the log and to general prompts, split."""
    out, logged, renderer = Path(settings.out), requests.logged, requests.renderer
    tokenizer = renderer.target
    own, others = ([entry.row for entry in logged if entry.own is mine] for mine in (True, False))
    general = _general(settings, requests, responder, said)
    rows = [_from(row, "traffic") for row in others] + [_from(row, "general") for row in general]
    said(f"{len(rows):,} requests to answer, {len(own):,} of {len(logged):,} are the target's own")
    header = {"tokenizer_sha256": tokenizer.sha256, "template_sha256": tokenizer.template_sha256,
              "target": public_name(settings.target), "temperature": settings.temperature, "seed": settings.seed,
              "max_new_tokens": settings.max_new_tokens}  # fmt: skip
    root = root_from(out / "answers.jsonl", requests.root) if requests.show_images else None
    header |= {} if root is None else {"media_root": root}
    answers = ResponseFile(out / "answers.jsonl", header)
    if answers.done and settings.endpoints:
        said(f"{', '.join(settings.endpoints)}: no server tells whether its weights are those that answered before")
    if gone := answers.done.keys() - {row.id for row in rows}:
        raise DraftkitError(
            f"{len(gone)} answers are to requests that are no longer there, as {min(gone)}", where=settings.traffic,
            hint="give the log and the general rows that the folder was begun with, or another folder",
        )  # fmt: skip
    if not all(answers.has(row) for row in rows):
        served = bool(settings.endpoints)
        regenerate(rows, renderer, responder.get(), answers, seed=settings.seed, served=served)
    responder.free()
    given = itertools.chain((_from(row, "traffic") for row in own), read_rows(str(answers.path)))
    counts = RowCounts()
    made = [sliced(s, tokenizer) for s in samples_of(given, renderer, counts, settings.max_length)]
    for reason, tally in counts.tallies.items():
        if CONSEQUENCES[reason].startswith(LEFT_OUT):
            said(f"{tally.count:,} rows are left out: {reason}, as {tally.examples[0]}")
    kept, aside = held_out(made, settings.held_out)
    samples = _Samples([made[n] for n in kept], [made[n] for n in aside])
    if not kept or not any("source=traffic" in sample.category for sample in samples.judging):
        raise DraftkitError(
            f"{len(made)} answers are too few to train on some and judge by others", where=settings.traffic,
            hint="bring more requests, or raise held_out",
        )  # fmt: skip
    origin = replace(origin_of_rows(tokenizer, settings.max_length), media_root=root)
    write_samples(out / "training.jsonl", samples.training, origin, force=True)
    write_samples(out / "held-out.jsonl", samples.judging, origin, force=True)
    return samples


class _Responder:
    """The responder to the requests: the endpoint, or the target in this process, loaded when it is first needed."""

    def __init__(self, settings: AdaptSettings, target: OpenedTarget, tokenizer: TargetTokenizer):
        self._settings = settings
        self._target = target
        self._sampling = Sampling(SamplingParameters(settings.temperature), settings.max_new_tokens, tokenizer.end_ids)
        self._loaded: Responder | None = None

    def get(self, sampling: Sampling | None = None) -> Responder:
        settings = self._settings
        if self._loaded is None:
            if settings.endpoints:
                self._loaded = EndpointResponder(
                    settings.endpoints, self._sampling, settings.concurrency, settings.served_model
                )
            else:
                self._loaded = engine_responder(
                    self._target, self._sampling, settings.concurrency, device=settings.device
                )
        self._loaded.sampling = sampling or self._sampling  # type: ignore[attr-defined]
        return self._loaded

    def free(self) -> None:
        self._loaded = None


def _general(settings: AdaptSettings, requests: _Requests, responder: _Responder, said: Said) -> list[Row]:
    """The general rows. Where none were given, the target writes their prompts now."""
    rows = requests.general
    if rows is None:
        assert requests.cut is not None
        count = _general_count(settings, len(requests.logged))
        said(f"the target writes {count:,} general prompts")
        rows = _synthesized(settings, requests.renderer, requests.cut, responder, count)
    return [replace(row, id=f"general-{row.id}", category=category_of(row)) for row in rows]


def _synthesized(
    settings: AdaptSettings, renderer: Renderer, cut: Opening, responder: _Responder, count: int
) -> list[Row]:
    how = SynthesizeSettings(
        target=settings.target,
        served_by="draftkit",  # the settings do not say an endpoint: it may change on the way
        dtype=None,
        system=None,
        template_options={},
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        seed=settings.seed,
    )
    file = PromptFile(Path(settings.out) / "prompts.jsonl", how.header(renderer.target))
    if len(file.done) < count:
        synthesize(count, cut, renderer, responder.get(how.sampling(cut)), file, how)
    return list(read_rows(str(file.path), limit=count))


def _from(row: Row, source: str) -> Row:
    return replace(row, category=f"source={source} {row.category}")


def _run(settings: AdaptSettings, recipe: str) -> TrainConfig:
    """The training. Raises `DraftkitError` for settings that no run can have."""
    out = Path(settings.out)
    flags: dict[str, object] = {
        "recipe": recipe,
        "target": settings.target,
        "draft": settings.draft,
        "data": str(out / "training.jsonl"),
        "out": settings.out,
        "seed": settings.seed,
        "device": settings.device or "",
        "lora": settings.lora,
        "optimization": {"epochs": 3.0},
        "validation": {
            "samples": str(out / "held-out.jsonl"), "k": settings.k, "mode": settings.mode,
            "temperature": settings.temperature or 1.0,
        },
    }  # fmt: skip
    return read_config(None, settings.training, flags)


def _judged_by(run: TrainConfig, samples: _Samples) -> TrainConfig:
    """The run, with validations on all that is held out, `VALIDATIONS` of them where it does not say how often."""
    validation = replace(run.validation, limit=len(samples.judging))
    if validation.every == 0:
        rows = len(pack([len(sample) for sample in samples.training], run.tokens_per_row))
        epochs = run.optimization.epochs * -(-rows // run.optimization.accumulation)
        steps = run.optimization.max_steps or round(epochs)
        validation = replace(validation, every=max(steps // VALIDATIONS, 1))
    return replace(run, validation=validation)


def _judge(settings: AdaptSettings, draft: OpenedDraft, samples: _Samples) -> SimulatedAcceptance:
    """What a draft accepts of the held-out answers. The target's weights are let go of with the result, or training
    would hold them a second time."""
    place, target, media = device_named(settings.device), draft.target, no_media
    if any(sample.images for sample in samples.judging):
        target = target.with_images()
        media = SampleMedia(Path(settings.out) / "held-out.jsonl", target)
    model = load_training_target(target, device=place, dtype=dtype_named(None, place))
    tune_for_cpu(model)
    tuner = DraftTuner(draft, model, media=media)
    return tuner.simulate_acceptance(samples.judging, k=settings.k, mode=settings.mode)
