"""What became of the rows: how many were used, and why others were not, or only in part."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from draftkit.data.samples import Sample

EXAMPLES = 5  # rows named for each reason


class Reason(StrEnum):
    """Why a row is not used as it is."""

    REJECTED = "rejected by the template"
    REFUSED = "refused by the target"
    NO_SPAN = "no assistant span"
    TOO_SHORT = "too short"
    TRUNCATED = "truncated"
    REWRITTEN = "history rewritten"
    ALTERED = "answer changed by the template"
    UNPROMPTED = "generation prompt not repeated"
    NO_END = "no end of turn"
    LOOPS = "repeats itself"


CONSEQUENCES = {
    Reason.REJECTED: "left out: the chat template raises an error for it",
    Reason.REFUSED: "left out: it has no response",
    Reason.NO_SPAN: "left out: no assistant has written anything in it, or the template's generation tags mark nothing",
    Reason.TOO_SHORT: "left out: no token of the loss mask after the first is left",
    Reason.TRUNCATED: "cut at the length limit: the end of its last turn is lost",
    Reason.REWRITTEN: "split where a later prompt reads earlier turns differently: samples are what the target reads",
    Reason.ALTERED: "kept as rendered: the template drops or changes a part, as the thought; regenerated rows keep it",
    Reason.UNPROMPTED: "kept: what the target reads before its answer is not all in the rendered turn, as <think>",
    Reason.LOOPS: "left out: most of what it would teach is a repetition",
    Reason.NO_END: "kept, without a label that ends the turn",
}


@dataclass
class Tally:
    """How many rows have something in common, and the first of them: ids, with details where there are any."""

    count: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, row: str, detail: str = "") -> None:
        self.count += 1
        if len(self.examples) < EXAMPLES:
            self.examples.append(f"{row}: {detail}" if detail else row)


@dataclass
class Report:
    """Counts of one run. `tallies` holds the reasons that occurred."""

    rows: int = 0
    samples: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    tallies: dict[Reason, Tally] = field(default_factory=dict)

    def note(self, reason: Reason, row: str, detail: str = "") -> None:
        """Count a row under a reason; `detail` is shown beside its id."""
        self.tallies.setdefault(reason, Tally()).add(row, detail)

    def add(self, sample: Sample) -> None:
        """Count a sample that is used."""
        self.samples += 1
        self.tokens += len(sample)
        self.loss_tokens += sample.num_loss_tokens

    def to_dict(self) -> dict[str, object]:
        """The counts as JSON values; each reason with its count, first rows and what was done with them."""
        return {
            "rows": self.rows,
            "documents": self.samples,
            "tokens": self.tokens,
            "supervised_tokens": self.loss_tokens,
            "reasons": [
                {
                    "reason": str(reason),
                    "rows": tally.count,
                    "examples": tally.examples,
                    "consequence": CONSEQUENCES[reason],
                }
                for reason, tally in self.tallies.items()
            ],
        }
