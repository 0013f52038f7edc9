"""What checks look at: one record for each subject, and all of them together as `Evidence`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftkit.finding import Finding
from draftkit.layout.facts import facts_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from draftkit.convert.formats.mtp.heads import TargetHeads
    from draftkit.data.rows import LeftOutRows
    from draftkit.data.samples import Sample, SamplesOrigin, Tally
    from draftkit.data.tokenizer import TargetTokenizer
    from draftkit.io.handles import TensorHandle
    from draftkit.layout.architecture import Architecture
    from draftkit.layout.folder import Draft
    from draftkit.layout.provenance import FactOrigin
    from draftkit.layout.spec import DraftSpec
    from draftkit.layout.target import TargetFacts
    from draftkit.results.cell import Cell
    from draftkit.results.settings import Settings

FAR = 2  # times the longest sample of its training: so long are texts of which a draft has not seen the like
SMALL_SHARE = 0.05  # the share of samples up to which their loss is not worth a warning


@dataclass(frozen=True)
class Stored:
    """All tensors of the target's checkpoint, to be read where they matter."""

    tensors: Mapping[str, TensorHandle]


@dataclass(frozen=True)
class DataSurvey:
    """Counts over a whole file, and its first sample.

    `ended`: samples with an end-of-turn label; `longest`: tokens of the longest. Tallies of samples: `empty` has no
    label, `unended` has its last label within a turn, `cut` ends at the length limit, `doubled` begins with two
    beginning-of-sequence tokens, `looping` repeats itself in its labels, `outside` has ids beyond the vocabulary,
    `media` holds an image, audio or video as text, `unseen` has images that are not read as they were prepared.
    `pictured`: samples with images; `images`: of all of these.
    `uses` int64 [V]: how often each id is a label.
    """

    first: Sample
    samples: int
    tokens: int
    loss_tokens: int
    longest: int
    ended: int
    empty: Tally
    unended: Tally
    cut: Tally
    doubled: Tally
    looping: Tally
    outside: Tally
    media: Tally
    unseen: Tally
    pictured: int
    images: int
    uses: NDArray[np.int64]


@dataclass(frozen=True)
class Data:
    """A file of samples that a draft of `target` is to be trained on."""

    path: Path
    origin: SamplesOrigin
    survey: DataSurvey
    target: TargetTokenizer

    @property
    def vocab_size(self) -> int:
        """The number of the target's tokens."""
        return len(self.survey.uses)

    def share(self, tally: Tally) -> str:
        """A tally as text: how many samples, and which part of all."""
        return f"{tally.count} of {self.survey.samples} samples ({tally.count / self.survey.samples:.0%})"

    def is_large(self, tally: Tally) -> bool:
        """Whether a tally has so many samples that losing them is worth a warning."""
        return tally.count > SMALL_SHARE * self.survey.samples

    def place(self, tally: Tally) -> str:
        """The file and the first samples of a tally."""
        return f"{self.path}, {', '.join(tally.examples)}"


@dataclass(frozen=True)
class Asked:
    """The prompts of a measurement as the target sees them.

    `first_ids`: the tokens of the first one, `bos` the token that begins a sequence. `turns`: how many each has.
    `masked`: the rows of `source` that hold a placeholder. `left_out`: those with parts that are not used.
    """

    source: str
    turns: Sequence[int]
    masked: int
    first_ids: Sequence[int]
    bos: int | None
    left_out: LeftOutRows | None = None


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Everything that checks may look at; a field is None where it is not known.

    Of a checkpoint: `contradictions` that its reading met, its `format` and `config`, and what it is in the layout –
    `spec`, the `origins` of its facts by name, `tensors`; `draft` where it is a folder of the layout, `draft_name` what
    the user calls it. `target`: what the target's config says, `target_config` as transformers reads it, `tokenizer`
    its tokenizer, `model` its weights, `refusal` why draftkit's own runtime does not run them, `heads` the multi-token
    prediction heads of its checkpoint, `stored` what there is to be read of it. `data`: what is to be trained on. Of a
    measurement: `asked` are its prompts, `cell` is one cell of its result.
    """

    contradictions: Sequence[Finding] | None = None
    format: str | None = None
    config: Mapping[str, object] | None = None
    spec: DraftSpec | None = None
    origins: Mapping[str, FactOrigin] | None = None
    tensors: Mapping[str, TensorHandle] | None = None
    draft: Draft | None = None
    draft_name: str = ""
    target: TargetFacts | None = None
    target_config: PretrainedConfig | None = field(default=None, repr=False)
    tokenizer: PreTrainedTokenizerBase | None = field(default=None, repr=False)
    model: PreTrainedModel | None = field(default=None, repr=False)
    refusal: str | None = None
    heads: TargetHeads | None = None
    stored: Stored | None = None
    data: Data | None = None
    asked: Asked | None = None
    settings: Settings | None = None
    cell: Cell | None = field(default=None, repr=False)

    @classmethod
    def of_draft(cls, draft: Draft, **others: Any) -> Evidence:
        """A draft of the layout, whose `config` is what has no place in it, and whatever else is known."""
        provenance = draft.provenance
        return cls(
            format=provenance.format,
            config=provenance.dropped_config,
            spec=draft.spec,
            origins={fact.name: fact for fact in provenance.facts},
            tensors=draft.tensors,
            draft=draft,
            **others,
        )

    @property
    def architecture(self) -> Architecture | None:
        return None if self.spec is None else self.spec.architecture

    @property
    def facts(self) -> Mapping[str, object] | None:
        """Every fact of the draft by name, as `--set` names it."""
        return None if self.spec is None else facts_of(self.spec.architecture)
