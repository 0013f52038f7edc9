"""Prompts where a user has none: the target writes them itself (Magpie, arXiv 2406.08464).

A chat model has learned what users say as well as what it answers. Its chat template, cut before the user's words, is a
prompt that the model goes on with as a user would; what it writes there is kept where it is whole, new, long enough, no
loop, and of a language that is wanted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from draftkit.data.categories import LANGUAGES, language_of, words_of
from draftkit.data.loss_mask import Renderer
from draftkit.data.regenerate import OnProgress, row_seed
from draftkit.data.responses import Refusal, Responder, ResponseFile, RowPrompt, Sampling
from draftkit.data.rows import SYNTHESIZED
from draftkit.data.tokenizer import TargetTokenizer
from draftkit.errors import DraftkitError, FormatError, TargetError, require_count, require_setting
from draftkit.hub.local_paths import public_name
from draftkit.requests import SamplingParameters
from draftkit.results.statistics import is_looping, repetition
from draftkit.targets.chat import TemplateRejection

SENTINEL = "draftkitsentinel"  # a user's message that no template contains, and that trimming does not change
ID = "synthetic-"  # and the number of the attempt
IN_VAIN = 1000  # attempts without a prompt that is kept, after which nothing more is expected


@dataclass(frozen=True)
class Opening:
    """A chat template cut at the user's words: what each of them begins with, by turns, and the `tokens` up to there;
    the text that `closes` them, if any does.

    `end_ids`: what ends the user's turn, the target's own end tokens and the one token that closes it, where it is one.
    `special_ids`: what no user writes.
    """

    begins: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]
    closes: str
    end_ids: frozenset[int]
    special_ids: frozenset[int]


def opening(renderer: Renderer, begins: Sequence[str] = ()) -> Opening:
    """Where a user's turn begins and ends in the target's chat template; `begins`: the first words of the user's turns.

    Raises `TargetError` for a target without a template, which is a base model, and for a template in which a user's
    message cannot be found.
    """
    target = renderer.target
    if target.tokenizer.chat_template is None:
        raise TargetError(
            "the target's tokenizer has no chat template: a base model has not learned what users ask",
            where=target.name,
            hint="give the instruct model of the same family, or prompts of your own to `draftkit data regenerate`",
        )
    try:
        text = renderer.text([{"role": "user", "content": SENTINEL}], generate=True)
    except TemplateRejection as rejection:
        raise TargetError(f"the chat template takes no user message: {rejection}", where=target.name) from rejection
    before, found, after = text.partition(SENTINEL)
    if not found or not before:
        raise TargetError(
            "the chat template has nothing before a user's message" if found else "the chat template changes messages",
            where=target.name,
            expected="a template that marks where the user's words begin",
        )
    special = frozenset(id for id, token in target.tokenizer.added_tokens_decoder.items() if token.special)
    begins = tuple(begins) or ("",)
    return Opening(
        begins=begins,
        # A space before the words that follow belongs to the first of them.
        tokens=tuple(tuple(renderer.ids((before + begin).rstrip(" "))) for begin in begins),
        closes=next(iter(after.split()), ""),
        end_ids=target.end_ids | special.intersection(renderer.ids(after)[:1]),
        special_ids=special,
    )


@dataclass(frozen=True, kw_only=True)
class SynthesizeSettings:
    """Settings of how prompts are made; a file is continued only with the settings that it was begun with.

    `begins`: what users' words begin with, by turns. `languages`: those kept, all where empty. `min_words` of a prompt;
    `max_new_tokens` bounds what is written of it. The others are as in `RegenerateSettings`. Raises `SettingError` for
    values outside their range.
    """

    target: str
    served_by: Literal["draftkit", "endpoint"]
    dtype: str | None
    system: str | None
    template_options: Mapping[str, object]
    temperature: float
    top_k: int
    top_p: float
    seed: int
    begins: tuple[str, ...] = ()
    languages: tuple[str, ...] = ()
    min_words: int = 3
    max_new_tokens: int = 256

    def __post_init__(self) -> None:
        for language in self.languages:
            require_setting(language in LANGUAGES, "language", language, ", ".join(LANGUAGES))
        require_count("min_words", self.min_words)
        require_count("max_new_tokens", self.max_new_tokens)
        SamplingParameters(self.temperature, self.top_k, self.top_p, seed=self.seed)
        why = "every prompt begins alike and would be the same"
        require_setting(self.temperature > 0, "temperature", self.temperature, f"above 0: {why}")

    def header(self, tokenizer: TargetTokenizer, target_sha256: str | None = None) -> dict[str, object]:
        """The settings as they are stored, as of `RegenerateSettings.header`."""
        same = tokenizer.identity | {"target_sha256": target_sha256, "target": public_name(self.target)}
        return asdict(self) | {"begins": list(self.begins), "languages": list(self.languages)} | same

    def sampling(self, cut: Opening) -> Sampling:
        """These settings in the form that a responder takes."""
        parameters = SamplingParameters(self.temperature, self.top_k, self.top_p)
        return Sampling(parameters, self.max_new_tokens, cut.end_ids)


class PromptFile(ResponseFile):
    """The prompts made so far: JSONL that `data prepare`, `data regenerate` and `eval --dataset` read.

    A prompt's id ends with the number of its attempt, counted from 0.
    """

    def __init__(self, place: Path | str, settings: Mapping[str, object]):
        super().__init__(place, settings, SYNTHESIZED)
        self.seen = {_said(str(row.get("prompt"))) for _, row in self.rows()}
        self.attempts = max((self._number(id) + 1 for id in self.done), default=0)

    def _number(self, id: str) -> int:
        number = id.removeprefix(ID)
        if number == id or not number.isdecimal():
            raise FormatError(f"the prompt {id} was not synthesized", where=self.path, hint="write to another file")
        return int(number)


def synthesize(
    count: int,
    cut: Opening,
    renderer: Renderer,
    responder: Responder,
    out: PromptFile,
    settings: SynthesizeSettings,
    *,
    on_progress: OnProgress = lambda prompts, tokens: None,
) -> Counter[str]:
    """Append prompts to `out` until it has `count`; returns how many attempts of this run were left out, by reason.

    Attempt n depends on the seed and n alone, and what is kept on the attempts before it, not on how many are made
    together or on how often the run was interrupted, up to the numerics of batched matrix products. Raises
    `DraftkitError` where `IN_VAIN` attempts in a row give nothing, and what the responder and the file raise.
    """
    attempts = _Attempts(count, cut, renderer, out, settings)
    try:
        for prompt, answer in responder.respond(attempts.ask):
            attempts.answer(prompt, answer)
            on_progress(0, 0 if isinstance(answer, Refusal) else len(answer))
            on_progress(attempts.write(out.every), 0)
            attempts.check()
    finally:
        on_progress(attempts.write(), 0)
    return attempts.left_out


class _Attempts:
    """The attempts of a run: which is asked for next, and what has become of those before.

    Answers are judged in the order of attempts, as each is held against what was kept before.
    """

    def __init__(self, count: int, cut: Opening, renderer: Renderer, out: PromptFile, settings: SynthesizeSettings):
        self.left_out: Counter[str] = Counter()
        self._count, self._cut, self._renderer, self._out, self._settings = count, cut, renderer, out, settings
        self._asked = out.attempts
        self._waiting: dict[str, tuple[int, ...] | Refusal] = {}
        self._kept: list[dict[str, object]] = []
        self._in_vain = 0
        self._written = time.monotonic()

    @property
    def _missing(self) -> int:
        return self._count - len(self._out.done) - len(self._kept)

    def ask(self) -> RowPrompt | None:
        """The next attempt; None where enough are under way, some of which will be left out."""
        if not self._missing or self._asked - self._out.attempts > self._missing + self._missing // 4:
            return None
        id, tokens = f"{ID}{self._asked}", self._cut.tokens[self._asked % len(self._cut.begins)]
        self._asked += 1
        return RowPrompt(id, tokens, row_seed(self._settings.seed, id, 0))

    def answer(self, prompt: RowPrompt, answer: tuple[int, ...] | Refusal) -> None:
        """Take in what was written, and judge all attempts that are next in turn."""
        self._waiting[prompt.id] = answer
        while self._missing and (id := f"{ID}{self._out.attempts}") in self._waiting:
            turn = self._out.attempts % len(self._cut.begins)
            self._out.attempts += 1
            self._judge(id, turn, self._waiting.pop(id))

    def _judge(self, id: str, turn: int, answer: tuple[int, ...] | Refusal) -> None:
        seen = self._out.seen
        text, reason = _prompt_of(answer, turn, self._cut, self._renderer.target, self._settings, seen)
        self._in_vain = self._in_vain + 1 if reason else 0
        if reason:
            self.left_out[reason] += 1
            return
        seen.add(_said(text))
        self._kept.append({"id": id, "category": language_of(text), "prompt": text})

    def write(self, every: float = 0.0) -> int:
        """Write what is kept, unless the last time was less than so many seconds ago. Returns how many prompts."""
        if not self._kept or time.monotonic() - self._written < every:
            return 0
        self._out.append(self._kept)
        written, self._kept, self._written = len(self._kept), [], time.monotonic()
        return written

    def check(self) -> None:
        """Raise `DraftkitError` where `IN_VAIN` attempts in a row gave nothing."""
        if self._in_vain >= IN_VAIN:
            reasons = ", ".join(f"{n} {reason}" for reason, n in self.left_out.most_common())
            raise DraftkitError(
                f"{self._in_vain} attempts in a row gave no prompt: {reasons}",
                where=self._renderer.target.name,
                hint="what was kept is in the file; a higher --temperature or --max-new-tokens, or other --language",
            )


def _prompt_of(
    answer: tuple[int, ...] | Refusal, turn: int, cut: Opening, target: TargetTokenizer, settings: SynthesizeSettings,
    seen: set[str],
) -> tuple[str, str | None]:  # fmt: skip
    """The user's words, which begin with those whose `turn` it is, and why they are left out, None where they are
    not."""
    if isinstance(answer, Refusal):
        return "", "refused"
    ended = bool(answer) and answer[-1] in cut.end_ids
    drawn = answer[:-1] if ended else answer
    text = _goes_on(cut.tokens[turn], drawn, target)
    if cut.closes and cut.closes in text:
        text, ended = text.partition(cut.closes)[0], True
    if not ended:
        return "", "unfinished"
    text = (cut.begins[turn] + text).strip()
    if not cut.special_ids.isdisjoint(target.tokenizer(text, add_special_tokens=False).input_ids):
        return "", "with special tokens"
    words = _said(text)
    if words.count(" ") + 1 < settings.min_words:
        return "", "too short"
    if is_looping(repetition(drawn)):
        return "", "looping"
    if settings.languages and language_of(text) not in settings.languages:
        return "", "in another language"
    return text, "duplicate" if words in seen else None


def _goes_on(before: Sequence[int], drawn: Sequence[int], target: TargetTokenizer) -> str:
    """The text of tokens `drawn` after others, with the space that the first of them may begin with."""
    behind = target.tokenizer.decode(before, skip_special_tokens=False)
    whole: str = target.tokenizer.decode([*before, *drawn], skip_special_tokens=False)
    return whole[len(behind) :]


def _said(text: str) -> str:
    """What a prompt says, by which two are the same."""
    return " ".join(words_of(text))
