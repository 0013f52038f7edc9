"""The preflight: everything about data, target and draft that can be known to be wrong before the first step."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch

from draftkit.checks.evidence import Data, Evidence
from draftkit.checks.registry import run_checks
from draftkit.checks.training_data import survey
from draftkit.data.samples import Sample, read_origin, read_samples
from draftkit.data.states.online import load_training_target
from draftkit.data.tokenizer import TargetTokenizer, load_tokenizer
from draftkit.errors import SourceError, UnsupportedTarget
from draftkit.finding import Finding
from draftkit.loading import OpenedTarget, open_draft, open_target
from draftkit.targets.devices import device_named, dtype_named


@dataclass(frozen=True)
class Checkup:
    """What was found, by check, and one sample as text, in pieces that the loss mask holds or not."""

    samples: int
    tokens: int
    loss_tokens: int
    findings: list[tuple[str, Finding]]
    shown: list[tuple[str, bool]]

    @property
    def failed(self) -> bool:
        """Whether training would fail, or train something useless."""
        return any(finding.severity == "error" for _, finding in self.findings)

    def to_dict(self) -> dict[str, object]:
        """The findings as JSON values."""
        return {
            "schema": 1,
            "documents": self.samples,
            "tokens": self.tokens,
            "supervised_tokens": self.loss_tokens,
            "findings": [
                {"check": check, "what": finding.message, "hint": finding.fix, **asdict(finding)}
                for check, finding in self.findings
            ],
            "shown": [{"text": text, "supervised": masked} for text, masked in self.shown],
        }


def check_data(
    path: Path,
    target: str | OpenedTarget,
    draft: str | None = None,
    *,
    with_model: bool = True,
    row: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
) -> Checkup:
    """Check a file of samples against its target, and a draft to be trained or adapted.

    `with_model` False leaves out what needs the target's weights, which run in transformers where draftkit's own
    runtime does not run them. `row` is the id of the sample to show; None shows the first. Raises `DraftkitError` for
    what cannot be read at all: files, models, a damaged line.
    """
    target = open_target(target)
    tokenizer, config = load_tokenizer(target), target.language_model
    origin = read_origin(path)
    counted = survey(read_samples(path), origin, tokenizer, config.vocab_size)
    shown = counted.first if row is None else _find(path, row)
    place = device_named(device)
    known = Evidence(data=Data(path, origin, counted, tokenizer), target_config=config, draft_name=draft or "")
    with ExitStack() as stack:
        if draft is not None:
            opened = stack.enter_context(open_draft(draft, target))
            known = replace(known, draft=opened, spec=opened.spec)
        if with_model and not counted.outside.count:  # a model cannot read ids that it does not have
            known = _with_model(known, target, place, dtype_named(dtype, place))
        found = run_checks(known, "training_data", "training_models")
    return Checkup(counted.samples, counted.tokens, counted.loss_tokens, found, pieces(shown, tokenizer))


def _with_model(known: Evidence, target: OpenedTarget, device: str, dtype: torch.dtype) -> Evidence:
    """What is known, and the target's model, where draftkit or transformers runs it."""
    if target.refusal is None:
        return replace(known, model=target.load(device=device, dtype=dtype))
    known = replace(known, refusal=target.refusal.problem)
    try:
        return replace(known, model=load_training_target(target, device=device, dtype=dtype))
    except UnsupportedTarget:
        return known


def pieces(sample: Sample, target: TargetTokenizer) -> list[tuple[str, bool]]:
    """A sample as the target sees it: its text, special tokens included, in pieces that the loss mask holds or not."""
    edges = [0, *(edge for span in sample.spans for edge in span), len(sample)]
    stretches = [sample.tokens[begin:end].tolist() for begin, end in pairwise(edges)]
    texts = [target.tokenizer.decode(tokens, skip_special_tokens=False) for tokens in stretches]
    return [(text, bool(index % 2)) for index, text in enumerate(texts) if text]


def _find(path: Path, row: str) -> Sample:
    for sample in read_samples(path):
        if sample.id == row:
            return sample
    raise SourceError(f"there is no sample {row}", where=path, hint="leave --row out to see the first")
