"""`draftkit data`: training data from conversations or text."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer

from draftkit.cli.options import (
    ConcurrencyOption,
    DeviceMapOption,
    DeviceOption,
    DtypeOption,
    EndpointOption,
    JsonOption,
    MaxLengthOption,
    MediaRootOption,
    RevisionOption,
    RowLimitOption,
    RowsArgument,
    SampleMediaRootOption,
    SamplesArgument,
    ServedModelOption,
    SplitOption,
    StrictOption,
    SubsetOption,
    SystemOption,
    TargetAdapterOption,
    TargetOption,
    TemplateOption,
    TensorParallelOption,
    TopKOption,
    TopPOption,
    TrustOption,
    WithParentOption,
    models,
    prompt_sets,
    settled_dtype,
)
from draftkit.cli.output import (
    answer_progress,
    console,
    counted,
    counted_progress,
    print_json,
    quiet_transformers,
    refuse_inputs,
    say_next,
    say_written,
    stopping,
)
from draftkit.cli.panels import PanelCommand
from draftkit.errors import DraftkitError
from draftkit.io.cache import local_file, named
from draftkit.io.store import Store, is_address, is_there
from draftkit.requests import SamplingParameters

if TYPE_CHECKING:
    from draftkit.data.decontamination import NearPrompts
    from draftkit.data.responses import Responder, ResponseFile, Sampling
    from draftkit.data.rows import LeftOutRows
    from draftkit.data.states.shards import Part
    from draftkit.loading import OpenedTarget

Item = TypeVar("Item")

app = typer.Typer(help="Make and check training data.", no_args_is_help=True, rich_markup_mode=None)


@app.command(cls=PanelCommand)
def prepare(
    asked: typer.Context,
    source: RowsArgument,
    out: Annotated[str, typer.Argument(help="What to write: data.jsonl, or data.arrow or a folder, for many samples.")],
    target: TargetOption,
    split: SplitOption = "train",
    subset: SubsetOption = None,
    revision: RevisionOption = None,
    limit: RowLimitOption = None,
    max_length: MaxLengthOption = 4096,
    drop_loops: Annotated[
        bool, typer.Option("--drop-loops", help="Leave out answers that repeat themselves in most of their tokens.")
    ] = False,
    exclude_near: Annotated[
        list[str] | None,
        typer.Option(
            autocompletion=prompt_sets,
            help="Leave out rows that hold a prompt of this set, or nearly; as `eval --dataset`, repeatable.",
        ),
    ] = None,
    system: SystemOption = None,
    template_options: TemplateOption = None,
    media_root: MediaRootOption = None,
    strict: StrictOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count everything and write nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Turn conversations or text into tokens and a loss mask. The mask is of what the target has written. Of samples
    that are prepared already it makes the other form: Arrow of JSONL."""
    quiet_transformers()
    from draftkit.data.loss_mask import Renderer
    from draftkit.data.prepare import prepare as write_samples
    from draftkit.data.prepare import rewrite
    from draftkit.data.rows import media_root_of, read_rows, rows_read_by
    from draftkit.data.tokenizer import load_tokenizer
    from draftkit.loading import open_target
    from draftkit.report.terminal.data import show_report

    refuse_inputs(Path(out), [source])
    if is_address(out) and not PurePath(out).suffix:
        raise typer.BadParameter(f"{out} would be a folder: an address ends in .arrow or .jsonl.")
    opened = open_target(target)
    options = _parse_options(template_options)
    renderer = Renderer(load_tokenizer(opened), options, system, load_vision=lambda: opened.vision)
    left_out, made, place = rows_read_by(opened), _prepared(source), None if dry_run else out
    with counted_progress("rows", limit) as on_rows:
        if made is not None:
            _refuse_given(asked, OF_ROWS)
            report = rewrite(made, renderer.target, place, limit=limit, force=force)
        else:
            rows = read_rows(
                source, split=split, subset=subset, revision=revision, limit=limit, left_out=left_out,
                media_root=media_root,
            )  # fmt: skip
            report = write_samples(
                _counted(rows, on_rows), renderer, place, max_length=max_length, drop_loops=drop_loops,
                without=_measured_on(exclude_near),
                media_root=media_root_of(source, media_root) if opened.reads_images else None, force=force,
            )  # fmt: skip
    result = {"schema": 1, "source": source, "target": target, "out": place}
    result |= report.to_dict() | {"left_out": left_out.to_dict()}
    _say_left_out(left_out)
    if as_json:
        print_json(result)
        return
    show_report(console(), result, place)
    if not dry_run:
        say_next("data", "check", out, "--target", target)


