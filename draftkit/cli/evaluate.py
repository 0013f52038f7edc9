"""`draftkit eval`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from draftkit.cli.shared import JsonOption, console, print_json, quiet_transformers

if TYPE_CHECKING:
    from draftkit.evaluate.evaluate import Progress


def evaluate(
    target: Annotated[str, typer.Option(help="The target model: a folder, org/name[@revision] or zoo:target.")],
    draft: Annotated[list[str], typer.Option(help="A draft of any format, or ngram[:MIN-MAX]; repeat to compare.")],
    k: Annotated[int, typer.Option("--k", min=1, max=16, help="Draft tokens a round (num_speculative_tokens).")] = 4,
    prompts: Annotated[
        str, typer.Option(help="zoo (bundled), or a JSONL file with turns, messages or prompt.")
    ] = "zoo",
    limit: Annotated[int | None, typer.Option(min=1, help="Use this many prompts, spread over the file.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate per prompt, at most.")] = 128,
    concurrency: Annotated[int, typer.Option(min=1, help="Sequences decoded together.")] = 1,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda where there is one.")] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Default: bfloat16 on a GPU, float32 on the CPU."),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 decodes greedily.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="Draw from this many tokens; 0 from all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the smallest set with this probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Draw from tokens with this share of the best one's probability.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the first request; the others count on.")] = 0,
    draft_sampling: Annotated[
        Literal["auto", "greedy", "probabilistic"], typer.Option(help="How drafts are drawn; all are lossless.")
    ] = "auto",
    draft_greedy_below: Annotated[
        float, typer.Option(help="auto drafts greedily for requests below this temperature.")
    ] = 0.75,
    draft_temperature: Annotated[
        float | None, typer.Option(help="For sampled drafts, instead of the request's temperature.")
    ] = None,
    verification: Annotated[
        Literal["rejection", "block", "coupled", "synthetic"],
        typer.Option(help="rejection and block keep the distribution, coupled the very tokens of plain decoding."),
    ] = "rejection",
    acceptance_rates: Annotated[
        str | None, typer.Option(help="Of synthetic verification: a rate for each position, or one mean length.")
    ] = None,
    disable_above_batch: Annotated[
        int | None, typer.Option(min=1, help="Draft nothing while more sequences than this are decoded together.")
    ] = None,
    k_by_batch: Annotated[
        str | None, typer.Option(help="Largest batch:K pairs, as 4:6,16:3; beyond the last nothing is drafted.")
    ] = None,
    min_acceptance_length: Annotated[
        float | None, typer.Option(help="Exit with code 3 when a draft's acceptance length is lower.")
    ] = None,
    eager: Annotated[
        bool, typer.Option("--eager", help="On a GPU, launch every kernel instead of replaying CUDA graphs.")
    ] = False,
    plan_memory: Annotated[
        bool, typer.Option("--plan-memory", help="Print what the run would take of memory, and load nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure drafts against their target: acceptance length, latency, speed, equality with plain decoding."""
    quiet_transformers()
    from draftkit.evaluate.evaluate import Settings, evaluate_draft, plan_evaluation
    from draftkit.evaluate.options import parse_rates, parse_schedule
    from draftkit.report.tables import evaluation_table, memory_table
    from draftkit.runtime.sampling.parameters import DraftSampling, SamplingParameters

    settings = Settings(
        num_speculative_tokens=k,
        max_new_tokens=max_new_tokens,
        concurrency=concurrency,
        prompts=prompts,
        limit=limit,
        device=device,
        dtype=dtype,
        sampling=SamplingParameters(temperature, top_k, top_p, min_p, seed),
        draft_sampling=DraftSampling(draft_sampling, draft_greedy_below, draft_temperature),
        verification=verification,
        acceptance_rates=parse_rates(acceptance_rates, k),
        k_by_batch=parse_schedule(k_by_batch, disable_above_batch, k),
        eager=eager,
    )
    if plan_memory:
        plans = plan_evaluation(target, draft, settings)
        if as_json:
            print_json({source: plan.to_dict() for source, plan in plans.items()})
        for source, plan in plans.items() if not as_json else ():
            console().print(memory_table(source, plan))
        return
    with _prompt_progress() as on_progress:
        result: dict[str, Any] = evaluate_draft(target, draft, settings, on_progress)
    if as_json:
        print_json(result)
    else:
        console().print(evaluation_table(result))
    if min_acceptance_length is not None:
        _require_acceptance(result, min_acceptance_length)


def _require_acceptance(result: dict[str, Any], floor: float) -> None:
    for cell in result["cells"]:
        measured = cell["acceptance_length"]["mean"]
        if not measured >= floor:
            print(f"{cell['draft']}: acceptance length {measured:.2f} is below {floor:g}", file=sys.stderr)
            raise typer.Exit(3)


@contextmanager
def _prompt_progress() -> Iterator[Progress]:
    """A bar for each run with the acceptance length so far, on stderr where that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda *_: None
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
            bars.update(tasks[name], completed=done, description=f"{name}, acceptance length {length:.2f}")

        yield on_progress
