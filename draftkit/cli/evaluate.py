"""`draftkit eval` and `draftkit certify`, and what their options and `--set` ask together."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftkit.cli.options import (
    OUTPUT,
    PROMPTS,
    SPEED,
    CompileOption,
    ConcurrenciesOption,
    ContextOption,
    DatasetOption,
    DeviceMapOption,
    DeviceOption,
    DraftsOption,
    DtypeName,
    DtypeOption,
    EngineOption,
    JsonOption,
    LimitOption,
    NewTokensOption,
    ReleaseOption,
    ServerBaselineOption,
    ServerOption,
    SetOption,
    TargetNameOption,
    TemperaturesOption,
    TokensOption,
    TreesOption,
    TrustOption,
    VllmPythonOption,
    prompts_of,
    settled_dtype,
)
from draftkit.cli.output import console, print_csv, print_json, prompt_progress, quiet_transformers, stopping
from draftkit.cli.settings import SettingsOption
from draftkit.errors import DraftkitError

if TYPE_CHECKING:
    from draftkit.evaluate.engine import BaseEngine
    from draftkit.results.record import Result
    from draftkit.results.saved import ResultFile
    from draftkit.results.settings import Sweep


@dataclass(frozen=True)
class Measurement:
    """What a command is asked to measure. `engine` None leaves it to the evaluation; `values`: settings by name."""

    target: str | None
    drafts: list[str]
    sweep: Sweep
    engine: str | None
    values: Mapping[str, object]

    def engines(self, out: Path | None = None) -> list[BaseEngine]:
        """The engines that run the prompts, one after another; none where the evaluation is to choose. `out`: where the
        result is kept. Raises `SettingError`."""
        if self.engine is None:
            return []
        from draftkit.evaluate.engines import engine_class

        asked = engine_class(self.engine).of(self.values, out)
        if not asked.compared:
            return [asked]
        from draftkit.evaluate.engines.own import OwnEngine  # needs torch, which a server does without

        return [OwnEngine(), asked]


def asked_of(
    target: str | None,
    drafts: Sequence[str] | None,
    *,
    k: str = "4",
    trees: Sequence[str] = (),
    concurrency: str = "1",
    temperature: str = "0",
    context: str | None = None,
    dtype: DtypeName | None = None,
    device: str | None = None,
    engine: str | None = None,
    settings: Sequence[str] | None = None,
    **flags: object,
) -> Measurement:
    """The measurement that options and `--set` ask for together; `flags` are settings by their names, those that are
    None left out.

    What is wrong is said before torch is imported, which takes seconds. Raises `SettingError`, or a usage error.
    """
    from draftkit.evaluate.engines import engine_class
    from draftkit.evaluate.options import (
        ENGINE_SETTINGS,
        OPTIONS,
        parse_contexts,
        parse_floats,
        parse_integers,
        settable_settings,
    )
    from draftkit.io.settings import assignments, read_settings, settings_of, with_values
    from draftkit.results.settings import Settings

    ks = () if trees else parse_integers("num_speculative_tokens", k)
    batches = parse_integers("concurrency", concurrency)
    temperatures = parse_floats("temperature", temperature)
    flags |= {"concurrency": batches[0], "temperature": temperatures[0]}
    flags |= {"num_speculative_tokens": ks[-1]} if ks else {"tree": trees[0]}
    flags |= {"device": device, "dtype": settled_dtype(dtype, device)}
    texts = assignments(settings or ())
    confidences = parse_floats("draft_confidence", texts.pop("draft_confidence", "0"))
    flags |= {"draft_confidence": confidences[0]} if any(confidences) else {}
    given = {name: value for name, value in flags.items() if value is not None}
    for name in texts.keys() & OPTIONS.keys():
        raise typer.BadParameter(f"{name} has an option of its own: {OPTIONS[name]}.")
    by_engine: dict[str, type] = {cls.engine: cls for cls in ENGINE_SETTINGS}
    if engine is not None and engine not in by_engine and (own := engine_class(engine).settings_type) is not None:
        by_engine[engine] = own
    given |= read_settings(settable_settings(*by_engine.values()), texts)
    for name, cls in by_engine.items():
        theirs = given.keys() & {one.name for one in settings_of(cls)}
        if theirs and name != (engine := engine or name):
            words = ", ".join(OPTIONS.get(one, one) for one in sorted(theirs))
            raise typer.BadParameter(f"{words} of {name} with the engine {engine}: leave out one of them.")
    if engine in by_engine:
        with_values(by_engine[engine], given)
    sweep = with_values(Settings, given).sweep(
        k=ks,
        tree=trees,
        concurrency=batches,
        temperature=temperatures,
        context=parse_contexts(context),
        draft_confidence=confidences,
    )
    if (target is None or not drafts) and (engine is None or engine_class(engine).sees_weights):
        missing = "--target" if target is None else "--draft"
        raise typer.BadParameter(f"Missing option '{missing}' (or --server).")
    return Measurement(target, list(drafts or ()), sweep, engine, given)


SliceOption = Annotated[
    str | None,
    typer.Option(
        "--slice",
        rich_help_panel=PROMPTS,
        help="Say how acceptance shifts with language, thinking, tools, category; several as language,tools.",
    ),
]
RequiredLengthOption = Annotated[
    float | None,
    typer.Option(
        "--require-al",
        "--min-acceptance-length",
        rich_help_panel=OUTPUT,
        help="Exit with code 3 when an acceptance length is lower.",
    ),
]
AdaptersOption = Annotated[
    list[str] | None,
    typer.Option(
        "--target-adapter",
        help="A LoRA adapter (peft) on the target, merged in memory: measured beside the target; repeatable.",
    ),
]
AdviseOption = Annotated[
    bool,
    typer.Option(
        "--advise",
        rich_help_panel=SPEED,
        help="Time rounds too, and say which K would be fastest at which batch size.",
    ),
]
DryRunOption = Annotated[
    bool,
    typer.Option(
        "--dry-run", rich_help_panel=OUTPUT, help="Print memory and the time of a round by arithmetic; load nothing."
    ),
]
ResultOption = Annotated[
    Path | None, typer.Option(rich_help_panel=OUTPUT, help="Keep the result in this JSON file, cell by cell.")
]
ResumeOption = Annotated[
    bool, typer.Option("--resume", rich_help_panel=OUTPUT, help="Go on with what --out holds already.")
]
RecordsOption = Annotated[
    Path | None,
    typer.Option(rich_help_panel=OUTPUT, help="Append the raw record of every round to this JSONL file."),
]
DetailsOption = Annotated[
    bool,
    typer.Option(
        "--details", rich_help_panel=OUTPUT, help="Show all that was measured: by position and category, latencies."
    ),
]
CsvOption = Annotated[
    bool, typer.Option("--csv", rich_help_panel=OUTPUT, help="Print the cells as CSV on stdout and nothing else.")
]


def evaluate(
    asked_for: typer.Context,
    target: TargetNameOption = None,
    target_adapter: AdaptersOption = None,
    draft: DraftsOption = None,
    k: TokensOption = "4",
    tree: TreesOption = None,
    temperature: TemperaturesOption = "0",
    settings: SetOption = None,
    list_settings: SettingsOption = None,
    dataset: DatasetOption = None,
    limit: LimitOption = None,
    max_new_tokens: NewTokensOption = 128,
    context: ContextOption = None,
    slices: SliceOption = None,
    concurrency: ConcurrenciesOption = "1",
    device: DeviceOption = None,
    device_map: DeviceMapOption = None,
    dtype: DtypeOption = None,
    compile: CompileOption = False,
    trust_remote_code: TrustOption = False,
    engine: EngineOption = None,
    vllm_python: VllmPythonOption = None,
    server: ServerOption = None,
    server_baseline: ServerBaselineOption = None,
    advise: AdviseOption = False,
    dry_run: DryRunOption = False,
    out: ResultOption = None,
    resume: ResumeOption = False,
    records: RecordsOption = None,
    require_al: RequiredLengthOption = None,
    details: DetailsOption = False,
    release: ReleaseOption = None,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Measure drafts against their target, and say which to use. Acceptance length, latency, speed, equality with plain
    decoding."""
    if as_json and as_csv:
        raise typer.BadParameter("--json and --csv both want stdout: give one of them; --out keeps JSON beside.")
    source = asked_for.get_parameter_source("k")
    if tree and source is not None and source.name != "DEFAULT":
        raise typer.BadParameter("--k beside --tree: a tree's depth is its K; leave out one of them.")
    if resume and out is None:
        raise typer.BadParameter("--resume needs the file to go on with: --out FILE --resume.")
    quiet_transformers()
    asked = asked_of(
        target, draft, k=k, concurrency=concurrency, temperature=temperature, context=context, dtype=dtype,
        device=device, engine=engine, vllm_python=vllm_python, server=server, server_baseline=server_baseline,
        settings=settings, prompts=prompts_of(dataset, target), limit=limit, max_new_tokens=max_new_tokens,
        slices=_parts(slices), trees=tree or (), compile=compile or None,
    )  # fmt: skip
    if dry_run:
        _show_plan(asked, as_json)
        return
    from draftkit.results.saved import ResultFile

    saved = None if out is None else ResultFile(out, resume=resume)
    stopping.kept = lambda: kept_cells(saved, asked.sweep, len(asked.drafts) or 1)
    from draftkit.evaluate.adapters import evaluate_adapters
    from draftkit.evaluate.evaluate import evaluate_draft

    engines = asked.engines(out)
    if compile and engines and not any(one.keeps_rounds for one in engines):
        raise typer.BadParameter("--compile is for draftkit's own engine: leave out --engine and --server.")
    measure: Callable[..., Result] = partial(evaluate_draft, engines=engines)
    if target_adapter:
        _require_own_engine(asked.target, engines, resume=resume)
        measure = partial(evaluate_adapters, adapters=target_adapter)
    with prompt_progress() as on_progress:
        result = measure(
            asked.target, asked.drafts, asked=asked.sweep, on_progress=on_progress, advise=advise, saved=saved,
            records=records,
        )  # fmt: skip
    _show(result, details, as_json, as_csv)
    for engine_asked in engines if not (as_json or as_csv) else ():
        if more := engine_asked.would_tell(result.cells):
            print(f"next: {more}", file=sys.stderr)
    if require_al is not None:
        _require_acceptance(result, require_al)