@app.command(cls=PanelCommand)
def regenerate(
    source: RowsArgument,
    out: Annotated[str, typer.Argument(help="The file of responses; one that exists is continued.")],
    target: TargetOption,
    temperature: Annotated[float, typer.Option(min=0, help="The one that the draft will serve at; 0 is greedy.")] = 0.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="With a row's id, it decides the row's random numbers.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one turn, at most.")] = 1024,
    concurrency: ConcurrencyOption = 16,
    endpoint: EndpointOption = None,
    served_model: ServedModelOption = None,
    split: SplitOption = "train",
    subset: SubsetOption = None,
    revision: RevisionOption = None,
    limit: RowLimitOption = None,
    system: SystemOption = None,
    template_options: TemplateOption = None,
    media_root: MediaRootOption = None,
    template: Annotated[
        bool | None,
        typer.Option(
            "--template/--no-template",
            help="Apply the chat template to all rows, or to none; default: to all but rows of text.",
        ),
    ] = None,
    device: DeviceOption = None,
    device_map: DeviceMapOption = None,
    dtype: DtypeOption = None,
    strict: StrictOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say how much there is to do, and do nothing.")] = False,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Let the target write every assistant turn anew. The token ids that it read and drew are stored."""
    SamplingParameters(temperature, top_k, top_p)  # wrong ones are refused before the slow imports
    quiet_transformers()
    from draftkit.data.loss_mask import Renderer
    from draftkit.data.prepare import root_from
    from draftkit.data.regenerate import RegenerateSettings, plan
    from draftkit.data.regenerate import regenerate as answer
    from draftkit.data.responses import ResponseFile
    from draftkit.data.rows import may_name_images, media_root_of, most_rows, read_rows, rows_read_by
    from draftkit.data.tokenizer import load_tokenizer
    from draftkit.loading import open_target
    from draftkit.report.terminal.data import show_report, work_to_do

    dtype = settled_dtype(dtype, device)
    opened = open_target(target)
    tokenizer = load_tokenizer(opened)
    settings = RegenerateSettings(
        source=source,
        split=split,
        subset=subset,
        target=target,
        served_by="endpoint" if endpoint else "draftkit",
        dtype=dtype,
        system=system,
        template_options=_parse_options(template_options),
        template=template,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        max_new_tokens=max_new_tokens,
    )
    sampling = settings.sampling(tokenizer)
    left_out = rows_read_by(opened, served=bool(endpoint))
    rows = read_rows(
        source, split=split, subset=subset, revision=revision, limit=limit, left_out=left_out, media_root=media_root
    )
    root = None
    if opened.reads_images and not is_address(out):
        root = root_from(Path(out), media_root_of(source, media_root))
    weights = _weights(opened, endpoint, unread=dry_run and not is_there(out))
    file = ResponseFile(out, settings.header(tokenizer, weights, root))
    if dry_run:
        cost = asdict(plan(rows, file.done, max_new_tokens))
        _say_left_out(left_out)
        cost["left_out"] = left_out.to_dict()
        print_json({"schema": 1, "source": source} | cost) if as_json else console().print(work_to_do(cost))
        return
    shown = opened.reads_images and may_name_images(source)
    answering = opened.with_images() if shown else opened
    responder = _responder(answering, sampling, concurrency, endpoint, served_model, device, dtype)
    before = _done_before(file, endpoint)
    stopping.kept = lambda: f"{len(file.done):,} rows are kept in {out}; the same command goes on"
    with answer_progress("rows", before, most_rows(source, limit)) as on_answers:
        options = settings.template_options
        renderer = Renderer(tokenizer, options, system, template, load_vision=lambda: opened.vision)
        report = answer(rows, renderer, responder, file, seed=seed, served=bool(endpoint), on_progress=on_answers)
    result = {"schema": 1, "source": source, "target": target, "out": str(out), "resumed": before}
    result |= report.to_dict() | {"left_out": left_out.to_dict()}
    _say_left_out(left_out)
    if as_json:
        print_json(result)
        return
    show_report(console(), result, out)
    say_next("data", "prepare", out, "SAMPLES", "--target", target)


