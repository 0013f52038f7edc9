"""Prompt sets: the bundled one, or a JSONL file in the schemas that are in use."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from draftkit import zoo
from draftkit.errors import FormatError, SourceError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BUNDLED = "zoo"


@dataclass(frozen=True)
class Prompt:
    """One question: an id, a category for grouping, and the user's first turn."""

    id: str
    category: str
    text: str


def load_prompts(source: str, limit: int | None = None) -> list[Prompt]:
    """The bundled prompts (`zoo`) or those of a JSONL file, one object a line.

    A line has `turns` (MT-Bench, Spec-Bench; the first turn is used), `messages` (the first user message) or `prompt`;
    `question_id`/`id` and `category` are optional. With `limit`, that many prompts are taken evenly over the file, so
    that every category stays represented. Raises `SourceError`/`FormatError` naming file and line.
    """
    path = zoo.prompts_path() if source == BUNDLED else Path(source)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise SourceError(
            f"the prompts cannot be read: {error.strerror}", where=path, hint="--prompts zoo uses the bundled ones"
        ) from error
    except UnicodeDecodeError as error:
        raise FormatError("the prompts are not UTF-8 text", where=path) from error
    prompts = [_parse(line, path, number) for number, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise FormatError("the file holds no prompts", where=path)
    if limit is None or limit >= len(prompts):
        return prompts
    return [prompts[index * len(prompts) // limit] for index in range(limit)]


def encode_prompt(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The ids the target sees: the chat template applied once where there is one, else the plain text.

    A template writes the beginning-of-sequence token itself, so the rendered text is not tokenised a second time.
    """
    if tokenizer.chat_template is None:
        return tuple(tokenizer(prompt.text).input_ids)
    messages = [{"role": "user", "content": prompt.text}]
    return tuple(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def _parse(line: str, path: Path, number: int) -> Prompt:
    where = f"{path}, line {number}"
    try:
        row = json.loads(line)
    except ValueError as error:
        raise FormatError(f"not valid JSON: {error}", where=where) from error
    text = _first_turn(row) if isinstance(row, dict) else None
    if not isinstance(text, str) or not text:
        raise FormatError(
            "no prompt in this line", where=where, expected='an object with "turns", "messages" or "prompt"'
        )
    return Prompt(str(row.get("question_id", row.get("id", number))), str(row.get("category", "all")), text)


def _first_turn(row: dict[str, object]) -> object:
    turns, messages = row.get("turns"), row.get("messages")
    if isinstance(turns, list) and turns:
        return turns[0]
    if isinstance(messages, list):
        return next((m.get("content") for m in messages if isinstance(m, dict) and m.get("role") == "user"), None)
    return row.get("prompt")
