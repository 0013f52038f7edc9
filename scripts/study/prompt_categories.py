"""Which of Spec-Bench's categories the prompts that a target has written are of, counted by kind.

`python -m scripts.study.prompt_categories FOLDER` of `scripts/smollm2.py`'s `prompts`. A prompt counts once, for the
first category whose words are in it; this tells what is there, not how well it is asked.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from pathlib import Path

from draftkit.data.rows import Conversation, read_rows
from draftkit.media import text_of

CATEGORIES = {
    "translation": r"\btranslat",
    "summarization": r"\bsummar|(main|key) points",
    "roleplay": r"^(pretend|imagine|act as)|\brole.?play|\bas an? (doctor|lawyer|teacher|pirate|king|detective)\b",
    "extraction": r"\blist the names|\bextract|\bidentify (the|all)|\bscore from 1 to 5",
    "rag": r"\bpassage\b|\b(read|following|given) (this |the )?(text|article|paragraph|document)|\baccording to\b",
    "coding": r"python|\bcode\b|\bfunctions?\b|\bprogram|\bsql\b|javascript|c\+\+|\bc#|\bhtml\b|algorithm|\bapi\b",
    "math_reasoning": r"\bhow (many|much|long|far|old)\b.*\d|\d.*\bhow (many|much|long|far|old)\b",
    "math": r"\bmath|equation|\bsolve\b|calculat|probabilit|\bsum of\b|integers?\b|triangle|\bpercent|fraction",
    "reasoning": r"\briddle|\bpuzzle|\blogic|\bpremise|^if\b|\bwhy\b",
    "writing": r"\b(re)?writ(e|ing)\b|\bessay|\bblog|\bemail|\bletter|\bstory|\bpoem|\bspeech|\bparagraph|\bsentence",
    "stem": r"\bscien|physic|chemi|biolog|\bcells?\b|\benergy|\bquantum|engineer|\bmedic|\brobot|climate|\bdata\b",
    "humanities": r"\bhistor|\bcultur|philosoph|econom|\bpolitic|\bwar\b|\bart\b|\blaws?\b|religio|societ|ethic",
    "qa": r"^(who|when|where|what|which|whose)\b",
}
REST = "none of these"


def category(prompt: str) -> str:
    """The first category whose words a prompt has."""
    text = prompt.casefold()
    return next((name for name, words in CATEGORIES.items() if re.search(words, text, re.DOTALL)), REST)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    counts: dict[str, Counter[str]] = {}
    for file in sorted(parser.parse_args().folder.glob("*.jsonl")):
        kind = counts.setdefault(file.stem.rpartition("-")[0], Counter())
        for row in read_rows(str(file)):
            assert isinstance(row.content, Conversation)
            kind[category(text_of(row.content.messages[-1]["content"]))] += 1
    print("| category | " + " | ".join(counts) + " | all |\n" + "|---" * (len(counts) + 2) + "|")
    for name in (*CATEGORIES, REST):
        found = [kind[name] for kind in counts.values()]
        print(f"| {name} | " + " | ".join(map(str, [*found, sum(found)])) + " |")


if __name__ == "__main__":
    main()