@app.command(cls=PanelCommand)
def synthesize(
    target: TargetOption,
    count: Annotated[int, typer.Option(min=1, help="How many prompts the file is to have.")],
    out: Annotated[str, typer.Option(help="The file of prompts, as prompts.jsonl; one that exists is continued.")],
    language: Annotated[
        list[str] | None, typer.Option(help="Keep prompts in this language, as en; repeatable; default: all.")
    ] = None,
    min_words: Annotated[int, typer.Option(min=1, help="Words of a prompt, at least.")] = 3,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt, at most.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="Above 0: every prompt begins alike.")] = 1.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="It decides all prompts.")] = 0,
    concurrency: ConcurrencyOption = 16,
    endpoint: EndpointOption = None,
    served_model: ServedModelOption = None,
    system: Annotated[str | None, typer.Option(help="A system message, which steers what is asked.")] = None,
    begin: Annotated[
        list[str] | None, typer.Option(help="What prompts begin with, as 'Summarize:'; repeatable, by turns.")
    ] = None,
    template_options: TemplateOption = None,
    device: DeviceOption = None,
    device_map: DeviceMapOption = None,
    dtype: DtypeOption = None,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Let the target, a chat model, write prompts. Its template is cut before the user's words (Magpie)."""
    SamplingParameters(temperature, top_k, top_p)  # wrong ones are refused before the slow imports
    quiet_transformers()
    from draftkit.data.loss_mask import Renderer
    from draftkit.data.synthesize import PromptFile, SynthesizeSettings, opening
    from draftkit.data.synthesize import synthesize as write_prompts
    from draftkit.data.tokenizer import load_tokenizer
    from draftkit.loading import open_target

    dtype = settled_dtype(dtype, device)
    settings = SynthesizeSettings(
        target=target,
        served_by="endpoint" if endpoint else "draftkit",
        dtype=dtype,
        system=system,
        template_options=_parse_options(template_options),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        begins=tuple(begin or ()),
        languages=tuple(language or ()),
        min_words=min_words,
        max_new_tokens=max_new_tokens,
    )
    opened = open_target(target)
    tokenizer = load_tokenizer(opened)
    renderer = Renderer(tokenizer, settings.template_options, system)
    cut = opening(renderer, settings.begins)
    sampling = settings.sampling(cut)
    file = PromptFile(out, settings.header(tokenizer, _weights(opened, endpoint)))
    before = _done_before(file, endpoint)
    stopping.kept = lambda: f"{len(file.done):,} prompts are kept in {out}; the same command goes on"
    left_out: Mapping[str, int] = {}
    if before < count:
        responder = _responder(opened, sampling, concurrency, endpoint, served_model, device, dtype)
        with answer_progress("prompts", before, count) as on_prompts:
            left_out = write_prompts(count, cut, renderer, responder, file, settings, on_progress=on_prompts)
    if as_json:
        counts = {"prompts": len(file.done), "resumed": before, "left_out": left_out}
        print_json({"schema": 1, "target": target, "out": str(out)} | counts)
        return
    say_written(out, f"{len(file.done):,} prompts, {before:,} of them there before")
    if left_out:
        print("left out: " + ", ".join(f"{number:,} {reason}" for reason, number in left_out.items()))
    say_next("data", "regenerate", out, "ANSWERS", "--target", target)


