"""The preflight: everything about data, target and draft that can be known to be wrong before the first step."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from draftkit.checks import data_checks, draft_checks, model_checks
from draftkit.checks.preflight import Check, Evidence, Finding
from draftkit.data.samples import Sample, read_origin, read_samples
from draftkit.data.tokenizer import TargetTokenizer, load_tokenizer
from draftkit.errors import SourceError
from draftkit.hub.locate import locate
from draftkit.loading import load_model, open_draft
from draftkit.models.devices import device_named, dtype_named
from draftkit.models.target import read_config

CHECKS = (
    Check("tokenizer", data_checks.tokenizer),
    Check("chat template", data_checks.template),
    Check("mask", data_checks.mask),
    Check("end of turn", data_checks.end_of_turn),
    Check("truncation", data_checks.truncation),
    Check("beginning", data_checks.beginning),
    Check("loops", data_checks.loops),
    Check("aux layers", model_checks.aux_layers, needs_model=True),
    Check("final norm", model_checks.final_norm, needs_model=True),
    Check("vocabulary", draft_checks.vocabulary, needs_draft=True),
    Check("rope", draft_checks.rope, needs_draft=True),
)


@dataclass(frozen=True)
class Checkup:
    """What was found, by check, and one document as text, in pieces that are supervised or not."""

    documents: int
    tokens: int
    supervised: int
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
            "documents": self.documents,
            "tokens": self.tokens,
            "supervised_tokens": self.supervised,
            "findings": [{"check": check, **asdict(finding)} for check, finding in self.findings],
            "shown": [{"text": text, "supervised": supervised} for text, supervised in self.shown],
        }


def check_data(
    path: Path,
    target: str,
    draft: str | None = None,
    *,
    with_model: bool = True,
    row: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
) -> Checkup:
    """Check a file of documents against its target, and a draft to be trained or adapted.

    `with_model` False leaves out what needs the target's weights. `row` is the id of the document to show; None shows
    the first. Raises `DraftkitError` for what cannot be read at all: files, models, a damaged line.
    """
    tokenizer = load_tokenizer(target)
    config = read_config(locate(target, weights=False).path)
    origin = read_origin(path)
    survey = data_checks.survey(read_samples(path), origin, tokenizer, config.get_text_config().vocab_size)
    shown = survey.first if row is None else _find(path, row)
    place = device_named(device)
    with ExitStack() as stack:
        opened = None if draft is None else stack.enter_context(open_draft(draft, target))
        fits = not survey.outside.count  # a model cannot read ids that it does not have
        model = load_model(target, device=place, dtype=dtype_named(dtype, place))[0] if with_model and fits else None
        evidence = Evidence(path, origin, survey, tokenizer, config, model, opened, draft or "")
        findings = [
            (check.name, finding)
            for check in CHECKS
            if (model is not None or not check.needs_model) and (opened is not None or not check.needs_draft)
            for finding in check.find(evidence)
        ]
    return Checkup(survey.documents, survey.tokens, survey.supervised, findings, pieces(shown, tokenizer))


def pieces(document: Sample, target: TargetTokenizer) -> list[tuple[str, bool]]:
    """A document as the target sees it: its text, special tokens included, in pieces that are supervised or not."""
    edges = [0, *(edge for span in document.spans for edge in span), len(document)]
    stretches = [document.tokens[begin:end].tolist() for begin, end in pairwise(edges)]
    texts = [target.tokenizer.decode(tokens, skip_special_tokens=False) for tokens in stretches]
    return [(text, bool(index % 2)) for index, text in enumerate(texts) if text]


def _find(path: Path, row: str) -> Sample:
    for document in read_samples(path):
        if document.id == row:
            return document
    raise SourceError(f"there is no document {row}", where=path, hint="leave --row out to see the first")
