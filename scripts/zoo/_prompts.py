"""The bundled prompts: 8 categories of 10 questions about held-out sources, in MT-Bench's schema."""

from __future__ import annotations

import json
from pathlib import Path

from scripts.zoo import _corpus as zoo_corpus

PER_CATEGORY = 10
MAX_QUESTION = 700  # characters


def write_prompts(out: Path) -> None:
    """Write one JSON object a line: `question_id`, `category`, `turns`."""
    lines = []
    for category in zoo_corpus.CATEGORIES:
        found = [
            e for e in zoo_corpus.held_out_examples() if e.category == category and len(e.question) <= MAX_QUESTION
        ]
        found = list({e.question: e for e in found}.values())
        spaced = [found[index * len(found) // PER_CATEGORY] for index in range(PER_CATEGORY)]
        lines += [{"category": category, "turns": [example.question]} for example in spaced]
    with out.open("w", encoding="utf-8") as file:
        for number, line in enumerate(lines, start=1):
            file.write(json.dumps({"question_id": number, **line}, ensure_ascii=False) + "\n")
