"""What a request asks: its prompt, how its tokens are drawn, what ends it. All engines are asked in these terms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, get_args

from draftkit.errors import require_count, require_setting
from draftkit.io.settings import setting
from draftkit.media import ShownImages

if TYPE_CHECKING:
    from torch import Tensor

MIN_TEMPERATURE = 1e-5
EVERY_TOKEN = 2**31 - 1  # a top-k that no vocabulary reaches

DraftSamplingMode = Literal["auto", "greedy", "probabilistic"]
Like = Literal["vllm-v1", "vllm-v2"]  # the model runner of vLLM whose rule holds beyond a draft's positions
Verification = Literal["rejection", "block", "coupled"]
Turns = Literal["first", "all", "recorded"]  # of a prompt with several


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """How the tokens of one request are drawn, in this order: temperature, min-p, top-k, top-p (as in vLLM).

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 keep everything; tokens that tie at a cut all stay.
    `seed` < 2⁶⁴ alone decides the request's random numbers. Raises `SettingError` for values outside their range.
    """

    temperature: float = setting("How random the output is; 0 decodes greedily.", 0.0)
    top_k: int = setting("Draw from this many tokens; 0 from all.", 0, unit="tokens", needs="a temperature above 0")
    top_p: float = setting("Draw from the smallest set with this probability.", 1.0, needs="a temperature above 0")
    min_p: float = setting(
        "Draw from tokens with this share of the best one's probability.", 0.0, needs="a temperature above 0"
    )
    seed: int = setting("The seed of the first request; the others count on.", 0)

    def __post_init__(self) -> None:
        hot = MIN_TEMPERATURE <= self.temperature < math.inf
        usable = self.temperature == 0 or hot
        require_setting(usable, "temperature", self.temperature, f"0, or at least {MIN_TEMPERATURE}")
        in_range = 0 <= self.top_k < EVERY_TOKEN
        require_setting(in_range, "top_k", self.top_k, "0 to keep all tokens, or a number of tokens")
        require_setting(0 < self.top_p <= 1, "top_p", self.top_p, "above 0, at most 1")
        require_setting(0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 and 1")
        require_setting(0 <= self.seed < 2**64, "seed", self.seed, "a whole number from 0 to 2**64 - 1")

    @property
    def truncates(self) -> bool:
        """Whether some cut can forbid tokens; at temperature 0 there is nothing left to cut."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    def numbered(self, number: int) -> SamplingParameters:
        """These parameters for the request of that number in a run: each has a seed of its own."""
        return replace(self, seed=(self.seed + number) % 2**64)


@dataclass(frozen=True, slots=True)
class DraftSampling:
    """How drafts are drawn.

    `mode` auto drafts greedily for requests below the temperature `greedy_below`: there the draft's top token is
    accepted more often than a sampled one. `temperature` replaces the request's own where a draft is sampled; any
    value is lossless. Cuts of the request hold for its drafts too. A round's drafts end before the first whose chance
    of acceptance, as the draft estimates it, is below `min_confidence`; 0 keeps all. Raises `SettingError` for values
    outside their range.
    """

    mode: DraftSamplingMode = setting("How drafts are drawn; all are lossless.", "auto", name="draft_sampling")
    greedy_below: float = setting(
        "Requests below this temperature have greedy drafts.",
        0.75,
        name="draft_greedy_below",
        needs="draft_sampling auto",
    )
    temperature: float | None = setting(
        "The temperature of sampled drafts, instead of the request's.", None, name="draft_temperature"
    )
    min_confidence: float = setting(
        "Drafts end before the first whose chance of acceptance, as the draft estimates it, is below this; several as "
        "0,0.3,0.5.",
        0.0,
        name="draft_confidence",
    )

    def __post_init__(self) -> None:
        modes = get_args(DraftSamplingMode)
        require_setting(self.mode in modes, "draft_sampling", self.mode, ", ".join(modes))
        require_setting(0 <= self.min_confidence < 1, "draft_confidence", self.min_confidence, "from 0 to below 1")
        warm = 0 <= self.greedy_below < math.inf
        require_setting(warm, "draft_greedy_below", self.greedy_below, "a temperature, 0 or above")
        if self.temperature is not None:
            hot = MIN_TEMPERATURE <= self.temperature < math.inf
            require_setting(hot, "draft_temperature", self.temperature, f"at least {MIN_TEMPERATURE}")

    def parameters(self, request: SamplingParameters) -> SamplingParameters:
        """What the draft of a request is drawn with; temperature 0 means a greedy, one-hot draft."""
        if self.mode == "greedy" or (self.mode == "auto" and request.temperature < self.greedy_below):
            return replace(request, temperature=0.0)
        return request if self.temperature is None else replace(request, temperature=self.temperature)


def check_schedule(k_by_batch: Mapping[int, int], k: int) -> None:
    """Raise `SettingError` for a table, largest batch → K, that is empty, or has more drafts than `k`."""
    for batch in k_by_batch:
        require_count("k_by_batch", batch, least=0)
    fine = bool(k_by_batch) and all(0 <= drafts <= k for drafts in k_by_batch.values())
    require_setting(fine, "k_by_batch", dict(k_by_batch), f"largest batch: K, each K from 0 to {k}")


@dataclass(frozen=True)
class Request:
    """A prompt as token ids, how many tokens to generate at most, how to draw them, and what ends them early.

    `stop_token_ids` end the generation as the model's own end-of-sequence tokens do; `ignore_eos` ignores the latter.
    `media`: what the target is given of a prompt with images besides its ids (`targets.media`); `images`: these.
    For servers alone: `messages`, role and content (text, or parts in OpenAI's words), instead of a prompt where there
    is no tokenizer here, and beside it where there are images; with the chat template's `thinking` and what else a chat
    is asked with, `chat`; `alternatives`, of how many of the likeliest tokens the log-probabilities are wanted.
    """

    id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    messages: tuple[tuple[str, object], ...] = field(default=(), hash=False)
    thinking: bool | None = None
    chat: Mapping[str, object] = field(default_factory=dict, hash=False)
    alternatives: int = 0
    media: Mapping[str, Tensor] | None = field(default=None, compare=False)
    images: ShownImages | None = field(default=None, compare=False)

    @property
    def max_length(self) -> int:
        """Tokens of prompt and output, at most."""
        return len(self.prompt) + self.max_new_tokens
