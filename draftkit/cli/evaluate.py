"""`draftkit eval`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from draftkit.cli.completion import drafts, models
from draftkit.cli.shared import (
    MACHINE,
    OUTPUT,
    DeviceMapOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    ProgressLines,
    StrictOption,
    TrustOption,
    console,
    print_csv,
    print_json,
    quiet_transformers,
    settled_dtype,
)
from draftkit.errors import DraftkitError
from draftkit.requests import DraftSamplingMode, Turns, Verification

if TYPE_CHECKING:
    from draftkit.engines.vllm.settings import VllmSettings
    from draftkit.evaluate.certificate.result import Certificate
    from draftkit.evaluate.certificate.served import ServedCertificate
    from draftkit.evaluate.certificate.settings import CertificateSettings
    from draftkit.evaluate.measure import Progress
    from draftkit.results.record import Result
    from draftkit.results.settings import Sweep

PROMPTS, DRAFTING, SAMPLING = "Prompts", "Drafting", "Sampling of the target"
SPEED, SERVER, ENGINES = "What is told of it", "A running server", "Other engines"


def _prompt_sets() -> list[str]:
    from draftkit.evaluate.datasets import BUNDLED, registry

    return [BUNDLED, *registry()]


def evaluate(
    target: Annotated[
        str | None,
        typer.Option(
            autocompletion=models,
            help="The target model: a folder, org/name[@revision] or zoo:target. With --server only its tokenizer, or "
            "none: the server renders messages.",
        ),
    ] = None,
    draft: Annotated[
        list[str] | None,
        typer.Option(
            autocompletion=drafts,
            help="A draft of any format, ngram[:MIN-MAX] or suffix; repeat to compare. With --server only its name.",
        ),
    ] = None,
    k: Annotated[
        str,
        typer.Option(
            "--k", rich_help_panel=DRAFTING, help="Draft tokens a round (num_speculative_tokens), as 4 or 1-8,12."
        ),
    ] = "4",
    dataset: Annotated[
        str,
        typer.Option(
            "--dataset",
            "--prompts",
            autocompletion=_prompt_sets,
            rich_help_panel=PROMPTS,
            help="zoo (bundled), mt-bench, humaneval, …, a JSONL file, a .txt file with a prompt in each line, or a "
            "Hub dataset. A row has messages, conversations, turns, prompt, data or question; or text, gone on with as "
            "it is.",
        ),
    ] = "zoo",
    limit: Annotated[
        int | None, typer.Option(rich_help_panel=PROMPTS, help="Use this many prompts, spread over the set.")
    ] = None,
    turns: Annotated[
        Turns,
        typer.Option(rich_help_panel=PROMPTS, help="Of prompts with several: the first, or all with their answers."),
    ] = "first",
    thinking: Annotated[
        bool | None,
        typer.Option("--thinking/--no-thinking", rich_help_panel=PROMPTS, help="The chat template's enable_thinking."),
    ] = None,
    template: Annotated[
        bool | None,
        typer.Option(
            "--template/--no-template",
            rich_help_panel=PROMPTS,
            help="Apply the chat template to all prompts, or to none; default: where there is one, but not to text.",
        ),
    ] = None,
    context: Annotated[
        str | None,
        typer.Option(rich_help_panel=PROMPTS, help="Pad prompts to as many tokens with text of the set, as 1k,4k,16k."),
    ] = None,
    slices: Annotated[
        str | None,
        typer.Option(
            "--slice",
            rich_help_panel=PROMPTS,
            help="Say how acceptance shifts with language, thinking, tools, category; several as language,tools.",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(rich_help_panel=PROMPTS, help="Tokens to generate per prompt, at most.")
    ] = 128,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos", rich_help_panel=PROMPTS, help="Generate as many as that, whatever the model says."
        ),
    ] = False,
    concurrency: Annotated[
        str, typer.Option(rich_help_panel=MACHINE, help="Sequences decoded together, as 1 or 1,8,100.")
    ] = "1",
    device: DeviceOption = None,
    device_map: DeviceMapOption = None,
    dtype: DtypeOption = None,
    temperature: Annotated[
        str, typer.Option(rich_help_panel=SAMPLING, help="0 decodes greedily; several as 0,0.7,1.")
    ] = "0",
    top_k: Annotated[int, typer.Option(rich_help_panel=SAMPLING, help="Draw from this many tokens; 0 from all.")] = 0,
    top_p: Annotated[
        float, typer.Option(rich_help_panel=SAMPLING, help="Draw from the smallest set with this probability.")
    ] = 1.0,
    min_p: Annotated[
        float,
        typer.Option(rich_help_panel=SAMPLING, help="Draw from tokens with this share of the best one's probability."),
    ] = 0.0,
    seed: Annotated[int, typer.Option(rich_help_panel=SAMPLING, help="Of the first request; the others count on.")] = 0,
    draft_sampling: Annotated[
        DraftSamplingMode, typer.Option(rich_help_panel=DRAFTING, help="How drafts are drawn; all are lossless.")
    ] = "auto",
    draft_greedy_below: Annotated[
        float, typer.Option(rich_help_panel=DRAFTING, help="auto drafts greedily for requests below this temperature.")
    ] = 0.75,
    draft_temperature: Annotated[
        float | None,
        typer.Option(rich_help_panel=DRAFTING, help="For sampled drafts, instead of the request's temperature."),
    ] = None,
    draft_confidence: Annotated[
        float,
        typer.Option(
            rich_help_panel=DRAFTING,
            help="Drafts end before the first whose chance, as the draft estimates it, is below.",
        ),
    ] = 0.0,
    verification: Annotated[
        Verification,
        typer.Option(
            rich_help_panel=DRAFTING,
            help="rejection and block keep the distribution, coupled the very tokens of plain decoding.",
        ),
    ] = "rejection",
    acceptance_rates: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=DRAFTING, help="Of synthetic verification: a rate for each position, or one mean length."
        ),
    ] = None,
    disable_above_batch: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=DRAFTING, help="Draft nothing while more sequences than this are decoded together."
        ),
    ] = None,
    k_by_batch: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=DRAFTING, help="Largest batch:K pairs, as 4:6,16:3; beyond the last nothing is drafted."
        ),
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
    certify: Annotated[
        bool,
        typer.Option(
            "--certify",
            rich_help_panel=SPEED,
            help="Test, in the engine that is measured, that each draft leaves the target's output as it is, and the "
            "distribution at the temperatures above 0.",
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
    eager: Annotated[
        bool,
        typer.Option(
            "--eager", rich_help_panel=MACHINE, help="On a GPU, launch every kernel instead of replaying CUDA graphs."
        ),
    ] = False,
    server: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=SERVER,
            help="Measure the server at this address, as http://host:8000, with the draft that it runs with.",
        ),
    ] = None,
    server_baseline: Annotated[
        str | None,
        typer.Option(rich_help_panel=SERVER, help="A server with the same target and no draft, for the speed-up."),
    ] = None,
    engine: Annotated[
        Literal["draftkit", "vllm", "llama.cpp"] | None,
        typer.Option(
            rich_help_panel=ENGINES,
            help="vllm runs the prompts through vLLM too, and compares; llama.cpp in its server alone, from GGUF "
            "files; default: vllm with any option of it, else draftkit, or vLLM where that does not run the target "
            "and vLLM is installed.",
        ),
    ] = None,
    llama_server: Annotated[
        Path | None,
        typer.Option(rich_help_panel=ENGINES, help="The program that --engine llama.cpp starts; default: of the PATH."),
    ] = None,
    vllm_python: Annotated[
        str | None, typer.Option(rich_help_panel=ENGINES, help="Python of an environment with vLLM; default: this one.")
    ] = None,
    vllm_url: Annotated[
        str | None,
        typer.Option(rich_help_panel=ENGINES, help="A vLLM server that runs with the draft, as http://host:8000."),
    ] = None,
    vllm_baseline_url: Annotated[
        str | None, typer.Option(rich_help_panel=ENGINES, help="A vLLM server with the same target and no draft.")
    ] = None,
    tensor_parallel_size: Annotated[
        int, typer.Option(rich_help_panel=ENGINES, help="GPUs that vLLM splits the target over.")
    ] = 1,
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(rich_help_panel=ENGINES, help="Share of a GPU's memory that vLLM takes."),
    ] = None,
    vllm_arguments: Annotated[
        str | None, typer.Option(rich_help_panel=ENGINES, help="Further arguments of vllm.LLM, as a JSON object.")
    ] = None,
    plan_memory: Annotated[
        bool,
        typer.Option(
            "--plan-memory", rich_help_panel=MACHINE, help="Print what the run would take of memory, and load nothing."
        ),
    ] = False,
    plan_time: Annotated[
        bool,
        typer.Option(
            "--plan-time",
            rich_help_panel=MACHINE,
            help="Print what a round would take by arithmetic, here and on a few GPUs, and load nothing.",
        ),
    ] = False,
    details: Annotated[
        bool,
        typer.Option(
            "--details", rich_help_panel=OUTPUT, help="Show all that was measured: by position and category, latencies."
        ),
    ] = False,
    repeats: Annotated[
        int,
        typer.Option(
            rich_help_panel=SPEED,
            help="Passes over the prompts at most, without the draft and with it by turns, until the speed-up is "
            "known to 5 %; 0 runs plain decoding once, before all drafts.",
        ),
    ] = 3,
    strict: StrictOption = False,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
    as_csv: Annotated[
        bool, typer.Option("--csv", rich_help_panel=OUTPUT, help="Print the cells as CSV on stdout and nothing else.")
    ] = False,
) -> None:
    """Measure drafts against their target, and say which to use. Acceptance length, latency, speed, equality with plain
    decoding."""
    # What the command line alone says wrongly is said before torch is imported, which takes seconds.
    from draftkit.engines.vllm.settings import VllmSettings
    from draftkit.evaluate.options import (
        parse_contexts,
        parse_floats,
        parse_integers,
        parse_object,
        parse_rates,
        parse_schedule,
        parse_slices,
    )
    from draftkit.requests import DraftSampling, SamplingParameters
    from draftkit.results.settings import Settings

    ks = parse_integers("num_speculative_tokens", k)
    concurrencies, temperatures = parse_integers("concurrency", concurrency), parse_floats("temperature", temperature)
    dtype = settled_dtype(dtype, device)
    settings = Settings(
        num_speculative_tokens=ks[-1],
        max_new_tokens=max_new_tokens,
        concurrency=concurrencies[0],
        prompts=dataset,
        limit=limit,
        turns=turns,
        thinking=thinking,
        template=template,
        slices=parse_slices(slices),
        ignore_eos=ignore_eos,
        repeats=repeats,
        device=device,
        dtype=dtype,
        sampling=SamplingParameters(temperatures[0], top_k, top_p, min_p, seed),
        draft_sampling=DraftSampling(draft_sampling, draft_greedy_below, draft_temperature, draft_confidence),
        verification=verification,
        acceptance_rates=parse_rates(acceptance_rates, ks[-1]),
        k_by_batch=parse_schedule(k_by_batch, disable_above_batch, ks[-1]),
        eager=eager,
    )
    contexts = parse_contexts(context)
    sweep = settings.sweep(k=ks, concurrency=concurrencies, temperature=temperatures, context=contexts)
    if as_json and as_csv:
        raise typer.BadParameter("--json and --csv both want stdout: give one of them; --out keeps JSON beside.")
    if resume and out is None:
        raise typer.BadParameter("--resume needs the file to go on with: --out FILE --resume.")
    options_of_vllm = (vllm_python, vllm_url, vllm_baseline_url, vllm_arguments, gpu_memory_utilization)
    wants_vllm = any(option is not None for option in options_of_vllm) or tensor_parallel_size > 1
    if engine == "draftkit" and wants_vllm:
        raise typer.BadParameter("options of vLLM for --engine draftkit: leave out --engine, or them.")
    vllm = None
    if engine == "vllm" or wants_vllm:
        vllm = VllmSettings(
            vllm_python,
            tensor_parallel_size,
            gpu_memory_utilization,
            parse_object("vllm_arguments", vllm_arguments),
            vllm_url,
            vllm_baseline_url,
        )
    drafts = draft or []
    if llama_server is not None and engine != "llama.cpp":
        raise typer.BadParameter("--llama-server without --engine llama.cpp: add it.")
    if server is not None or server_baseline is not None or engine == "llama.cpp":
        beyond = {
            "--advise": advise, "--predict": predict, "--records": records is not None, "--plan-memory": plan_memory,
            "--plan-time": plan_time, "--engine": engine not in (None, "llama.cpp") or wants_vllm, "--resume": resume,
            "--certify": certify and engine == "llama.cpp",
        }  # fmt: skip
        asked = [name for name, there in beyond.items() if there]
        _check_server_options(server, server_baseline, drafts, asked, starts=engine == "llama.cpp")
    if server is None and (target is None or not drafts):
        raise typer.BadParameter(f"Missing option '{'--target' if target is None else '--draft'}' (or --server).")
    quiet_transformers()
    from draftkit.evaluate.evaluate import evaluate_draft, plan_evaluation, plan_rounds
    from draftkit.evaluate.llama_cpp import LlamaCppSettings, evaluate_llama_cpp
    from draftkit.evaluate.server import ServerSettings, certify_server, evaluate_server
    from draftkit.evaluate.vllm import certify_with_vllm
    from draftkit.report.tables import memory_table, rounds_table, show_evaluation
    from draftkit.results.record import named_result
    from draftkit.results.saved import ResultFile

    if plan_memory:
        assert target is not None
        plans = plan_evaluation(target, drafts, sweep.largest)
        if as_json:
            print_json({source: plan.to_dict() for source, plan in plans.items()})
        for source, plan in plans.items() if not as_json else ():
            console().print(memory_table(source, plan, ks[-1]))
        return
    if plan_time:
        assert target is not None
        planned = plan_rounds(target, drafts, sweep)
        if as_json:
            print_json({source: [one.to_dict() for one in rounds] for source, rounds in planned.items()})
        for source, rounds in planned.items() if not as_json else ():
            console().print(rounds_table(source, rounds))
        return
    own = _certificate_settings(target, sweep, vllm) if certify and server is None and target else None
    saved = None if out is None else ResultFile(out, resume=resume)
    served: list[ServedCertificate] = []
    with _prompt_progress() as on_progress:
        if server is not None:
            name = drafts[0] if drafts else None
            servers = ServerSettings(server, server_baseline)
            result = evaluate_server(servers, sweep, on_progress, target=target, draft=name, saved=saved)
            if certify:
                served.append(certify_server(servers, sweep, on_progress, target=target, draft=name))
        elif engine == "llama.cpp":
            assert target is not None
            log = Path("llama-server.log") if out is None else out.with_suffix(".llama-server.log")
            program = LlamaCppSettings(llama_server or Path("llama-server"), log)
            result = evaluate_llama_cpp(target, drafts, sweep, program, on_progress, saved=saved)
        else:
            assert target is not None
            result = evaluate_draft(
                target,
                drafts,
                sweep,
                on_progress,
                advise=advise,
                predict=predict,
                saved=saved,
                records=records,
                vllm=vllm,
                fall_back=engine is None,
            )
            if certify and vllm is not None:
                served += [certify_with_vllm(target, name, sweep, vllm, on_progress) for name in drafts]
    certificates = [] if own is None else _certificates(target or "", drafts, own)
    as_file = result.to_dict()
    if certify:
        as_file["certificates"] = [found.to_dict() for found in certificates] + [found.to_dict() for found in served]
        if saved is not None:
            saved.write(as_file)
    if as_json:
        print_json(named_result(as_file))
    elif as_csv:
        from draftkit.report.csv import cells_csv

        print_csv(cells_csv(result))
    else:
        show_evaluation(console(), result, certificates, served=served, details=details)
    for found in served:
        if found.verdict == "bug":
            raise DraftkitError(f"{found.engine} is not lossless with {found.draft}: {found.failures[0]}")
    if bugs := [certificate.draft for certificate in certificates if certificate.verdict == "bug"]:
        raise DraftkitError(f"not lossless: {', '.join(bugs)}", hint="the certificate says where; please report it")
    if require_al is not None:
        _require_acceptance(result, require_al)


def _check_server_options(
    server: str | None, baseline: str | None, drafts: Sequence[str], beyond: Sequence[str], *, starts: bool
) -> None:
    """A usage error for what a server is not asked: `beyond` are such options that were given.

    `starts`: it is llama.cpp's, to be started here with each draft.
    """
    if server is None and not starts:
        raise typer.BadParameter("--server-baseline without --server: add --server, the one with the draft.")
    if starts and (server is not None or baseline is not None):
        raise typer.BadParameter("--server with --engine llama.cpp, which starts its own: leave one of them out.")
    if beyond:
        asked = "--engine llama.cpp" if starts else "--server"
        raise typer.BadParameter(f"{', '.join(beyond)} with {asked}, which runs as it was started: leave it out.")
    if len(drafts) > 1 and not starts:
        raise typer.BadParameter(f"{len(drafts)} drafts for one server: give one --draft, its name, or none.")


def _require_acceptance(result: Result, floor: float) -> None:
    from draftkit.results.metrics import mean

    missed = [c for c in result.cells if c.acceptance_length is None or not c.acceptance_length.mean >= floor]
    for cell in missed:
        setting = f"K={cell.num_speculative_tokens}, T={cell.temperature:g}, concurrency {cell.concurrency}"
        length = mean(cell.acceptance_length)
        print(f"{cell.draft} ({setting}): acceptance length {length} is below {floor:g}", file=sys.stderr)
    if missed:
        raise typer.Exit(3)


def _certificate_settings(target: str, sweep: Sweep, vllm: VllmSettings | None) -> CertificateSettings | None:
    """All settings of the measurement, for draftkit's own engine; None where only `vllm` runs the target.

    Raises `DraftkitError` where there is nothing to certify.
    """
    from draftkit.evaluate.certificate.settings import CertificateSettings
    from draftkit.evaluate.vllm import check_certifiable
    from draftkit.loading import require_runtime, runtime_refusal

    if vllm is not None:
        check_certifiable(sweep.first, vllm)
        if runtime_refusal(target) is not None:
            return None
    require_runtime(target, "leave out --certify, or certify vLLM with --engine vllm")
    return CertificateSettings.of(sweep)


def _certificates(target: str, drafts: list[str], asked: CertificateSettings) -> list[Certificate]:
    """A certificate for each draft."""
    from draftkit.evaluate.certificate.certify import certify

    def on_progress(step: str, done: int, total: int) -> None:
        if sys.stderr.isatty():
            print(f"certificate: {step} ({done + 1} of {total})", file=sys.stderr)

    return [certify(target, draft, asked, on_progress) for draft in drafts]


def _so_far(name: str, length: float) -> str:
    """The acceptance length of a run, where it has one."""
    return "" if isnan(length) or name.endswith("no draft") else f", acceptance length {length:.2f}"


@contextmanager
def _prompt_progress() -> Iterator[Progress]:
    """A bar for each run with the acceptance length so far, on stderr; lines where that is no terminal."""
    if not sys.stderr.isatty():
        lines = ProgressLines()
        yield lambda name, done, total, length: lines(name, done, total, _so_far(name, length))
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, Any] = {}

        def on_progress(name: str, done: int, total: int, length: float) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
            bars.update(tasks[name], completed=done, description=name + _so_far(name, length))

        yield on_progress
