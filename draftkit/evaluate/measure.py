"""One measurement: all prompts through one engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from statistics import fmean

from transformers import PreTrainedTokenizerBase

from draftkit.evaluate.axes import paddings
from draftkit.evaluate.by_turns import block_sizes, mean_seconds
from draftkit.evaluate.prompts import Message, Prompt, encode_messages
from draftkit.requests import Request, SyntheticAcceptance
from draftkit.results.settings import Settings
from draftkit.runtime.drafters.protocol import Drafter
from draftkit.runtime.engine import Engine, OnRound
from draftkit.runtime.records import Generation
from draftkit.targets.target import Target

Progress = Callable[[str, int, int, float], None]  # what runs, answers done, answers in all, acceptance length so far


@dataclass(frozen=True)
class Run:
    """Generations with the categories of their prompts, and how long they took, in seconds: together, and each."""

    generations: list[Generation]
    categories: list[str]
    seconds: float
    latencies: list[float]

    @classmethod
    def joined(cls, passes: Sequence[Sequence[Run]]) -> Run:
        """One run of all blocks, with the mean times of all passes."""
        first = passes[0]
        return cls(
            [g for run in first for g in run.generations],
            [category for run in first for category in run.categories],
            fmean(sum(run.seconds for run in runs) for runs in passes),
            mean_seconds([[latency for run in runs for latency in run.latencies] for runs in passes]),
        )

    @property
    def output_tokens(self) -> int:
        return sum(len(g.tokens) for g in self.generations)

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def pace(self) -> float:
        """Seconds of a round."""
        rounds = sum(len(g.rounds) for g in self.generations)
        return sum(g.times[-1] - g.times[0] for g in self.generations) / max(rounds, 1)


class Conversations:
    """The prompts of a measurement as requests, turn by turn: a later turn follows the target's own answers."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        tokenizer: PreTrainedTokenizerBase,
        settings: Settings,
        *,
        first: int = 0,
        of: Conversations | None = None,
    ):
        self.prompts = prompts
        self._first, self._whole = first, of or self  # of a block: where it begins, in what
        self.tokenizer = tokenizer
        self.settings = settings
        self.turns = 1 if settings.turns == "first" else max(len(prompt.turns) for prompt in prompts)

    @property
    def blocks(self) -> list[Conversations]:
        """The same, in parts."""
        sizes = block_sizes(len(self.prompts), self.settings.concurrency)
        ends = [*accumulate(sizes)]
        return [
            Conversations(self.prompts[end - size : end], self.tokenizer, self.settings, first=end - size, of=self)
            for size, end in zip(sizes, ends, strict=True)
        ]

    @property
    def size(self) -> int:
        """How many answers there will be."""
        return sum(min(len(prompt.turns), self.turns) for prompt in self.prompts)

    @cached_property
    def first_requests(self) -> list[Request]:
        if self._whole is not self:  # which has them: nothing is tokenized in a run that is timed
            return self._whole.first_requests[self._first : self._first + len(self.prompts)]
        return [
            self._request(number, [*prompt.opening, _user(said)], 0)
            for number, (prompt, said) in enumerate(zip(self.prompts, self.first_turns, strict=True))
        ]

    @cached_property
    def first_turns(self) -> list[str]:
        """What is asked first; behind text of the other prompts of the set, where a context is to be filled."""
        if self._whole is not self:
            return self._whole.first_turns[self._first : self._first + len(self.prompts)]
        texts = [prompt.text for prompt in self.prompts]
        if not self.settings.context:
            return texts
        own = [len(self._ids(prompt, [*prompt.opening, _user(prompt.text)])) for prompt in self.prompts]
        before = paddings(texts, [self.settings.context - tokens for tokens in own], self.tokenizer)
        return [padding + text for padding, text in zip(before, texts, strict=True)]

    @cached_property
    def extents(self) -> list[tuple[str, int, int]]:
        """Of each conversation its id, the tokens of its first prompt and, at most, of all that follows."""
        found = []
        for number, (prompt, request) in enumerate(zip(self.prompts, self.first_requests, strict=True)):
            turns = (self.first_turns[number], *prompt.turns[1 : self.turns])
            messages = [*prompt.opening, *map(_user, turns)]
            asked = len(request.prompt) if len(turns) == 1 else len(self._ids(prompt, messages))
            longest = asked + len(turns) * self.settings.max_new_tokens
            found.append((prompt.id, len(request.prompt), longest - len(request.prompt)))
        return found

    @property
    def longest(self) -> int:
        """Tokens of the longest conversation, at most."""
        return max(first + further for _, first, further in self.extents)

    def hold(self, engine: Engine, on_round: OnRound | None = None) -> tuple[list[Generation], list[str]]:
        """All generations, and the categories of their prompts."""
        histories = [prompt.opening for prompt in self.prompts]
        generations: list[Generation] = []
        categories: list[str] = []
        for turn in range(self.turns):
            asked = [number for number, prompt in enumerate(self.prompts) if len(prompt.turns) > turn]
            for number in asked:
                said = self.prompts[number].turns[turn] if turn else self.first_turns[number]
                histories[number].append(_user(said))
            requests = self.first_requests
            if turn:
                requests = [self._request(number, histories[number], turn) for number in asked]
            answers = engine.generate(requests, on_round=on_round)
            for number, answer in zip(asked, answers, strict=True):
                text = self.tokenizer.decode(answer.tokens, skip_special_tokens=True)
                histories[number].append({"role": "assistant", "content": text})
            generations += answers
            categories += [self.prompts[number].category for number in asked]
        return generations, categories

    def _request(self, number: int, messages: Sequence[Message], turn: int) -> Request:
        prompt, settings = self.prompts[number], self.settings
        return Request(
            prompt.id if turn == 0 else f"{prompt.id}/{turn + 1}",
            self._ids(prompt, messages),
            settings.max_new_tokens,
            settings.sampling.numbered(self._first + number + turn * len(self._whole.prompts)),
            ignore_eos=settings.ignore_eos,
        )

    def _ids(self, prompt: Prompt, messages: Sequence[Message]) -> tuple[int, ...]:
        template = False if self.settings.template is None and prompt.plain else self.settings.template
        return encode_messages(messages, self.tokenizer, self.settings.thinking, template)


