"""Suffix decoding: of all that followed the text's end earlier in it, the most frequent. It has no checkpoint.

arXiv 2411.04975; its structure for one request alone, not the one over the answers to earlier requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from draftkit.errors import DraftkitError
from draftkit.io.settings import setting
from draftkit.layout.architecture import Architecture
from draftkit.layout.schema import TensorSchema


@dataclass(frozen=True, kw_only=True)
class SuffixSpec(Architecture):
    """Drafts what most often followed the longest match of the text's end."""

    SERVED_AS: ClassVar = {"vllm": {"suffix": "suffix"}}
    has_checkpoint: ClassVar = False
    whole_head: ClassVar = "suffix decoding has no head"

    max_depth: int = setting("The longest path, the match and its draft together.", unit="tokens")
    max_spec_factor: float = setting("A match of m tokens drafts up to m times as many.")
    min_token_prob: float = setting("The least frequency of a draft token after the match.")

    @classmethod
    def named(cls, source: str) -> Self | None:
        if source.partition(":")[0] != "suffix":
            return None
        if source != "suffix":
            raise DraftkitError(f"draft {source}", expected="suffix, which has no settings")
        return cls(max_depth=24, max_spec_factor=1.0, min_token_prob=0.1)  # as vLLM 0.32 has them

    @property
    def method(self) -> str:
        return "suffix"

    @property
    def title(self) -> str:
        return "suffix decoding: what most often followed the text's end earlier in it"

    @property
    def states_read(self) -> int:
        return 0

    @property
    def engine_settings(self) -> Mapping[str, Mapping[str, object]]:
        """vLLM's settings, with which it keeps no answers to earlier requests."""
        return {
            "vllm": {
                "suffix_decoding_max_tree_depth": self.max_depth,
                "suffix_decoding_max_cached_requests": 0,
                "suffix_decoding_max_spec_factor": self.max_spec_factor,
                "suffix_decoding_min_token_prob": self.min_token_prob,
            }
        }

    def tensors(self) -> dict[str, TensorSchema]:
        return {}

    def engine_config(self) -> dict[str, object]:
        return {}
