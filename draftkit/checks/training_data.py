"""Checks of the data alone, and the preflight: what can be known to be wrong before the first step of training.

The checks ask whether the tokens fit the target, and whether the mask marks what it should. `check_data` runs them, and
those of target and draft (`training_models`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from draftkit.checks.evidence import Data, DataSurvey, Evidence
from draftkit.checks.registry import check, run_checks
from draftkit.data.sample_files import media_folder, open_images, read_origin, read_samples
from draftkit.data.samples import Sample, SamplesOrigin, Tally
from draftkit.data.states.online import load_training_target
from draftkit.data.tokenizer import TargetTokenizer, load_tokenizer
from draftkit.errors import FormatError, SourceError, UnsupportedTarget, command
from draftkit.finding import Finding
from draftkit.loading import OpenedTarget, open_draft, open_target
from draftkit.media import MediaFolder, RefusedMedia
from draftkit.results.statistics import is_looping, repetition
from draftkit.targets.devices import device_named, dtype_named
from draftkit.targets.vision import Placeholders

# An image that was written into a text: its bytes, or Python's and JSON's words for a part of a message.
IMAGE_AS_TEXT = re.compile(
    r"""data:(image|audio|video)/[\w.+-]+;base64,|\{['"]type['"]: ?['"](input_)?(image|audio|video)"""
)


def survey(
    samples: Iterable[Sample],
    origin: SamplesOrigin,
    target: TargetTokenizer,
    vocab_size: int,
    pictures: Pictures | None = None,
) -> DataSurvey:
    """Count over all samples; `pictures` looks at their images. Raises `FormatError` when there are none."""
    end_ids = np.array(sorted(target.end_ids), dtype=np.int32)
    bos = target.tokenizer.bos_token_id
    empty, unended, cut, doubled, looping, outside, media, unseen = (Tally() for _ in range(8))
    uses = np.zeros(vocab_size, dtype=np.int64)
    count = tokens = loss_tokens = longest = ended = pictured = images = 0
    first = None
    for sample in samples:
        first = first if first is not None else sample
        labels = sample.tokens[sample.loss_mask]
        ends = np.isin(labels, end_ids)
        count += 1
        tokens += len(sample)
        loss_tokens += len(labels)
        longest = max(longest, len(sample))
        ended += bool(ends.any())
        np.add.at(uses, labels[labels < vocab_size], 1)
        if not len(labels):
            empty.add(sample.id)
        elif not ends[-1]:
            unended.add(sample.id)
        if len(sample) == origin.max_length and not (len(labels) and sample.loss_mask[-1] and ends[-1]):
            cut.add(sample.id)
        if is_looping(repetition(labels.tolist())):
            looping.add(sample.id)
        if bos is not None and sample.tokens[:2].tolist() == [bos, bos]:
            doubled.add(sample.id)
        if (sample.tokens >= vocab_size).any():
            outside.add(sample.id, f"token {int(sample.tokens.max())}")
        elif IMAGE_AS_TEXT.search(target.tokenizer.decode(sample.tokens.tolist())):
            media.add(sample.id)
        if sample.images:
            pictured, images = pictured + 1, images + len(sample.images)
            if pictures is not None and (problem := pictures.problem(sample)):
                unseen.add(sample.id, problem)
    if first is None:
        raise FormatError("there are no samples", where=target.name, hint="prepare the data again")
    return DataSurvey(
        first=first,
        samples=count,
        tokens=tokens,
        loss_tokens=loss_tokens,
        longest=longest,
        ended=ended,
        empty=empty,
        unended=unended,
        cut=cut,
        doubled=doubled,
        looping=looping,
        outside=outside,
        media=media,
        unseen=unseen,
        pictured=pictured,
        images=images,
        uses=uses,
    )


READ_SAMPLES = 20  # of those with images, whose tokens are counted by the target's processor again


@dataclass
class Pictures:
    """Looks at the images of samples, whose files lie in `folder`, with the target's processor where it has one."""

    target: OpenedTarget
    folder: MediaFolder
    read: int = 0

    def problem(self, sample: Sample) -> str:
        """Why a sample's images are not those that it was prepared with; empty where they are."""
        if not self.target.reads_images:
            return "the target reads text alone"
        try:
            images = open_images(sample, self.folder)
            self.read += 1
            if self.read > READ_SAMPLES:
                return ""
            vision = self.target.vision
            same = vision.spans(sample.tokens.tolist(), vision.read(images)) == sample.media
            return "" if same else OTHER_TOKENS
        except RefusedMedia as error:
            return str(error).partition("\n")[0].removeprefix(f"sample {sample.id}: ")
        except Placeholders:
            return OTHER_TOKENS


OTHER_TOKENS = "other tokens stand for its images than the target's processor makes"


@check
def tokenizer(data: Data) -> Iterator[Finding]:
    """The file's ids are those of the target's tokenizer."""
    if data.survey.outside.count:
        yield Finding(
            "tokenizer",
            "error",
            f"{data.share(data.survey.outside)} hold ids beyond the target's {data.vocab_size} tokens",
            data.place(data.survey.outside),
            "the first step fails, or reads another token's embedding",
            "prepare the data with this target",
        )
    if data.origin.tokenizer_sha256 != data.target.sha256:
        yield Finding(
            "tokenizer",
            "error",
            f"the data were prepared with the tokenizer of {data.origin.target}, which is another one",
            f"{data.path}, line 1",
            "the ids mean other text to this target: nothing that the draft learns is accepted",
            command("draftkit", "data", "prepare", "SOURCE", "OUT", "--target", data.target.name),
        )
    elif not data.survey.outside.count:
        yield Finding("tokenizer", "ok", f"the tokenizer is the target's; all ids are below {data.vocab_size}")


@check
def chat_template(data: Data) -> Iterator[Finding]:
    """The conversations were rendered with the target's chat template as it is now."""
    if data.origin.template_sha256 == data.target.template_sha256:
        yield Finding("chat-template", "ok", "the chat template is the target's")
    else:
        yield Finding(
            "chat-template",
            "warning",
            "the data were rendered with another chat template than the target has now",
            f"{data.path}, line 1",
            "served prompts look different from those in training: acceptance falls where the two differ",
            "prepare the data again, or serve with the template that they were made with",
        )


@check
def mask(data: Data) -> Iterator[Finding]:
    """Every sample has something to learn."""
    survey = data.survey
    if survey.empty.count:
        yield Finding(
            "mask",
            "error" if survey.empty.count == survey.samples else "warning",
            f"{data.share(survey.empty)} have no token in the loss mask",
            data.place(survey.empty),
            "they take time and give no gradient; where all are empty, loss and accuracy stay at zero",
            "prepare the data with `draftkit data prepare`, which leaves them out",
        )
    else:
        yield Finding(
            "mask",
            "ok",
            f"{survey.loss_tokens:,} of {survey.tokens:,} tokens are in the loss mask, some of every sample",
        )


@check
def end_of_turn(data: Data) -> Iterator[Finding]:
    """End-of-turn tokens are labels."""
    survey = data.survey
    ends = ", ".join(map(str, sorted(data.target.end_ids)))
    if not survey.ended:
        yield Finding(
            "end-of-turn",
            "error",
            f"no end-of-turn token ({ends}) is a label",
            str(data.path),
            "the draft never proposes the end of an answer: the last round of every response is wasted on tokens after "
            "it, and short answers lose most",
            "use a template that renders the end of a turn, or rows that `draftkit data regenerate` has made with a "
            "--max-new-tokens within which answers end",
        )
    elif data.is_large(survey.unended):
        yield Finding(
            "end-of-turn",
            "warning",
            f"{data.share(survey.unended)} do not end with an end-of-turn label",
            data.place(survey.unended),
            "the draft proposes the end of answers too rarely",
            "raise --max-length or --max-new-tokens, with which they were cut",
        )
    else:
        yield Finding("end-of-turn", "ok", f"{survey.ended} of {survey.samples} samples have an end-of-turn label")


@check
def truncation(data: Data) -> Iterator[Finding]:
    """Few samples are cut at the length limit."""
    survey, limit = data.survey, data.origin.max_length
    if data.is_large(survey.cut):
        yield Finding(
            "truncation",
            "warning",
            f"{data.share(survey.cut)} are cut at {limit} tokens",
            data.place(survey.cut),
            f"the draft is not trained beyond position {limit}: acceptance falls on longer conversations",
            "prepare again with a larger --max-length",
        )
    else:
        yield Finding("truncation", "ok", f"{data.share(survey.cut)} are cut; the longest has {survey.longest} tokens")


@check
def beginning(data: Data) -> Iterator[Finding]:
    """No sample begins with the beginning-of-sequence token twice."""
    doubled = data.survey.doubled
    if doubled.count:
        yield Finding(
            "beginning",
            "error",
            f"{data.share(doubled)} begin with the beginning-of-sequence token twice",
            data.place(doubled),
            "the target reads a beginning that serving never shows it: its hidden states are other ones from there on",
            "the row's text holds the token too, or the template was rendered to text and tokenized again: remove one",
        )
    else:
        yield Finding("beginning", "ok", "no sample begins with two beginning-of-sequence tokens")


@check
def loops(data: Data) -> Iterator[Finding]:
    """Few answers repeat themselves."""
    survey = data.survey
    if data.is_large(survey.looping):
        yield Finding(
            "loops",
            "warning",
            f"{data.share(survey.looping)} repeat themselves in most tokens of the loss mask",
            data.place(survey.looping),
            "the draft learns loops, which are easy to draft, and its acceptance length is measured on them",
            "regenerate them at the temperature that will be served, with fewer --max-new-tokens, or leave them "
            "out: draftkit data prepare SOURCE OUT --drop-loops",
        )
    else:
        yield Finding("loops", "ok", f"{data.share(survey.looping)} repeat themselves")


@check
def media(data: Data) -> Iterator[Finding]:
    """No sample holds an image as text."""
    found = data.survey.media
    if found.count:
        yield Finding(
            "media",
            "error",
            f"{data.share(found)} hold images, audio or video as text",
            data.place(found),
            "the target was never shown such text, and what it answers is not what it answers to the image",
            "prepare the data again, from rows that name their images in parts",
        )
    else:
        yield Finding("media", "ok", "no sample holds an image, audio or video as text")


@check
def images(data: Data) -> Iterator[Finding]:
    """The images of samples are there, and the target reads them as the tokens that stand for them."""
    survey = data.survey
    if survey.unseen.count:
        yield Finding(
            "images",
            "error",
            f"{data.share(survey.unseen)} have images that the target does not read as they were prepared",
            data.place(survey.unseen),
            "their hidden states cannot be computed, or are those of other images",
            "put the images back where they were, name their folder with --media-root, or prepare the data again",
        )
    elif survey.pictured:
        yield Finding("images", "ok", f"{survey.images:,} images of {survey.pictured:,} samples are there, unchanged")


@dataclass(frozen=True)
class Checkup:
    """The findings of each check, and one sample as text, in pieces that are inside the loss mask or outside."""

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
    media_root: Path | None = None,
) -> Checkup:
    """Check a file of samples against its target, and a draft to be trained or adapted. `media_root`: where the images
    lie, where that is not where they were when the data were prepared.

    `with_model` False leaves out what needs the target's weights, which run in transformers where draftkit's own
    runtime does not run them. `row` is the id of the sample to show; None shows the first. Raises `DraftkitError` for
    what cannot be read at all: files, models, a damaged line.
    """
    target = open_target(target)
    tokenizer, config = load_tokenizer(target), target.language_model
    origin = read_origin(path)
    pictures = Pictures(target, media_folder(path, media_root))
    counted = survey(read_samples(path), origin, tokenizer, config.vocab_size, pictures)
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
    """The evidence with the target's model added, where draftkit or transformers runs it."""
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
    shown = np.ones(len(sample), dtype=np.bool_)
    for image in sample.media:  # of an image, one token
        shown[image.start + 1 : image.start + image.length] = False
    stretches = [sample.tokens[begin:end][shown[begin:end]].tolist() for begin, end in pairwise(edges)]
    texts = [target.tokenizer.decode(tokens, skip_special_tokens=False) for tokens in stretches]
    return [(text, bool(index % 2)) for index, text in enumerate(texts) if text]


def _find(path: Path, row: str) -> Sample:
    for sample in read_samples(path):
        if sample.id == row:
            return sample
    raise SourceError(f"there is no sample {row}", where=path, hint="leave --row out to see the first")
