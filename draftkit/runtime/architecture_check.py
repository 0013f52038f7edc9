"""Does draftkit's engine decode a model as transformers' `generate` does? The question is asked once for each
architecture.

A tiny random model of the model's own class and configuration (`targets/tiny.py`) decodes two texts of other lengths
beside each other, once plainly and once with drafts, of which some are rejected, and prompts in pieces; the logits that
tokens were chosen from are held against `generate`'s. What the answer follows from is its key: that configuration,
draftkit's code, the releases of transformers and torch. It is kept in a file; where none can be written, the next
process asks again. V vocabulary.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import secrets
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from draftkit.errors import UnsupportedTarget, in_one_line
from draftkit.io.kept import code_digest, kept_folder
from draftkit.requests import Request
from draftkit.runtime.attention import NAME as ATTENTION
from draftkit.runtime.drafters.protocol import Committed, Draw, NewSequence, Proposal
from draftkit.runtime.engine import Engine
from draftkit.runtime.memory_plan import SlotBytes
from draftkit.targets.pretrained import model_class
from draftkit.targets.rope import Positions
from draftkit.targets.states import AuxLayers
from draftkit.targets.target import Target, TargetOutput
from draftkit.targets.tiny import TEXT, random_model, tiny_config

TEXTS = ((21, 19), (5, 24))  # tokens of a prompt, and new ones
DRAFTED_AND_CHUNK = ((0, 2048), (3, 6))  # draft tokens a round, and the largest piece of a prompt
SEEDS = (0, 1)  # of the weights; one that agrees will do, as two experts may tie
SCALE = 0.2  # of the weights
CLOSE = 1e-3  # how far logits may lie apart, of their standard deviation
SPOILT = 30  # of 101 draft tokens
ROOMS = ("models", "runtime")  # draftkit's code that decodes

Comparison = Literal["equal", "different", "not checked"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decoding:
    """Whether draftkit decodes an architecture as `generate` does; `why` it does not, or why that is not known."""

    outcome: Comparison
    why: str = ""


def require_equal_decoding(config: PretrainedConfig) -> None:
    """Raise `UnsupportedTarget` where draftkit decodes models of a configuration otherwise than transformers does.

    What cannot be found out is logged, and no reason to refuse.
    """
    name = getattr(model_class(config), "__name__", config.model_type)
    answer = decoding_of(config)
    if answer.outcome == "different":
        raise UnsupportedTarget(
            f"draftkit's own engine does not decode {name} as transformers does: {answer.why}",
            expected="equal logits of a tiny random model with this configuration",
        )
    if answer.outcome == "not checked":
        _warn_once(f"{name} was not held against transformers' generate: {answer.why}")


def decoding_of(config: PretrainedConfig) -> Decoding:
    """The answer for a configuration, from its file or by trying it."""
    with _undisturbed():
        try:
            tiny = tiny_config(config)
            key = _key(config, tiny)
        except Exception as error:  # of a configuration's class, which may be code that comes with the model
            return Decoding("not checked", f"no tiny configuration, {in_one_line(error)}")
        file = kept_folder("architectures") / f"{key}.json"
        return _read(file) or _written(file, compare(tiny))


def compare(tiny: PretrainedConfig) -> Decoding:
    """Decode with random models of a tiny configuration."""
    requests = _requests(tiny)
    answer = Decoding("not checked")
    for seed in SEEDS:
        try:
            model = random_model(tiny, "eager", seed=seed, scale=SCALE)
            expected = [_generated(model, request) for request in requests]
        except Exception as error:
            return Decoding("not checked", f"no tiny model, {in_one_line(error)}")
        try:
            model = random_model(tiny, ATTENTION, seed=seed, scale=SCALE)
            apart = next(filter(None, (_apart(model, requests, expected, *way) for way in DRAFTED_AND_CHUNK)), None)
        except Exception as error:  # which real weights meet too, if they do
            return Decoding("not checked", f"the tiny model does not run, {in_one_line(error)}")
        if apart is None:
            return Decoding("equal")
        answer = Decoding("different", apart)
    return answer


class Known:
    """A drafter of texts that it knows, some of whose tokens it changes: always the same ones."""

    max_tokens = max_positions = module = None
    positions_end = False
    overlap = 0
    slot_bytes: SlotBytes | None = None

    def __init__(self, texts: Sequence[Sequence[int]], aux_layers: AuxLayers | None = None):
        self.texts = texts
        self.aux_layers = aux_layers
        self._text: dict[int, Sequence[int]] = {}

    def allocate(self, num_slots: int, capacity: int, k: int) -> None:
        self._text = {}

    def prefill(self, prompts: Sequence[NewSequence]) -> None:
        for prompt in prompts:
            known = [*self._text.get(prompt.slot, ())[: prompt.begin], *prompt.tokens.tolist()]
            self._text[prompt.slot] = next(text for text in self.texts if list(text[: len(known)]) == known)

    def propose(self, committed: Committed, k: int, draw: Draw) -> Proposal:
        begins = (committed.start + committed.counts).tolist()
        rows = [
            [self._token(slot, position) for position in range(begin, begin + k)]
            for slot, begin in zip(committed.slots.tolist(), begins, strict=True)
        ]
        return Proposal(torch.tensor(rows))

    def _token(self, slot: int, position: int) -> int:
        text = self._text.get(slot, ())
        token = text[position] if position < len(text) else TEXT.start
        spoilt = position**3 * 7919 % 101 < SPOILT
        return TEXT.start + (token + 1) % len(TEXT) if spoilt else token


class _Heard(Target):
    """Keeps the logits [V] that came last of a slot's position, by both."""

    def __init__(self, model: PreTrainedModel):
        super().__init__(model)
        self.logits: dict[tuple[int, int], Tensor] = {}

    def forward(
        self, tokens: Tensor, positions: Tensor, kv: Any, *, last_rows: Tensor | None = None, **others: Any
    ) -> TargetOutput:
        output = super().forward(tokens, positions, kv, last_rows=last_rows, **others)
        slots = kv.rows.slots[:, None].expand_as(kv.rows.positions).flatten().tolist()
        rows = list(zip(slots, kv.rows.positions.flatten().tolist(), strict=True))
        told = rows if last_rows is None else [rows[row] for row in last_rows.tolist()]
        self.logits |= zip(told, output.logits.flatten(0, 1).clone(), strict=True)
        return output


