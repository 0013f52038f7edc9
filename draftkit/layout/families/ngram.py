"""n-gram lookup: what followed the same tokens earlier in the text is proposed again. It has no checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from draftkit.errors import DraftkitError
from draftkit.io.settings import setting
from draftkit.layout.architecture import Architecture
from draftkit.layout.schema import TensorSchema

USUAL = (2, 4)  # tokens looked up, where the user does not say


@dataclass(frozen=True, kw_only=True)
class NgramSpec(Architecture):
    """Looks up the text's last tokens, the most that occurred before."""

    SERVED_AS: ClassVar = {"vllm": {"ngram": "ngram"}}
    has_checkpoint: ClassVar = False
    whole_head: ClassVar = "n-gram lookup has no head"

    min_n: int = setting("The fewest last tokens of the text that are looked up.", unit="tokens")
    max_n: int = setting("The most last tokens of the text that are looked up.", unit="tokens")

    def __post_init__(self) -> None:
        if not 1 <= self.min_n <= self.max_n:
            raise DraftkitError(f"n-grams of {self.min_n} to {self.max_n} tokens", expected="1 ≤ min_n ≤ max_n")

    @classmethod
    def named(cls, source: str) -> Self | None:
        if source.partition(":")[0] != "ngram":
            return None
        sizes = re.fullmatch(r"ngram(?::(\d+)-(\d+))?", source)
        if sizes is None:
            raise DraftkitError(f"draft {source}", expected="ngram, or ngram:MIN-MAX, as ngram:2-4")
        least, most = (int(sizes[1]), int(sizes[2])) if sizes[1] else USUAL
        return cls(min_n=least, max_n=most)

    @property
    def method(self) -> str:
        return "ngram"

    @property
    def title(self) -> str:
        return "n-gram lookup: what followed the same tokens earlier in the text"

    @property
    def states_read(self) -> int:
        return 0

    @property
    def engine_settings(self) -> Mapping[str, Mapping[str, object]]:
        return {"vllm": {"prompt_lookup_min": self.min_n, "prompt_lookup_max": self.max_n}}

    def tensors(self) -> dict[str, TensorSchema]:
        return {}

    def engine_config(self) -> dict[str, object]:
        return {}