def _show_plan(asked: Measurement, as_json: bool) -> None:
    """Print what a measurement would take of memory, and from where on its drafts would pay; nothing is loaded."""
    if asked.engine is not None or asked.sweep.trees:
        raise typer.BadParameter("--dry-run plans chains in draftkit's own engine: leave out --tree and the engine.")
    from draftkit.evaluate.planning import plan_evaluation
    from draftkit.evaluate.round_cost import plan_rounds
    from draftkit.report.terminal.tables import plan_answer, plan_table

    assert asked.target is not None
    memory = plan_evaluation(asked.target, asked.drafts, asked.sweep.largest)
    rounds = plan_rounds(asked.target, asked.drafts, asked.sweep)
    if as_json:
        as_memory = {source: one.to_dict() for source, one in memory.items()}
        as_rounds = {source: [one.to_dict() for one in planned] for source, planned in rounds.items()}
        print_json({"schema": 1, "memory": as_memory, "rounds": as_rounds})
        return
    for source in asked.drafts:
        console().print(plan_answer(source, memory[source], rounds[source]))
        console().print(plan_table(source, memory[source], rounds[source]))


def _require_own_engine(target: str | None, engines: Sequence[BaseEngine], *, resume: bool) -> None:
    """Raise `DraftkitError` for adapters beside another engine, which is given them by its own means, and to go on."""
    if target is None or engines:
        raise DraftkitError("adapters are merged for draftkit's own engine", hint="leave out --engine and --server")
    if resume:
        raise DraftkitError("a measurement of adapters is kept whole", hint="leave out --resume")


