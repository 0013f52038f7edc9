"""One measurement: prompts as requests, turn by turn, and what an engine gives to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import exp, inf, log, sqrt
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Protocol, TypeVar

from draftkit.engines.records import Answer, DraftCounts
from draftkit.errors import DraftkitError
from draftkit.evaluate.contexts import Filler
from draftkit.evaluate.prompts import ChatMessage, Prompt, encode_images, encode_messages
from draftkit.media import MediaFolder, Medium, ShownImages, for_servers, media_of
from draftkit.requests import Request
from draftkit.results.cell import Interval, PromptRecord
from draftkit.results.settings import Settings
from draftkit.results.statistics import speedup_over_prompts, student
from draftkit.runtime.records import Generation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from draftkit.targets.vision import Vision

# What runs, answers done of the whole measurement, answers in all, acceptance length so far or nan.
PromptProgress = Callable[[str, int, int, float], None]


@dataclass(frozen=True)
class Run:
    """The answers of an engine to requests, in their order, and how many seconds they took together.

    `counted`: the engine's counters over the run; None without a draft, and where it has none. `concerns`: what may be
    wrong with the figures. `generations`: the record of every round, of an engine that keeps it. `ids`, `categories`
    and `prompt_tokens`: those of the prompts, once the run is one of conversations. `mean_latencies`: the seconds of
    each answer, where they are the mean of several passes.
    """

    answers: tuple[Answer, ...]
    seconds: float
    counted: DraftCounts | None = None
    version: str | None = None
    concerns: tuple[str, ...] = ()
    generations: tuple[Generation, ...] = ()
    ids: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    mean_latencies: tuple[float | None, ...] = ()
    prompt_tokens: tuple[int, ...] = ()

    @classmethod
    def joined(cls, passes: Sequence[Sequence[Run]]) -> Run:
        """One run of all blocks or turns: the answers and counts of the first pass, the mean times of all."""
        first = passes[0]
        counted = [run.counted for run in first if run.counted is not None]
        latencies = [[seconds for run in runs for seconds in run.latencies] for runs in passes]
        return cls(
            tuple(answer for run in first for answer in run.answers),
            fmean(sum(run.seconds for run in runs) for runs in passes),
            DraftCounts.total(counted) if counted else None,
            first[0].version,
            tuple(dict.fromkeys(concern for runs in passes for run in runs for concern in run.concerns)),
            tuple(generation for run in first for generation in run.generations),
            tuple(prompt for run in first for prompt in run.ids),
            tuple(category for run in first for category in run.categories),
            tuple(map(_mean, zip(*latencies, strict=True))),
            tuple(tokens for run in first for tokens in run.prompt_tokens),
        )

    @property
    def latencies(self) -> tuple[float | None, ...]:
        """The seconds of each answer; None where the engine does not say."""
        return self.mean_latencies or tuple(answer.latency for answer in self.answers)

    @property
    def pace(self) -> float:
        """Seconds of a round, as far as answers are timed; else of the run over its rounds."""
        timed = [a.latency - a.ttft for a in self.answers if a.latency is not None and a.ttft is not None]
        seconds = sum(timed) if len(timed) == len(self.answers) else self.seconds
        return seconds / max(sum(answer.rounds for answer in self.answers), 1)

    @property
    def output_tokens(self) -> int:
        return sum(answer.num_tokens for answer in self.answers)

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def counted_by_request(self) -> list[DraftCounts] | None:
        """The counts of each request; None unless the engine gave all of them."""
        known = [answer.drafts for answer in self.answers if answer.drafts is not None]
        return known if len(known) == len(self.answers) else None

    @property
    def drafts(self) -> DraftCounts | None:
        """The counts of these requests: their own, else the counters, which other requests on a server move too."""
        own = self.counted_by_request
        if own is None:
            return self.counted
        total, counted = DraftCounts.total(own), self.counted
        if total.num_accepted_tokens_per_pos or counted is None:
            return total
        if counted.num_accepted_tokens != total.num_accepted_tokens:  # others' requests are among them
            return total
        return replace(total, num_accepted_tokens_per_pos=counted.num_accepted_tokens_per_pos)


@dataclass(frozen=True)
class ReferenceAnswers:
    """What another program, called `name`, answers to the greedy requests without a draft; `near_tie`: the margin
    between two tokens, in log-probabilities, up to which rounding may decide."""

    name: str
    answers: tuple[Answer, ...]
    near_tie: float


Lane = Callable[[Sequence[Request]], Run]  # an engine with a draft, or without one, that is ready for requests
Report = Callable[[int, float], None]  # what a lane says meanwhile: answers done, acceptance length so far


class Conversations:
    """The prompts of a measurement as requests, turn by turn: a later turn follows the target's own answers.

    Without a `tokenizer` requests are messages, which a server renders. Raises `DraftkitError` for what needs one.
    `filler`: of contexts; by default, with the texts of these prompts. `vision`: what reads images, where the target's
    processor is here.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        tokenizer: PreTrainedTokenizerBase | None,
        settings: Settings,
        *,
        first: int = 0,
        of: Conversations | None = None,
        filler: Filler | None = None,
        vision: Callable[[], Vision] | None = None,
    ):
        self._vision = vision
        self.prompts = prompts
        self._filler = filler
        self._first, self._whole = first, of or self  # of a block: where it begins, in what
        self.tokenizer = tokenizer
        self.settings = settings
        self.turns = 1 if settings.turns != "all" else max(len(prompt.turns) for prompt in prompts)

    @property
    def blocks(self) -> list[Conversations]:
        """These conversations in blocks that are run one after the other."""
        sizes = block_sizes(len(self.prompts), self.settings.concurrency)
        ends = [*accumulate(sizes)]
        return [
            Conversations(
                self.prompts[end - size : end],
                self.tokenizer,
                self.settings,
                first=end - size,
                of=self,
                vision=self._vision,
            )
            for size, end in zip(sizes, ends, strict=True)
        ]

    @property
    def size(self) -> int:
        """How many answers these conversations will have."""
        return sum(min(len(prompt.turns), self.turns) for prompt in self.prompts)

    @cached_property
    def first_requests(self) -> list[Request]:
        if self._whole is not self:  # which has them: nothing is tokenized in a run that is timed
            return self._whole.first_requests[self._first : self._first + len(self.prompts)]
        return [
            self._request(number, prompt.asked(said), 0)
            for number, (prompt, said) in enumerate(zip(self.prompts, self.first_turns, strict=True))
        ]

    @cached_property
    def first_turns(self) -> list[str]:
        """The first turn of each conversation, behind other text of the set where a context is to be filled."""
        if self._whole is not self:
            return self._whole.first_turns[self._first : self._first + len(self.prompts)]
        texts = [prompt.text for prompt in self.prompts]
        if not self.settings.context:
            return texts
        if self.tokenizer is None:
            raise DraftkitError("a context is filled token by token", hint="pass --target, for the target's tokenizer")
        filler = self._filler or Filler({p.text: "\n\n".join(p.turns) for p in self.prompts}, self.tokenizer)
        own = [len(self._ids(prompt, prompt.asked(prompt.text))) for prompt in self.prompts]
        return [
            filler.before(text, self.settings.context - tokens) + text for text, tokens in zip(texts, own, strict=True)
        ]

    @cached_property
    def extents(self) -> list[tuple[str, int, int]]:
        """For each conversation, its id, the tokens of its first prompt and, at most, of all that follows."""
        found = []
        for number, (prompt, request) in enumerate(zip(self.prompts, self.first_requests, strict=True)):
            turns = min(len(prompt.turns), self.turns)
            messages = [*prompt.asked(self.first_turns[number]), *map(prompt.user, range(1, turns))]
            asked = len(request.prompt) if turns == 1 else len(self._ids(prompt, messages))
            longest = asked + turns * self.settings.max_new_tokens
            found.append((prompt.id, len(request.prompt), longest - len(request.prompt)))
        return found

    @property
    def longest(self) -> int:
        """Tokens of the longest conversation, at most."""
        if self.turns == 1:
            return max(request.max_length for request in self.first_requests)
        return max(first + further for _, first, further in self.extents)

    def hold(self, lane: Lane) -> Run:
        """Run all conversations through a lane, turn by turn; the run of all together."""
        histories = [prompt.asked(said) for prompt, said in zip(self.prompts, self.first_turns, strict=True)]
        runs = []
        for turn in range(self.turns):
            asked = [number for number, prompt in enumerate(self.prompts) if len(prompt.turns) > turn]
            for number in asked if turn else ():
                histories[number].append(self.prompts[number].user(turn))
            requests = self.first_requests
            if turn:
                requests = [self._request(number, histories[number], turn) for number in asked]
            run = lane(requests)
            for number, answer in zip(asked, run.answers if turn + 1 < self.turns else (), strict=False):
                histories[number].append({"role": "assistant", "content": self._said(answer)})
            categories = tuple(self.prompts[number].category for number in asked)
            ids, sizes = zip(*((request.id, len(request.prompt)) for request in requests), strict=True)
            runs.append(replace(run, ids=ids, categories=categories, prompt_tokens=sizes))
        return Run.joined([runs])

    def _request(self, number: int, messages: Sequence[ChatMessage], turn: int) -> Request:
        prompt, settings = self.prompts[number], self.settings
        request = Request(
            prompt.id if turn == 0 else f"{prompt.id}/{turn + 1}",
            (),
            settings.max_new_tokens,
            settings.sampling.numbered(self._first + number + turn * len(self._whole.prompts)),
            ignore_eos=settings.ignore_eos,
        )
        if media := media_of(messages):
            return self._with_media(request, prompt, messages, media)
        if self.tokenizer is not None:
            return replace(request, prompt=self._ids(prompt, messages))
        if settings.template is False or prompt.plain:
            raise DraftkitError(
                "plain text, to which no chat template belongs, is sent as token ids",
                where=settings.prompts,
                hint="pass --target, a folder or Hub id with the target's tokenizer",
            )
        if prompt.recorded and prompt.tools:
            raise DraftkitError(
                "recorded calls of tools are sent as token ids",
                where=settings.prompts,
                hint="pass --target, a folder or Hub id with the target's tokenizer",
            )
        said = tuple((message["role"], str(message["content"] or "")) for message in messages)
        return replace(request, messages=said, thinking=settings.thinking)

    def _with_media(
        self, request: Request, prompt: Prompt, messages: Sequence[ChatMessage], media: Sequence[Medium]
    ) -> Request:
        """A request with images or sounds: its messages, and where the target is known here what it is given of them.
        Sounds, and images at addresses, only a server reads."""
        settings, folder = self.settings, MediaFolder(prompt.folder)
        if settings.template is False:
            raise DraftkitError("images are placed by the chat template", hint="leave out template=false")
        said = tuple((message["role"], message["content"]) for message in for_servers(messages, folder))
        chat = {"tools": list(prompt.schemas)} if prompt.schemas else {}
        request = replace(request, messages=said, thinking=settings.thinking, chat=chat)
        if self._vision is None or not all(one.is_here for one in media):
            return request
        files = tuple(map(folder.image, media))
        made = encode_images(messages, files, self._vision(), settings.thinking, prompt.schemas)
        return replace(request, prompt=made.tokens, media=made.inputs, images=ShownImages(files, made.spans))

    def _said(self, answer: Answer) -> str:
        """The text of an answer, which further turns follow. Raises `DraftkitError` where nobody tells it."""
        if self.tokenizer is not None and answer.ids:
            return str(self.tokenizer.decode(answer.ids, skip_special_tokens=True))
        if not answer.text and answer.num_tokens:
            raise DraftkitError(
                "a further turn needs the text of the answer before it, and the server gave none",
                hint="pass --target, for the target's tokenizer",
            )
        return answer.text

    def _ids(self, prompt: Prompt, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        assert self.tokenizer is not None
        if media := media_of(messages):
            assert self._vision is not None
            files = [*map(MediaFolder(prompt.folder).image, media)]
            return encode_images(messages, files, self._vision(), self.settings.thinking, prompt.schemas).tokens
        template = False if self.settings.template is None and prompt.plain else self.settings.template
        return encode_messages(messages, self.tokenizer, self.settings.thinking, template, prompt.schemas)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None


NARROW = 0.05  # how well, as a share of itself, the ratio of the paces is to be known
MOST_BLOCKS = 8


class Paced(Protocol):
    @property
    def pace(self) -> float:
        """Seconds of a round."""


Block = TypeVar("Block")
R = TypeVar("R", bound=Paced)


def block_sizes(prompts: int, concurrency: int) -> list[int]:
    """How many prompts each block has: enough that all sequences run together for most of it."""
    blocks = min(max(prompts // (2 * concurrency), 1), MOST_BLOCKS)
    return [prompts // blocks + (number < prompts % blocks) for number in range(blocks)]


def interleaved(
    blocks: Sequence[Block], plain: Callable[[Block], R], drafting: Callable[[Block], R], repeats: int
) -> tuple[list[list[tuple[R, R]]], float]:
    """Run each block without a draft and with it; and all of them again, `repeats` passes at most, until the ratio of
    the paces is known to `NARROW`.

    Returns the runs of each pass, block by block, and how well the ratio is known: inf of a single pair.
    """
    passes: list[list[tuple[R, R]]] = []
    error = inf
    while len(passes) < repeats and error > NARROW:
        pairs = []
        for number, block in enumerate(blocks):
            if (number + len(passes)) % 2:  # neither is always the one after the other
                drafted = drafting(block)
                pairs.append((plain(block), drafted))
            else:
                pairs.append((plain(block), drafting(block)))
        passes.append(pairs)
        error = pace_error([pair for pairs in passes for pair in pairs])
    return passes, error


def pace_error(pairs: Sequence[tuple[Paced, Paced]]) -> float:
    """Half the 95 % interval of the logarithm of the mean ratio of the paces; inf of a single pair."""
    ratios = [log(plain.pace / drafted.pace) for plain, drafted in pairs if plain.pace > 0 and drafted.pace > 0]
    if len(ratios) < 2:
        return inf
    return student(len(ratios) - 1) * stdev(ratios) / sqrt(len(ratios))


def speedup_interval(speedup: float, prompts: Sequence[PromptRecord], error: float, blocks: int) -> Interval | None:
    """The speed-up with what is not known of it: how it varies over prompts, and `error`, how it does with the machine,
    told from so many blocks. None where either cannot be told.

    What slows all n prompts of a block is in their seconds too, where it counts as if each had been slowed by itself:
    with 1/n of its variance, which is not counted again.
    """
    found = speedup_over_prompts(prompts)
    if found is None or found.bounds is None or error == inf:
        return None
    low, high = (log(bound / found.mean) for bound in found.bounds)
    apart = error**2 * max(1 - blocks / len(prompts), 0)
    return Interval(speedup, speedup * exp(-sqrt(low**2 + apart)), speedup * exp(sqrt(high**2 + apart)), found.prompts)


def sides(passes: Sequence[Sequence[tuple[R, R]]]) -> tuple[list[list[R]], list[list[R]]]:
    """The runs without a draft, and those with it, of each pass."""
    return [[plain for plain, _ in pairs] for pairs in passes], [[drafted for _, drafted in pairs] for pairs in passes]
