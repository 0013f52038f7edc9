"""`draftkit doctor`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from draftkit.cli.options import (
    DatasetOption,
    DeviceMapOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    StrictOption,
    TargetAdapterOption,
    TargetOption,
    TrustOption,
    drafts,
    prompts_of,
    settled_dtype,
)
from draftkit.cli.output import console, print_json, quiet_transformers, say_next, shown_progress


def doctor(
    target: TargetOption,
    draft: Annotated[str, typer.Option(autocompletion=drafts, help="The draft to examine, of any format.")],
    target_adapter: TargetAdapterOption = None,
    k: Annotated[
        int | None,
        typer.Option("--k", min=1, help="Draft tokens a round; default: those it is made for, or 4."),
    ] = None,
    prompts: DatasetOption = None,
    limit: Annotated[
        int, typer.Option(min=1, help="Use this many prompts; a quarter of them tries every change, the rest confirm.")
    ] = 48,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate per prompt, at most.")] = 48,
    context: Annotated[
        str | None,
        typer.Option(
            help="Try what mends acceptance at length instead, behind so many tokens of other text, as 4k,16k."
        ),
    ] = None,
    device: DeviceOption = None,
    device_map: DeviceMapOption = None,
    dtype: DtypeOption = None,
    strict: StrictOption = False,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Find out why a draft accepts little. Known defects, its tensors, and what single changes would gain."""
    quiet_transformers()
    from draftkit.doctor.diagnose import diagnose_draft
    from draftkit.evaluate.options import parse_contexts
    from draftkit.layout.target import adapted_name
    from draftkit.report.terminal.diagnosis import show_diagnosis

    dtype = settled_dtype(dtype, device)
    target = adapted_name(target, target_adapter)
    with shown_progress(one_bar=True) as on_progress:
        on_progress("loading", 0, None)
        diagnosis = diagnose_draft(
            target,
            draft,
            prompts=prompts_of(prompts, target),
            limit=limit,
            num_speculative_tokens=k,
            max_new_tokens=max_new_tokens,
            contexts=parse_contexts(context),
            on_plan=lambda plan: print(plan, file=sys.stderr),
            device=device,
            dtype=dtype,
            on_progress=on_progress,
        )
    if as_json:
        print_json(diagnosis.to_dict())
    else:
        show_diagnosis(console(), diagnosis.to_dict())
        mended = any(tried.command for tried in diagnosis.recommended)
        say_next("eval", "--target", target, "--draft", "OUT" if mended else draft)
