"""The usual mistakes of measuring speculative decoding, told from what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from draftkit.evaluate.datasets import PromptSet
from draftkit.results.settings import Settings
from draftkit.results.statistics import is_looping

CONSISTENT = 0.25  # how far the gap between chunks may be from acceptance length × time per token
SAME_WORK = 0.02  # how far the outputs with and without a draft may differ in length at temperature 0
COLD = 5  # times the median that a slowest first token may take


@dataclass(frozen=True)
class Warned:
    """A reason to doubt a number."""

    name: str
    message: str

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


def mistakes_of_prompts(
    prompts: PromptSet, first_ids: Sequence[int], bos: int | None, settings: Settings
) -> Iterator[Warned]:
    """What is doubtful about the prompts as the target sees them."""
    if bos is not None and list(first_ids[:2]) == [bos, bos]:
        yield Warned(
            "double-bos",
            f"the prompts begin with two beginning-of-sequence tokens ({', '.join(map(str, first_ids[:4]))} …): the "
            "template writes one and the tokenizer another",
        )
    several = sum(len(prompt.turns) > 1 for prompt in prompts.prompts)
    if several and settings.turns == "first":
        yield Warned(
            "first-turn-only",
            f"{several} of {len(prompts.prompts)} prompts have further turns, which were not asked (--turns all)",
        )
    if prompts.masked:
        yield Warned(
            "masked-prompts",
            f"{prompts.masked} rows of {prompts.source} hold a placeholder instead of a prompt and were left out: not "
            "comparable with figures for the whole set; pass the file that the publisher's script prepares",
        )


def name_of(cell: Mapping[str, Any]) -> str:
    """A cell, as warnings call it."""
    return f"{cell['draft']}, K={cell['num_speculative_tokens']}, concurrency {cell['concurrency']}"


def mistakes_of_cell(cell: Mapping[str, Any], settings: Settings) -> Iterator[Warned]:
    """What is doubtful about a cell of the result."""
    name = name_of(cell)
    if is_looping(cell["repetition"]):
        forced = "; --ignore-eos makes outputs run on after their end" if settings.ignore_eos else ""
        yield Warned(
            "loops",
            f"at T={cell['temperature']:g} {100 * cell['repetition']:.0f} % of the output repeats itself, which is "
            f"easy to draft: acceptance lengths are higher than those of real text{forced}",
        )
    if beyond := cell.get("num_drafts_beyond"):
        yield Warned(
            "beyond-positions",
            f"{name}: in {beyond} of {cell['num_drafts']} rounds a sequence was too long for the draft; vLLM drafts "
            "nothing there and counts the round, and so did this measurement",
        )
    itl, tpot = cell["itl_ms"], cell["tpot_ms"]
    emitted = cell["acceptance_length_by_convention"].get("eagle")
    if itl and tpot and emitted and cell["concurrency"] == 1:
        ratio = itl["mean"] / tpot["mean"]
        if abs(ratio / emitted - 1) > CONSISTENT:
            yield Warned(
                "latency-disagrees",
                f"{name}: chunks are {ratio:.2f} times as far apart as tokens, and rounds emit {emitted:.2f}: times "
                "were disturbed, or most answers are too short to tell",
            )
    ttft = cell["ttft_quantiles_ms"]
    if ttft and cell["num_prompts"] >= 8 and ttft[100] > COLD * max(ttft[90], 1e-9):
        yield Warned(
            "no-warm-up",
            f"{name}: one first token took {ttft[100]:.0f} ms, nine of ten at most {ttft[90]:.0f}: something was still "
            "warming up",
        )
    baseline = cell["baseline_output_tokens"]
    if (
        cell["temperature"] == 0
        and baseline is not None
        and abs(cell["output_tokens"] / max(baseline, 1) - 1) > SAME_WORK
    ):
        yield Warned(
            "unequal-baseline",
            f"{name}: {cell['output_tokens']} tokens with the draft and {baseline} without one: the speed-up compares "
            "different texts",
        )
