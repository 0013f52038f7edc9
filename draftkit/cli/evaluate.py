"""`draftkit eval`, `draftkit certify` and `draftkit plan`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftkit.cli.measuring import (
    PROMPTS,
    SPEED,
    ConcurrenciesOption,
    ContextOption,
    DatasetOption,
    DraftsOption,
    EngineOption,
    LimitOption,
    NewTokensOption,
    ServerBaselineOption,
    ServerOption,
    SetOption,
    TargetNameOption,
    TemperaturesOption,
    TokensOption,
    VllmPythonOption,
    asked_of,
    prompt_progress,
)
from draftkit.cli.shared import (
    OUTPUT,
    DeviceMapOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    TrustOption,
    console,
    print_csv,
    print_json,
    quiet_transformers,
)
from draftkit.errors import DraftkitError

if TYPE_CHECKING:
    from draftkit.results.record import Result


def evaluate(
    target: TargetNameOption = None,
    draft: DraftsOption = None,
    k: TokensOption = "4",
    temperature: TemperaturesOption = "0",
    settings: SetOption = None,
    dataset: DatasetOption = "zoo",
    limit: LimitOption = None,
    max_new_tokens: NewTokensOption = 128,
    context: ContextOption = None,
    slices: Annotated[
        str | None,
        typer.Option(
            "--slice",
            rich_help_panel=PROMPTS,
            help="Say how acceptance shifts with language, thinking, tools, category; several as language,tools.",
        ),
    ] = None,
    concurrency: ConcurrenciesOption = "1",
    device: DeviceOption = None,
    device_map: DeviceMapOption = None,
    dtype: DtypeOption = None,
    trust_remote_code: TrustOption = False,
    engine: EngineOption = None,
    vllm_python: VllmPythonOption = None,
    server: ServerOption = None,
    server_baseline: ServerBaselineOption = None,
    advise: Annotated[
        bool,
        typer.Option(
            "--advise",
            rich_help_panel=SPEED,
            help="Time rounds too, and say which K would be fastest at which batch size.",
        ),
    ] = False,
    predict: Annotated[
        bool,
        typer.Option(
            "--predict",
            rich_help_panel=SPEED,
            help="Predict acceptance at other temperatures and K, along text drawn there.",
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(rich_help_panel=OUTPUT, help="Keep the result in this JSON file, cell by cell.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", rich_help_panel=OUTPUT, help="Go on with what --out holds already.")
    ] = False,
    records: Annotated[
        Path | None,
        typer.Option(rich_help_panel=OUTPUT, help="Append the raw record of every round to this JSONL file."),
    ] = None,
    require_al: Annotated[
        float | None,
        typer.Option(
            "--require-al",
            "--min-acceptance-length",
            rich_help_panel=OUTPUT,
            help="Exit with code 3 when an acceptance length is lower.",
        ),
    ] = None,
    details: Annotated[
        bool,
        typer.Option(
            "--details", rich_help_panel=OUTPUT, help="Show all that was measured: by position and category, latencies."
        ),
    ] = False,
    as_json: JsonOption = False,
    as_csv: Annotated[
        bool, typer.Option("--csv", rich_help_panel=OUTPUT, help="Print the cells as CSV on stdout and nothing else.")
    ] = False,
) -> None:
    """Measure drafts against their target, and say which to use. Acceptance length, latency, speed, equality with plain
    decoding."""
    if as_json and as_csv:
        raise typer.BadParameter("--json and --csv both want stdout: give one of them; --out keeps JSON beside.")
    if resume and out is None:
        raise typer.BadParameter("--resume needs the file to go on with: --out FILE --resume.")
    quiet_transformers()
    asked = asked_of(
        target, draft, k=k, concurrency=concurrency, temperature=temperature, context=context, dtype=dtype,
        device=device, engine=engine, vllm_python=vllm_python, server=server, server_baseline=server_baseline,
        settings=settings, prompts=dataset, limit=limit, max_new_tokens=max_new_tokens, slices=_parts(slices),
    )  # fmt: skip
    from draftkit.results.saved import ResultFile

    saved = None if out is None else ResultFile(out, resume=resume)
    from draftkit.evaluate.evaluate import evaluate_draft

    with prompt_progress() as on_progress:
        result = evaluate_draft(
            asked.target, asked.drafts, asked.sweep, on_progress, engines=asked.engines(out), advise=advise,
            predict=predict, saved=saved, records=records,
        )  # fmt: skip
    _show(result, details, as_json, as_csv)
    if require_al is not None:
        _require_acceptance(result, require_al)


def _parts(slices: str | None) -> tuple[str, ...] | None:
    from draftkit.results.settings import read_slices

    return None if slices is None else read_slices(slices)


def _show(result: Result, details: bool, as_json: bool, as_csv: bool) -> None:
    if as_json:
        print_json(result.to_dict())
    elif as_csv:
        from draftkit.report.csv import cells_csv

        print_csv(cells_csv(result))
    else:
        from draftkit.report.tables import show_evaluation

        show_evaluation(console(), result, details=details)


def _require_acceptance(result: Result, floor: float) -> None:
    from draftkit.results.metrics import mean

    missed = [c for c in result.cells if c.acceptance_length is None or not c.acceptance_length.mean >= floor]
    for cell in missed:
        setting = f"K={cell.num_speculative_tokens}, T={cell.temperature:g}, concurrency {cell.concurrency}"
        length = mean(cell.acceptance_length)
        print(f"{cell.draft} ({setting}): acceptance length {length} is below {floor:g}", file=sys.stderr)
    if missed:
        raise typer.Exit(3)


def certify(
    target: TargetNameOption = None,
    draft: DraftsOption = None,
    k: TokensOption = "4",
    temperature: TemperaturesOption = "0",
    settings: SetOption = None,
    dataset: DatasetOption = "zoo",
    limit: LimitOption = None,
    max_new_tokens: NewTokensOption = 128,
    concurrency: ConcurrenciesOption = "1",
    device: DeviceOption = None,
    device_map: DeviceMapOption = None,
    dtype: DtypeOption = None,
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
    """Test whether an engine leaves the output as it is. Own or served: token for token at temperature 0, the
    distribution above; exit code 1 where it does not."""
    quiet_transformers()
    asked = asked_of(
        target, draft, k=k, concurrency=concurrency, temperature=temperature, dtype=dtype, device=device,
        engine=engine, vllm_python=vllm_python, server=server, server_baseline=server_baseline, settings=settings,
        prompts=dataset, limit=limit, max_new_tokens=max_new_tokens,
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
        from draftkit.report.certificate import certificate

        for one in certificates:
            console().print(certificate(one))
    for one in certificates:
        if one.verdict == "bug":
            raise DraftkitError(f"{one.engine} is not lossless with {one.draft}: {one.failures[0]}")


def plan(
    target: TargetNameOption = None,
    draft: DraftsOption = None,
    k: TokensOption = "4",
    settings: SetOption = None,
    dataset: DatasetOption = "zoo",
    limit: LimitOption = None,
    max_new_tokens: NewTokensOption = 128,
    context: ContextOption = None,
    concurrency: ConcurrenciesOption = "1",
    device: DeviceOption = None,
    device_map: DeviceMapOption = None,
    dtype: DtypeOption = None,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Print what a measurement would take, and load nothing. Memory of the largest setting, and the time of a round by
    arithmetic, here and on a few GPUs."""
    asked = asked_of(
        target, draft, k=k, concurrency=concurrency, context=context, dtype=dtype, device=device, settings=settings,
        prompts=dataset, limit=limit, max_new_tokens=max_new_tokens,
    )  # fmt: skip
    assert asked.target is not None
    quiet_transformers()
    from draftkit.evaluate.planning import plan_evaluation
    from draftkit.evaluate.time_plan import plan_rounds
    from draftkit.report.tables import memory_table, rounds_table

    memory = plan_evaluation(asked.target, asked.drafts, asked.sweep.largest)
    rounds = plan_rounds(asked.target, asked.drafts, asked.sweep)
    if as_json:
        as_memory = {source: one.to_dict() for source, one in memory.items()}
        as_rounds = {source: [one.to_dict() for one in planned] for source, planned in rounds.items()}
        print_json({"schema": 1, "memory": as_memory, "rounds": as_rounds})
        return
    for source in asked.drafts:
        console().print(memory_table(source, memory[source], max(asked.sweep.k)))
        console().print(rounds_table(source, rounds[source]))
