"""Axes along which acceptance shifts: how long the context is, and which slice of the prompts it is.

Prompts are padded with real text, that of the other prompts of the set: random tokens are accepted otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, cycle, islice

from transformers import PreTrainedTokenizerBase

from draftkit.data.language import language_of
from draftkit.evaluate.prompts import Prompt
from draftkit.results.record import Cell, PromptRecord, Slice
from draftkit.results.statistics import bootstrap_length, contrast, known
from draftkit.targets.chat import token_ids


def paddings(texts: Sequence[str], tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """For each of the texts about so many tokens of the others, those after it first, over and over where they are
    short; of a single one, its own."""
    ids = [token_ids(tokenizer, f"{text}\n\n", special=False) for text in texts]
    others = ([*ids[number + 1 :], *ids[:number]] or ids for number in range(len(texts)))
    return [
        str(tokenizer.decode(list(islice(chain.from_iterable(cycle(around)), max(wanted, 0)))))
        for around, wanted in zip(others, tokens, strict=True)
    ]


def with_slices(cell: Cell, prompts: Sequence[Prompt], kinds: Sequence[str]) -> Cell:
    """The cell with what it measured of each slice of the prompts, against the rest; unchanged where nothing is asked,
    or requests were not counted one by one."""
    if not kinds or cell.by_prompt is None:
        return cell
    by_id = {prompt.id: prompt for prompt in prompts}
    labels = [_labels(record, _prompt_of(record, by_id), kinds) for record in cell.by_prompt]
    found = [_slice(name, cell.by_prompt, labels) for name in sorted({*chain.from_iterable(labels)})]
    return replace(cell, slices=tuple(found))


def _labels(record: PromptRecord, prompt: Prompt, kinds: Sequence[str]) -> list[str]:
    values = {
        "language": language_of(prompt.text),
        "thinking": None if record.thinks is None else _yes(record.thinks),
        "tools": _yes(prompt.tools),
        "category": prompt.category,
    }
    return [f"{kind}={values[kind]}" for kind in kinds if values[kind] is not None]


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _prompt_of(record: PromptRecord, by_id: Mapping[str, Prompt]) -> Prompt:
    """The prompt whose first or later turn it was."""
    return by_id[record.id] if record.id in by_id else by_id[record.id.rpartition("/")[0]]


def _slice(name: str, records: Sequence[PromptRecord], labels: Sequence[Sequence[str]]) -> Slice:
    inside, outside = (
        [(r.accepted, r.rounds) for r, own in zip(records, labels, strict=True) if (name in own) is within and r.rounds]
        for within in (True, False)
    )
    shift = contrast(inside, outside) if inside and outside else None
    return Slice(name, len(inside), known(bootstrap_length(inside)), shift)