def kept_cells(saved: ResultFile | None, sweep: Sweep, drafts: int) -> str:
    """What is there of a measurement that was stopped, and how to go on with it."""
    if saved is None:
        return "nothing was kept: --out FILE keeps each cell as it ends, and --resume goes on"
    return f"{len(saved.cells)} of {len(sweep.settings) * drafts} cells kept in {saved.path}; --resume goes on"


def _parts(slices: str | None) -> tuple[str, ...] | None:
    from draftkit.results.settings import read_slices

    return None if slices is None else read_slices(slices)


def _show(result: Result, details: bool, as_json: bool, as_csv: bool) -> None:
    if as_json:
        print_json(result.to_dict())
    elif as_csv:
        from draftkit.report.terminal.tables import cells_csv

        print_csv(cells_csv(result))
    else:
        from draftkit.report.terminal.tables import show_evaluation

        show_evaluation(console(), result, details=details)


def _require_acceptance(result: Result, floor: float) -> None:
    from draftkit.results.metrics import mean

    missed = [c for c in result.cells if c.acceptance_length is None or not c.acceptance_length.mean >= floor]
    for cell in missed:
        setting = f"{cell.drafted}, T={cell.temperature:g}, concurrency {cell.concurrency}"
        length = mean(cell.acceptance_length)
        print(f"{cell.draft} ({setting}): acceptance length {length} is below {floor:g}", file=sys.stderr)
    if missed:
        raise typer.Exit(3)


