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
from draftkit.models.chat import token_ids
from draftkit.results.record import Cell, PromptRecord, Slice
from draftkit.results.statistics import bootstrap_length, contrast, known


def padding(prompts: Sequence[Prompt], number: int, tokens: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """About so many tokens of the texts of the other prompts, those after `number` first, over and over where the set
    is short; of a set of one, its own."""
    if tokens <= 0:
        return ""
    others = [*prompts[number + 1 :], *prompts[:number]] or [prompts[number]]
    texts = (token_ids(tokenizer, f"{prompt.text}\n\n", special=False) for prompt in cycle(others))
    return str(tokenizer.decode(list(islice(chain.from_iterable(texts), tokens))))


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