class Lane:
    """An engine with a drafter, or without one, that is ready for all prompts of conversations, or a block of them."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        conversations: Conversations,
        name: str,
        on_progress: Progress = lambda *_: None,
    ):
        settings = conversations.settings
        requests = conversations.first_requests
        self._engine = engine_of(target, drafter, settings, num_slots=min(settings.concurrency, len(requests)))
        self._engine.reserve(conversations.longest)
        self._engine.warm_up(requests)
        self._report = lambda done, length: on_progress(name, done, conversations.size, length)
        self._size = conversations.size
        self._finished = self._accepted = self._rounds = 0

    def run(self, conversations: Conversations) -> Run:
        """What they gave, timed."""
        self._finished %= self._size  # a further pass
        began = time.perf_counter()
        generations, categories = conversations.hold(self._engine, self._on_round)
        seconds = time.perf_counter() - began
        return Run(generations, categories, seconds, [g.times[-1] - g.started for g in generations])

    def _on_round(self, touched: list[Generation]) -> None:
        for generation in touched:
            self._finished += generation.finished is not None
            self._accepted += generation.rounds[-1].accepted if generation.rounds else 0
            self._rounds += bool(generation.rounds)
        self._report(self._finished, 1 + self._accepted / max(self._rounds, 1))


def engine_of(target: Target, drafter: Drafter | None, settings: Settings, *, num_slots: int) -> Engine:
    """The engine that a measurement runs on."""
    rates = settings.acceptance_rates if drafter is not None else None
    return Engine(
        target,
        drafter,
        num_speculative_tokens=settings.num_speculative_tokens if drafter is not None else 0,
        num_slots=num_slots,
        # Plain decoding draws with the noise that coupled verification compares with, which is also any target's own.
        verification=settings.verification if drafter is not None else "coupled",
        draft_sampling=settings.draft_sampling,
        synthetic=None if rates is None else SyntheticAcceptance(rates),
        k_by_batch=settings.schedule if drafter is not None else None,
        eager=settings.eager,
    )


def _user(text: str) -> Message:
    return {"role": "user", "content": text}