def certify(
    target: TargetNameOption = None,
    draft: DraftsOption = None,
    k: TokensOption = "4",
    settings: SetOption = None,
    dataset: DatasetOption = None,
    limit: LimitOption = None,
    max_new_tokens: NewTokensOption = 128,
    concurrency: ConcurrenciesOption = "1",
    device: DeviceOption = None,
    device_map: DeviceMapOption = None,
    dtype: DtypeOption = None,
    compile: CompileOption = False,
    trust_remote_code: TrustOption = False,
    engine: EngineOption = None,
    vllm_python: VllmPythonOption = None,
    server: ServerOption = None,
    server_baseline: ServerBaselineOption = None,
    out: Annotated[
        Path | None, typer.Option(rich_help_panel=OUTPUT, help="Keep the certificates in this JSON file.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Test whether the output with the draft is the target's own. Greedily, token for token, in any engine. Exit code
    0: equal; 3: different; 4: these answers cannot tell."""
    quiet_transformers()
    asked = asked_of(
        target, draft, k=k, concurrency=concurrency, dtype=dtype, device=device,
        engine=engine, vllm_python=vllm_python, server=server, server_baseline=server_baseline, settings=settings,
        prompts=prompts_of(dataset, target), limit=limit, max_new_tokens=max_new_tokens,
        compile=compile or None,
    )  # fmt: skip
    asked.sweep.require_certifiable()
    if out is not None and out.exists():
        raise DraftkitError(f"{out} exists", where=out, hint="name another file")
    from draftkit.evaluate.certificate import certify_draft
    from draftkit.evaluate.engines.own import OwnEngine
    from draftkit.io.atomic import write_file
    from draftkit.io.jsonfile import dump, finite

    with prompt_progress() as on_progress:
        certificates = certify_draft(
            asked.target, asked.drafts, asked.sweep, on_progress, engines=asked.engines() or [OwnEngine()]
        )
    as_file = {"schema": 1, "certificates": [one.to_dict() for one in certificates]}
    if out is not None:
        write_file(out, dump(finite(as_file)).encode())
    if as_json:
        print_json(as_file)
    else:
        from draftkit.report.terminal.engines import certificate

        for one in certificates:
            console().print(certificate(one))
    failed = [one for one in certificates if one.verdict == "bug"]
    for one in failed:
        print(f"{one.engine} is not lossless with {one.draft}: {one.failures[0]}", file=sys.stderr)
    if failed or any(one.verdict == "unclear" for one in certificates):
        raise typer.Exit(3 if failed else 4)
