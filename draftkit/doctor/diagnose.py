"""Finding out why a draft accepts little."""

from __future__ import annotations

from contextlib import ExitStack

from draftkit.checks.pair import known_defects
from draftkit.convert.api import Reading, read_foreign
from draftkit.doctor.audit import audit
from draftkit.doctor.compare import Progress, compare
from draftkit.doctor.decay import classify
from draftkit.doctor.diagnosis import SEVERITIES, Diagnosis
from draftkit.doctor.experiments import EXPERIMENTS
from draftkit.doctor.measure import TEMPERATURE
from draftkit.doctor.patient import Patient, runnable
from draftkit.errors import DraftkitError
from draftkit.evaluate.prompts import encode_prompt, load_prompts
from draftkit.hub.locate import locate
from draftkit.layout.folder import is_unified
from draftkit.loading import is_ngram, load_model, open_draft
from draftkit.models.devices import device_named, dtype_named, limit_threads
from draftkit.requests import Request, SamplingParameters
from draftkit.results.statistics import expected_acceptance_length


def diagnose_draft(
    target: str,
    draft: str,
    *,
    prompts: str = "zoo",
    limit: int | None = 48,
    num_speculative_tokens: int = 4,
    max_new_tokens: int = 48,
    device: str | None = None,
    dtype: str | None = None,
    on_progress: Progress = lambda *_: None,
) -> Diagnosis:
    """Look for known defects of a draft, and measure what single changes would make of its acceptance.

    `target` and `draft` are paths, Hub ids or `zoo:NAME`; the draft may be a foreign checkpoint. A quarter of
    the prompts are decoded with the draft as it is and with each change; the few changes that look helpful are measured
    on the other prompts too, and help where the acceptance length grows there by a margin, and by more than chance.
    Raises `DraftkitError`.
    """
    if is_ngram(draft):
        raise DraftkitError("n-gram lookup has no checkpoint to examine", hint="draftkit eval measures it")
    device = device_named(device)
    with ExitStack() as stack:
        unified = stack.enter_context(open_draft(draft, target))
        model, tokenizer = load_model(target, device=device, dtype=dtype_named(dtype, device))
        limit_threads(model)
        asked = load_prompts(prompts, limit)
        requests = [
            Request(p.id, encode_prompt(p, tokenizer), max_new_tokens, SamplingParameters(TEMPERATURE, seed=number))
            for number, p in enumerate(asked)
        ]
        patient = Patient(draft, unified, runnable(unified), target, model, tokenizer, asked, requests)
        settings = {
            "prompts": prompts,
            "num_prompts": len(requests),
            "num_speculative_tokens": num_speculative_tokens,
            "max_new_tokens": max_new_tokens,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": device,
            "temperature": TEMPERATURE,
        }
        return _examine(patient, _reading(draft, target), num_speculative_tokens, settings, on_progress)


def _reading(draft: str, target: str) -> Reading | None:
    """How a foreign checkpoint was converted."""
    located = locate(draft)
    return None if is_unified(located.path) else read_foreign(located, target)


def _examine(
    patient: Patient, reading: Reading | None, k: int, settings: dict[str, object], on_progress: Progress
) -> Diagnosis:
    found = {experiment.name: experiment.of(patient) for experiment in EXPERIMENTS}
    audited = audit(patient, reading)
    findings = sorted([*known_defects(patient), *audited.findings], key=lambda f: SEVERITIES.index(f.severity))
    trials = [(experiment.name, trial) for experiment in EXPERIMENTS for trial in found[experiment.name]]
    generations, tried = compare(patient, trials, k, on_progress)
    return Diagnosis(
        target=patient.target_source,
        draft=patient.source,
        method=patient.draft.spec.method,
        length=expected_acceptance_length(generations),
        decay=classify(generations, max(r.drafted for g in generations for r in g.rounds)),
        findings=tuple(findings),
        tensors=audited.tensors,
        tried=tried,
        not_applicable={e.name: e.needs for e in EXPERIMENTS if not found[e.name]},
        settings=settings,
    )
