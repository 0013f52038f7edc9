"""Training data without what a draft will be measured on: samples that hold an evaluation prompt, or nearly.

Two texts are compared by their runs of three words: a prompt counts as held where a sample has more than half of its
runs. A prompt of which every tenth word was replaced still counts nine times out of ten (`benchmarks/README.md`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from draftkit.data.categories import words_of

RUN = 3  # words
SHARE = 0.5  # of a prompt's runs, beyond which a text is near it


class NearPrompts:
    """Prompts to find in other texts: names, each with a text."""

    def __init__(self, prompts: Iterable[tuple[str, str]]):
        self._names: list[str] = []
        self._sizes: list[int] = []  # how many runs each has
        self._having: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
        for number, (name, text) in enumerate(prompts):
            runs = _runs(text)
            self._names.append(name)
            self._sizes.append(len(runs))
            for run in runs:
                self._having[run].append(number)

    def found_in(self, text: str) -> str | None:
        """The name of the prompt that most of is in a text; None where it is near none."""
        shared = Counter(number for run in _runs(text) for number in self._having.get(run, ()))
        share, nearest = max(
            ((count / self._sizes[number], -number) for number, count in shared.items()), default=(0, 0)
        )
        return self._names[-nearest] if share > SHARE else None


def _runs(text: str) -> set[tuple[str, ...]]:
    """The runs of `RUN` words of a text; of a shorter one all of its words, if there are any."""
    words = words_of(text)
    return {tuple(words[at : at + RUN]) for at in range(max(len(words) - RUN + 1, min(len(words), 1)))}
