"""What the preflight looks at, and what it says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from transformers import PretrainedConfig, PreTrainedModel

from draftkit.data.reasons import Tally
from draftkit.data.samples import Origin, Sample
from draftkit.data.tokenizer import TargetTokenizer
from draftkit.layout.folder import Draft

Severity = Literal["ok", "note", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """What one check has found, where, what it costs to ignore it, and what to do. Passed checks have `ok` alone."""

    severity: Severity
    what: str
    where: str = ""
    cost: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Survey:
    """Counts over a whole file, and its first document.

    `ended`: documents with an end-of-turn label; `longest`: tokens of the longest. Tallies of documents: `empty` has no
    label, `unended` has its last label within a turn, `cut` ends at the length limit, `doubled` begins with two
    beginning-of-sequence tokens, `looping` repeats itself in its labels, `outside` has ids beyond the vocabulary.
    `uses` int64 [V]: how often each id is a label.
    """

    first: Sample
    documents: int
    tokens: int
    supervised: int
    longest: int
    ended: int
    empty: Tally
    unended: Tally
    cut: Tally
    doubled: Tally
    looping: Tally
    outside: Tally
    uses: NDArray[np.int64]


@dataclass(frozen=True)
class Evidence:
    """What checks may look at. `model` is None where the weights are not loaded, `draft` where none was given.

    `draft_name` is what the user calls the draft, which may have been converted into a temporary folder.
    """

    path: Path
    origin: Origin
    survey: Survey
    target: TargetTokenizer
    config: PretrainedConfig
    model: PreTrainedModel | None = field(default=None, repr=False)
    draft: Draft | None = None
    draft_name: str = ""

    @property
    def vocab_size(self) -> int:
        return self.config.get_text_config().vocab_size

    def share(self, tally: Tally) -> str:
        """A tally as text: how many documents, which part of all, the first of them."""
        return f"{tally.count} of {self.survey.documents} documents ({tally.count / self.survey.documents:.0%})"

    def place(self, tally: Tally) -> str:
        """The file and the first documents of a tally."""
        return f"{self.path}, {', '.join(tally.examples)}"


Find = Callable[[Evidence], Iterable[Finding]]


@dataclass(frozen=True)
class Check:
    """One check: `find` yields what it found. It needs the target's weights, or a draft, where it says so."""

    name: str
    find: Find
    needs_model: bool = False
    needs_draft: bool = False