@app.command(cls=PanelCommand)
def check(
    samples: SamplesArgument,
    target: TargetOption,
    draft: Annotated[
        str | None, typer.Option(autocompletion=models, help="A draft of any format that is to be trained on.")
    ] = None,
    row: Annotated[str | None, typer.Option(help="The id of the sample to show; default: the first.")] = None,
    skip_model: Annotated[
        bool, typer.Option("--skip-model", help="Leave out the checks that load the target's weights.")
    ] = False,
    media_root: SampleMediaRootOption = None,
    device: DeviceOption = None,
    device_map: DeviceMapOption = None,
    dtype: DtypeOption = None,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Check data, target and draft before training. Says what it costs to ignore what is wrong."""
    quiet_transformers()
    from draftkit.checks.training_data import check_data
    from draftkit.report.terminal.data import show_checkup

    dtype = settled_dtype(dtype, device)
    checkup = check_data(
        samples, target, draft, with_model=not skip_model, row=row, device=device, dtype=dtype, media_root=media_root
    )
    result = {"file": named(samples), "target": target, "draft": draft} | checkup.to_dict()
    print_json(result) if as_json else show_checkup(console(), result)
    if checkup.failed:
        raise typer.Exit(1)
    if not as_json:
        say_next("train", "--recipe", "RECIPE", "--target", target, "--data", named(samples), "--out", "RUN")


@app.command(cls=PanelCommand)
def states(
    samples: SamplesArgument,
    out: Annotated[str, typer.Argument(help="The folder of states; one that exists is continued.")],
    target: TargetOption,
    target_adapter: TargetAdapterOption = None,
    layers: Annotated[
        str | None,
        typer.Option(help="Store the states after these layers, as 2,5,7; default: EAGLE-3's; '' for none."),
    ] = None,
    encoding: Annotated[
        Literal["bf16", "float32", "fp8", "int8", "int8-channel"], typer.Option(help="How numbers are stored.")
    ] = "bf16",
    tokens_per_row: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens that the target reads at once; default: 4096 on a GPU, 1024 on the CPU."),
    ] = None,
    shard_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a file, which is built in memory.")] = 32768,
    vllm_python: Annotated[
        str | None,
        typer.Option(help="The Python of an environment with vLLM, which then runs the target."),
    ] = None,
    tensor_parallel: TensorParallelOption = 1,
    media_root: SampleMediaRootOption = None,
    device: DeviceOption = None,
    device_map: DeviceMapOption = None,
    dtype: DtypeOption = None,
    workers: Annotated[
        int,
        typer.Option(min=1, help="Processes that share the work, as do those of other machines on the folder."),
    ] = 1,
    shard: Annotated[
        str,
        typer.Option(
            help="Write every N-th file only, from number I on, as 0/4: for processes that share an object store, or a "
            "disk without locks."
        ),
    ] = "0/1",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it takes, and write nothing.")] = False,
    with_parent: WithParentOption = False,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Store the target's hidden states for training. That then does without the target; a killed run is continued, and
    the same command elsewhere on the same folder takes its share."""
    quiet_transformers()
    from draftkit.data.states.stream import parent_lives
    from draftkit.data.states.workers import check_shared, further_workers, on_devices
    from draftkit.data.states.write import StatesSettings, open_states_job
    from draftkit.io.records import to_dict
    from draftkit.layout.target import adapted_name
    from draftkit.report.terminal.data import states_plan

    dtype = settled_dtype(dtype, device)
    if vllm_python is not None and device_map is not None:
        raise DraftkitError("--device-map spreads a target in this process", hint="vLLM takes --tensor-parallel")
    settings = StatesSettings(
        target=adapted_name(target, target_adapter),
        layers=_parse_layers(layers),
        encoding=encoding,
        tokens_per_row=tokens_per_row,
        shard_tokens=shard_tokens,
        vllm_python=vllm_python,
        tensor_parallel=tensor_parallel,
        device=device,
        dtype=dtype,
        media_root=None if media_root is None else str(media_root),
        part=_parse_part(shard),
    )
    check_shared(out, workers)
    own, *others = on_devices(settings, workers)
    with open_states_job(samples, out, own) as job:
        plan, manifest = to_dict(job.plan), job.manifest
        if not as_json:
            print(states_plan(plan), file=sys.stdout if dry_run else sys.stderr)
        if not dry_run:
            stopping.kept = lambda: f"the shards that are whole are kept in {out}; the same command goes on"
            alive = parent_lives() if with_parent else lambda: True
            beside = further_workers(samples, out, others)
            with beside, counted_progress("tokens", job.plan.tokens) as on_tokens:
                manifest = job.write(on_tokens, alive)
    if as_json:
        done = {"schema": 1, "out": None if dry_run else str(out), "plan": plan}
        print_json(done | {"states": to_dict(manifest)})
    elif not dry_run:
        size, shards = sum(shard.bytes for shard in manifest.shards), counted(len(manifest.shards), "shard")
        tokens = sum(shard.tokens for shard in manifest.shards)
        say_written(out, f"{tokens:,} tokens in {shards}, {size:,} bytes")
        if tokens == manifest.num_tokens:
            say_next(
                "train", "--recipe", "RECIPE", "--target", target, "--data", named(samples), "--states", out,
                "--out", "RUN",
            )  # fmt: skip


@app.command(cls=PanelCommand)
def stream(
    folder: Annotated[Path, typer.Argument(help="What the training run has as stream.folder.")],
    target: TargetOption,
    vllm_python: Annotated[
        str | None, typer.Option(help="The Python of an environment with vLLM; default: the one that runs this.")
    ] = None,
    tensor_parallel: TensorParallelOption = 1,
    device: DeviceOption = None,
    rows: Annotated[
        int | None, typer.Option(min=1, help="Rows computed in one call, which vLLM puts into batches; default: 8.")
    ] = None,
    with_parent: WithParentOption = False,
    trust_remote_code: TrustOption = False,
) -> None:
    """Compute hidden states beside a training run. A few rows ahead of `draftkit train --states-from vllm`, until
    it is done; several may share the work."""
    quiet_transformers()
    from draftkit.data.states.stream import ROWS_TOGETHER, parent_lives, run_worker

    alive = parent_lives() if with_parent else lambda: True
    computed = run_worker(
        folder, target, python=vllm_python, tensor_parallel=tensor_parallel, device=device, alive=alive,
        rows_together=rows or ROWS_TOGETHER,
    )  # fmt: skip
    print(f"training is over: the states of {computed:,} rows were computed here", file=sys.stderr)


OF_ROWS = (
    "split", "subset", "revision", "max_length", "drop_loops", "exclude_near", "system", "template_options",
    "media_root",
)  # fmt: skip


def _measured_on(sets: Iterable[str] | None) -> NearPrompts | None:
    """The prompts of sets that training data is to be without; None where no set is named."""
    from draftkit.data.decontamination import NearPrompts
    from draftkit.evaluate.prompts import load_prompts

    named = [
        (f"{PurePath(one).name} {prompt.id}", turn)
        for one in sets or ()
        for prompt in load_prompts(one)
        for turn in prompt.turns
    ]
    return NearPrompts(named) if named else None


def _prepared(source: str) -> Path | None:
    """The file of a source that holds samples already; None where it holds rows, or there is none."""
    from draftkit.data.sample_files import are_samples

    if is_address(source) and Store(source).size() is None:  # objects beneath it, which are rows
        return None
    path = local_file(source if is_address(source) else os.path.expanduser(source))
    return path if path.exists() and are_samples(path) else None


def _refuse_given(asked: typer.Context, names: Iterable[str]) -> None:
    """Raise `typer.BadParameter` for an option that was given though the source holds samples."""
    for name in names:
        found = asked.get_parameter_source(name)
        if found is not None and found.name != "DEFAULT":
            option = {"template_options": "template-option"}.get(name, name.replace("_", "-"))
            raise typer.BadParameter(f"--{option} is for rows: the source holds samples, which stay as they are.")


def _responder(
    target: OpenedTarget,
    sampling: Sampling,
    concurrency: int,
    endpoints: list[str] | None,
    served_model: str | None,
    device: str | None,
    dtype: str | None,
) -> Responder:
    """The endpoints where there are some, else the target in this process."""
    from draftkit.data.endpoints import EndpointResponder
    from draftkit.data.responses import engine_responder

    if endpoints:
        return EndpointResponder(endpoints, sampling, concurrency, served_model)
    if served_model is not None:
        raise DraftkitError("--served-model is the name at an endpoint", hint="give --endpoint too")
    return engine_responder(target, sampling, concurrency, device=device, dtype=dtype)


def _say_left_out(left_out: LeftOutRows) -> None:
    if left_out.rows:
        print(left_out, file=sys.stderr)


def _weights(target: OpenedTarget, endpoints: list[str] | None, *, unread: bool = False) -> str | None:
    """The digest of the weights that answer; None where a server has them, or they are to be left `unread`."""
    from draftkit.data.responses import engine_weights

    return None if unread or endpoints else engine_weights(target)


def _done_before(file: ResponseFile, endpoints: list[str] | None) -> int:
    """How many rows of a file were done before."""
    if file.done and endpoints:
        print(
            f"{file.path}: a server does not tell whether its weights are those that answered before", file=sys.stderr
        )
    return len(file.done)


def _parse_options(texts: list[str] | None) -> dict[str, object]:
    """`NAME=VALUE` by name; values are JSON, or text. Raises `DraftkitError` for one without a name or a value."""
    from draftkit.io.jsonfile import loads

    options: dict[str, object] = {}
    for text in texts or []:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise DraftkitError(f"--template-option {text}", expected="--template-option NAME=VALUE")
        try:
            options[name] = loads(value)
        except ValueError:
            options[name] = value
    return options


def _parse_layers(text: str | None) -> tuple[int, ...] | None:
    try:
        return None if text is None else tuple(int(number) for number in text.split(",") if text)
    except ValueError:
        raise DraftkitError(f"--layers {text}", expected="numbers, as 2,5,7") from None


def _parse_part(text: str) -> Part:
    from draftkit.data.states.shards import Part

    try:
        number, of = map(int, text.split("/"))
    except ValueError:
        raise DraftkitError(f"--shard {text}", expected="I/N, as 0/4") from None
    return Part(number, of)


def _counted(items: Iterable[Item], on_items: Callable[[int], None]) -> Iterator[Item]:
    for item in items:
        yield item
        on_items(1)