def _requests(tiny: PretrainedConfig) -> list[Request]:
    """Texts that cross every length of a tiny configuration but the one that no text may cross."""
    generator, positions = torch.Generator().manual_seed(0), Positions.of(tiny)
    requests = []
    for length, new in TEXTS:
        prompt = torch.randint(TEXT.start, TEXT.stop, (length,), generator=generator).tolist()
        requests.append(Request(str(length), tuple(prompt), min(new, positions.room(length)), ignore_eos=True))
    return requests


def _generated(model: PreTrainedModel, request: Request) -> tuple[list[int], Tensor]:
    """What `generate` answers, and the logits [n, V] of its n tokens."""
    prompt = torch.tensor([request.prompt])
    if model.generation_config is not None:
        model.generation_config.eos_token_id = None
    out: Any = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=request.max_new_tokens,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return out.sequences[0, prompt.shape[1] :].tolist(), torch.cat(out.logits).float()


def _apart(
    model: PreTrainedModel,
    requests: Sequence[Request],
    expected: Sequence[tuple[list[int], Tensor]],
    k: int,
    piece: int,
) -> str | None:
    """Where draftkit's engine comes to other logits than those that are `expected`; None where it does not."""
    target, drafter = _Heard(model), None
    if k:
        drafter = Known([(*request.prompt, *tokens) for request, (tokens, _) in zip(requests, expected, strict=True)])
    engine = Engine(target, drafter, num_speculative_tokens=k, num_slots=len(requests), prefill_chunk=piece, eager=True)
    for slot, (generation, (tokens, wanted)) in enumerate(zip(engine.generate(requests), expected, strict=True)):
        begin = len(generation.request.prompt)
        for number, (token, logits) in enumerate(zip(tokens, wanted, strict=True)):
            found = target.logits[slot, begin - 1 + number].float()
            if not (found - logits).abs().max() <= CLOSE * logits.std():  # nor where one is NaN
                return f"the logits of token {number + 1} after a prompt of {begin} differ" + (k > 0) * ", with drafts"
            if generation.tokens[number] != token:  # a tie
                break
    return None


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Random numbers go on as if none had been drawn, and transformers says nothing. Tiny products run on one thread:
    several would wait for each other."""
    threads, loud = torch.get_num_threads(), transformers_logging.get_verbosity()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers_logging.set_verbosity(logging.CRITICAL)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            transformers_logging.set_verbosity(loud)


def _key(config: PretrainedConfig, tiny: PretrainedConfig) -> str:
    """A digest of everything that the answer depends on."""
    model = model_class(config)
    decides = [
        f"{getattr(model, '__module__', '')}.{getattr(model, '__qualname__', '')}",
        tiny.to_json_string(use_diff=False),
        transformers.__version__,
        torch.__version__,
        code_digest(*ROOMS),
        *(path.read_text(encoding="utf-8") for path in _brought(model)),
    ]
    return hashlib.sha256(json.dumps(decides).encode()).hexdigest()


def _brought(model: type | None) -> list[Path]:
    """The files of a class that comes with its model."""
    if model is None or model.__module__.startswith("transformers."):
        return []
    return sorted(Path(inspect.getfile(model)).parent.glob("*.py"))


def _read(file: Path) -> Decoding | None:
    """The answer in a file, None without one that can be read."""
    with suppress(OSError, TypeError, ValueError):
        answer = Decoding(**json.loads(file.read_text(encoding="utf-8")))
        if answer.outcome in get_args(Comparison):
            return answer
    return None


def _written(file: Path, answer: Decoding) -> Decoding:
    """The answer, which is also written to its file where that can be done."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch = file.with_suffix(f".{secrets.token_hex(8)}")
        scratch.write_text(json.dumps(asdict(answer)), encoding="utf-8")
        scratch.replace(file)
    return answer


@cache
def _warn_once(message: str) -> None:
    _log.warning(message)
