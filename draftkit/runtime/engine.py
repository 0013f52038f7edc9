"""The draft–verify loop over a fixed set of sequence slots.

State of a sequence with n tokens: the target's keys and values are valid for positions 0 … n−2; the token at n−1, the
*anchor*, has not been through the target. One round: the drafter proposes K tokens, the target scores anchor and
proposal in one forward of K+1 rows at n−1 … n−1+K, verification accepts a ≤ K of them and adds one token, n grows by
a+1. Without a drafter K is 0 and the same loop is plain decoding. Shapes: F feature width, V vocabulary.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations, cycle, islice
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from draftkit.errors import DraftkitError, NonFiniteError
from draftkit.requests import (
    DraftSampling,
    Like,
    Request,
    SamplingParameters,
    Verification,
    check_schedule,
)
from draftkit.runtime.batch import Batch, SamplingTensors
from draftkit.runtime.cache import SlotCache
from draftkit.runtime.compiled.programs import check_compiler
from draftkit.runtime.drafters.protocol import Drafter, Expands
from draftkit.runtime.drawing import draw as draw_token
from draftkit.runtime.fusion import fuse
from draftkit.runtime.fusion.packed_linear import pack
from draftkit.runtime.graphs import CudaCapture, GraphedRounds, capturable, may_look
from draftkit.runtime.memory import explains_memory, require_memory
from draftkit.runtime.prefill import PREFILL_CHUNK, Prefill, Prefilled
from draftkit.runtime.records import FinishReason, Generation, Round
from draftkit.runtime.rounds import Broken, Outcome, Rounds, SlotState, outcomes
from draftkit.runtime.tree_kinds import DraftTree
from draftkit.runtime.tree_rounds import TreeRounds, tree_outcomes
from draftkit.targets.finite import HINT, has_finite_peak
from draftkit.targets.media import HELD, check_media
from draftkit.targets.target import Target

if TYPE_CHECKING:
    from draftkit.runtime.compiled.prompts import CompiledPrompts
    from draftkit.runtime.compiled.rounds import CompiledRounds

MAX_SPECULATIVE_TOKENS = 16

_log = logging.getLogger(__name__)

OnRound = Callable[[list[Generation]], None]

# By the id of a drafter: the engine that it has made room for.
_SERVED: WeakValueDictionary[int, Engine] = WeakValueDictionary()


def check_draft_tokens(k: int, most: int | None, where: str | None = None) -> None:
    """Raise `DraftkitError` where a draft of at most `most` tokens a round, None for any number, cannot propose `k`."""
    if most is None or most > MAX_SPECULATIVE_TOKENS:
        most, why = MAX_SPECULATIVE_TOKENS, "the most that draftkit's runtime drafts"
    else:
        why = "for which the draft's weights are made"
    if not 1 <= k <= most:
        raise DraftkitError(f"K = {k} draft tokens a round", where=where, expected=f"1 to {most}, {why}")


FOR_A_CHAIN = "leave out --tree for a chain"


def check_drafts_trees(target: Target, drafter: Drafter, where: str | None = None) -> None:
    """Raise `DraftkitError` where a target does not score trees, or a drafter does not draft them."""
    if target.without_trees is not None:
        raise DraftkitError(f"the target scores no tree: {target.without_trees}", hint=FOR_A_CHAIN)
    if not isinstance(drafter, Expands):
        what = "draftkit drafts no tree with a draft of this kind"
        raise DraftkitError(what, where=where, hint=FOR_A_CHAIN)


@cache
def _say_once(what: str) -> None:
    _log.warning("%s", what)


class Engine:
    """Generates for many requests at once, with a drafter or without.

    `num_slots` sequences run together; a finished one makes room for the next request. The tokens of a request depend
    on its own prompt, sampling parameters and seed, not on the others, up to the numerics of batched matrix products.

    - `verification`: `rejection` and `block` keep the target's distribution; `coupled` gives the very tokens of plain
      decoding at any temperature.
    - `draft_sampling`: how drafts are drawn.
    - `k_by_batch`: largest batch → K, for batches that should draft less; beyond the largest nothing is drafted.
    - `tree`: what is drafted instead of a chain; its depth is `num_speculative_tokens`. Whatever the verification, the
      output is that of `coupled`, and drafts are chosen, not drawn.
    - `eager`: launch every kernel from the host on a GPU too, instead of replaying rounds from CUDA graphs.
    - `estimates`: keep what the draft says of each of its tokens (`Round`), which costs a softmax for each.
    - `like`: whose rule holds where sequences grow beyond the drafter's positions: vLLM's first model runner drafts no
      more there (`vllm-v1`), its second drafts on (`vllm-v2`), as long as there are positions at all.
    - `compile`: on a CPU, run rounds as compiled programs, which takes a C++ compiler, and a minute at first for each
      kind of batch and K; they are kept for the next process. Without effect on a GPU.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        *,
        num_speculative_tokens: int,
        num_slots: int,
        verification: Verification = "rejection",
        draft_sampling: DraftSampling | None = None,
        k_by_batch: Mapping[int, int] | None = None,
        tree: DraftTree | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
        eager: bool = False,
        estimates: bool = False,
        like: Like = "vllm-v2",
        compile: bool = False,
    ):
        if drafter is None and num_speculative_tokens != 0:
            raise DraftkitError("drafting needs a draft", hint="set num_speculative_tokens to 0 for plain decoding")
        if drafter is not None:
            check_draft_tokens(num_speculative_tokens, drafter.max_tokens)
        if k_by_batch is not None:
            check_schedule(k_by_batch, num_speculative_tokens)
        if tree is not None and drafter is not None:
            assert tree.depth == num_speculative_tokens
            check_drafts_trees(target, drafter)
        if compile and target.device.type == "cpu":
            check_compiler()
        for module in (target.model, None if drafter is None else drafter.module):
            if module is not None:
                fuse(module)
                pack(module)
        self.target = target
        self.drafter = drafter
        self.k = num_speculative_tokens
        self.tree = tree if drafter is not None else None
        self._span = self.k if self.tree is None else self.tree.span  # cache entries of a round beyond the newest token
        self.num_slots = num_slots
        self.verification: Verification = verification
        self.draft_sampling = draft_sampling or DraftSampling()
        self.k_by_batch = dict(sorted((k_by_batch or {}).items()))
        self.prefill_chunk = prefill_chunk
        self.eager = eager
        self.estimates = estimates
        self.like: Like = like
        self.compile = compile and target.device.type == "cpu"
        self._capacity = 0  # positions of a slot, once reserved
        self._reach = 0  # tokens of the longest sequence in the last step, its drafts included
        self._running: dict[int, Request] = {}  # what the batch was made for
        self._batch: Batch | None = None
        self._rows: list[int] = []  # the slots of its rows, −1 for none

    @torch.inference_mode()
    @explains_memory
    def generate(
        self,
        prompts: Iterable[Request | Sequence[int]],
        sampling: SamplingParameters | None = None,
        *,
        max_new_tokens: int = 128,
        on_round: OnRound | None = None,
    ) -> list[Generation]:
        """Generate for all prompts: tokens, and the record of every round, in the order of the prompts.

        A prompt is token ids, or a `Request` that says everything itself. `sampling` (greedy by default) and
        `max_new_tokens` hold for ids; prompt i is drawn with the seed `sampling.seed` + i. `on_round` sees the
        generations that a round touched.

        Raises `DraftkitError` for an empty prompt, token ids that the target does not have, more tokens than it has
        positions for, and where memory does not suffice, be it told beforehand or met in the middle; `NonFiniteError`
        where a forward gives NaN or infinity.
        """
        sampling = sampling or SamplingParameters()
        generations = [
            Generation(self._request(i, prompt, sampling, max_new_tokens)) for i, prompt in enumerate(prompts)
        ]
        self.reserve(max((g.request.max_length for g in generations), default=0))
        queue = deque(generations)
        for _ in self._finished(lambda: queue.popleft() if queue else None, on_round):
            pass
        return generations

    def stream(self, ask: Callable[[], Request | None]) -> Iterator[Generation]:
        """Generate what `ask` gives, each as soon as a slot is free, and give each generation once it is finished.

        `ask` gives None where there is nothing now, and is asked again a round later; the end is where it gives None
        and nothing is under way. A request that is longer than all before it waits until those are finished, and room
        is made for it then. Raises as `generate`.
        """
        held: list[Generation] = []  # at most one, which there is no room for yet

        def take() -> Generation | None:
            if not held and (request := ask()) is not None:
                self._check(request)
                held.append(Generation(request))
            return held.pop() if held and self._has_room(held[0].request.max_length) else None

        while True:
            self.reserve(held[0].request.max_length if held else 0)
            found = self._finished(take)
            while (generation := self._next(found)) is not None:
                yield generation
            if not held:
                return

    @torch.inference_mode()
    @explains_memory
    def _next(self, found: Iterator[Generation]) -> Generation | None:
        return next(found, None)

    def _finished(self, take: Callable[[], Generation | None], notify: OnRound | None = None) -> Iterator[Generation]:
        """Run what `take` gives in the slots that are free, until it gives None and all are; each once it is finished.
        `notify` sees what each round has touched."""
        self._reach = 0
        active: dict[int, Generation] = {}
        free = list(range(self.num_slots))
        overlap = 0 if self.drafter is None else self.drafter.overlap
        prefill = Prefill(self.target, self._cache, self.prefill_chunk, overlap, self._prompts)
        while True:
            while free and (generation := take()) is not None:
                generation.started = time.perf_counter()
                prefill.add(generation, free.pop(0))
            if not (prefill or active):
                return
            for prompt in self._admit(prefill.step()) if prefill else ():
                if prompt.generation.finished is None:
                    active[prompt.slot] = prompt.generation
                else:
                    free.append(prompt.slot)
                    if notify is not None:
                        notify([prompt.generation])
                    yield prompt.generation
            if not active:
                continue
            touched = dict(sorted(active.items()))
            self._round(touched)
            if notify is not None:
                notify(list(touched.values()))
            for slot, generation in touched.items():
                if generation.finished is not None:
                    del active[slot]
                    free.append(slot)
                    yield generation

    def _request(
        self, number: int, prompt: Request | Sequence[int], sampling: SamplingParameters, max_new_tokens: int
    ) -> Request:
        if not isinstance(prompt, Request):
            prompt = Request(str(number), tuple(prompt), max_new_tokens, sampling.numbered(number))
        self._check(prompt)
        return prompt

    def _check(self, request: Request) -> None:
        if not request.prompt:
            raise DraftkitError(f"request {request.id} has an empty prompt")
        size = self.target.vocab_size
        foreign = next(((i, t) for i, t in enumerate(request.prompt) if not 0 <= t < size), None)
        if foreign is not None:
            raise DraftkitError(
                f"request {request.id}: token {foreign[0]} of the prompt has the id {foreign[1]}",
                expected=f"ids from 0 to {size - 1}, the target's vocabulary",
                hint="encode the prompt with the target's own tokenizer",
            )
        if request.max_new_tokens < 1:
            raise DraftkitError(
                f"request {request.id}: max_new_tokens is {request.max_new_tokens}", expected="1 or more"
            )
        if request.media is not None:
            check_media(self.target.model, request.media, f"request {request.id}")
            if (kind := self.target.model.config.model_type) not in HELD:
                _say_once(
                    f"answers about images by targets of type {kind} were not held against transformers' generate"
                )
        self.target.positions.check(request.id, len(request.prompt), request.max_new_tokens)

    @explains_memory
    def reserve(self, length: int) -> None:
        """Make room for sequences of `length` tokens in every slot. `generate` does it where there is none yet, or the
        drafter has made room for those of another engine since.

        Raises `DraftkitError` before anything is allocated where memory does not suffice.
        """
        taken = self.drafter is not None and _SERVED.get(id(self.drafter)) is not self
        if self._has_room(length) and not taken:
            return
        capacity = max(self._positions(length), self._capacity)
        self._release()
        rows = self.k if self.tree is None else self.tree.nodes
        require_memory(self.target, self.drafter, num_slots=self.num_slots, capacity=capacity, k=rows)
        self._cache = SlotCache(self.num_slots, capacity, self.k)
        if self.drafter is not None:
            self.drafter.allocate(self.num_slots, capacity, self.k)
            _SERVED[id(self.drafter)] = self
        device, dtype = self.target.device, self.target.dtype
        self._state = SlotState.empty(self.num_slots, self.k, self.target.feature_size, device, dtype)
        parts = (
            self.target, self.drafter, self._cache, self._state, self.verification,
            self.draft_sampling.min_confidence, self.estimates, may_look(self.target),
        )  # fmt: skip
        rounds = Rounds(*parts) if self.tree is None else TreeRounds(self.tree, *parts)
        self._rounds: Rounds | GraphedRounds | CompiledRounds = rounds
        self._prompts: CompiledPrompts | None = None
        if capturable(self.target) and not self.eager:
            self._rounds = GraphedRounds(rounds, self.num_slots, capacity, CudaCapture())
        elif self.compile and not self.eager:
            from draftkit.runtime.compiled.prompts import CompiledPrompts  # imports much
            from draftkit.runtime.compiled.rounds import CompiledRounds

            self._rounds = CompiledRounds(rounds, capacity)
            self._prompts = CompiledPrompts(self.target, self._cache) if self.target.joins_prompts else None
        self._capacity = capacity

    @property
    def capacity(self) -> int:
        """The positions of a slot, 0 before there are any."""
        return self._capacity

    def _positions(self, length: int) -> int:
        """Those of a slot that sequences of `length` tokens take: a round may overshoot the end."""
        return length + self._span + 1 + self.compile  # and compiled rounds have one entry for rows that are not there

    def _has_room(self, length: int) -> bool:
        return self._positions(length) <= self._capacity

    def _release(self) -> None:
        """Give back the room of every slot: what is asked for next need not fit beside it."""
        self._capacity = 0
        for kept in ("_cache", "_state", "_rounds", "_prompts"):
            vars(self).pop(kept, None)
        if self.drafter is not None:
            self.drafter.allocate(0, 0, max(self.k, 1))

    @torch.inference_mode()
    @explains_memory
    def warm_up(self, requests: Sequence[Request]) -> None:
        """Do once what a run of these requests would do for the first time in the middle of being timed.

        Kernels are compiled, and on a GPU rounds are captured: those of every number of sequences that may run
        together, with the K that goes with it, and of every mix of the ways in which `requests` are drawn. On a GPU,
        where libraries load other kernels for a prefill of another length, one of each length is run.
        """
        if self.target.device.type == "cuda":
            _say_once(f"kernels are compiled, and rounds prepared for {self._say_sizes()} together: minutes, at first")
        by_length = {len(request.prompt): request for request in requests}
        prompts = by_length.values() if self.target.device.type == "cuda" else requests[: self.num_slots]
        few, room = 2 * (self.k + 1), self.target.positions.room
        self.generate([replace(request, max_new_tokens=min(few, room(len(request.prompt)))) for request in prompts])
        limit = self._limit
        modes = (True,) if limit is None or self._capacity + self.k <= limit else (True, False)
        ways = {Batch.of({0: one}, self.draft_sampling, torch.device("cpu")).kind: one for one in requests}.values()
        mixes = [mix for count in range(1, len(ways) + 1) for mix in combinations(ways, count)]
        for sequences in self._batch_sizes():
            k, rows = self._k_for(sequences), self._rounds.rows(range(sequences))
            for mix in mixes:
                running = dict(enumerate(islice(cycle(mix), sequences)))
                vacant = Batch.of(running, self.draft_sampling, self.target.device, rows).vacant()  # leaves no trace
                for drafting in modes:
                    self._rounds.run(vacant, k, self._capacity, drafting=drafting)

    def _say_sizes(self) -> str:
        sizes = [str(sequences) for sequences in self._batch_sizes()]
        return f"{', '.join(sizes)} sequence{'s' * (sizes != ['1'])}"

    def _batch_sizes(self) -> list[int]:
        """Numbers of sequences that stand for all: of each size that graphs are captured for, with each K."""
        edges = {sequences for edge in self.k_by_batch for sequences in (edge, edge + 1)}
        powers = {1 << power for power in range(self.num_slots.bit_length())}
        return sorted(n for n in powers | edges | {self.num_slots} if 1 <= n <= self.num_slots)

    def _admit(self, pieces: Sequence[Prefilled]) -> Sequence[Prefilled]:
        """Have the drafter take in what the target has, and start the sequences whose prompts are complete, with the
        target's first tokens. Returns these."""
        self._prefill_drafter(pieces)
        prompts = [piece for piece in pieces if piece.complete]
        if not prompts:
            return prompts
        logits = torch.stack([prompt.logits for prompt in prompts])
        firsts = self._first_tokens([prompt.generation.request for prompt in prompts], logits)
        for prompt, first in zip(prompts, firsts, strict=True):
            length, features = prompt.piece.end, prompt.features
            self._reach = max(self._reach, length)
            self._state.admit(prompt.slot, length, first, None if features is None else features[-1], prompt.shift)
        known = torch.stack((firsts, has_finite_peak(logits)), dim=1).tolist()
        for prompt, (token, usable) in zip(prompts, known, strict=True):
            if not usable:
                raise self._broken("target", prompt.generation)
            self._extend(prompt.generation, [token])
        return prompts

    def _prefill_drafter(self, pieces: Sequence[Prefilled]) -> None:
        """Have the drafter take in pieces of prompts after which a whole draft fits it."""
        if self.drafter is None:
            return
        fitting = (piece for piece in pieces if self._can_draft(len(piece.generation.request.prompt)))
        taken = [sequence for piece in fitting if (sequence := piece.sequence(self.target.device)) is not None]
        if taken:
            self.drafter.prefill(taken)

    def _first_tokens(self, requests: Sequence[Request], logits: Tensor) -> Tensor:
        """The tokens int64 [n] after prompts, from `logits` [n, V]; drawn with the target's own noise."""
        if not any(request.sampling.temperature for request in requests):
            return logits.max(-1).indices  # `argmax` is slow in bfloat16
        parameters = SamplingTensors.of([request.sampling for request in requests], logits.device)
        at = torch.tensor([len(request.prompt) for request in requests], device=logits.device)
        return draw_token(logits, parameters, at, at, coupled=True)

    def _round(self, active: dict[int, Generation]) -> None:
        """One round for the active slots, ascending; one transfer to the host at its end."""
        longest = max(g.length for g in active.values())
        k, drafting = self._k_for(len(active)), self._can_draft(self._reach)
        self._reach = longest + self.k
        reach = k if self.tree is None else self._span
        packed = self._rounds.run(self._batch_of(active), k, longest + reach, drafting=drafting)
        found = outcomes(packed, k) if self.tree is None else tree_outcomes(packed, k)
        taken = (outcome for outcome, slot in zip(found, self._rows, strict=True) if slot >= 0)
        for generation, outcome in zip(active.values(), taken, strict=True):
            if outcome.broken is not None:
                raise self._broken(outcome.broken, generation)
            self._record(generation, outcome, beyond=not drafting and k > 0)

    def _can_draft(self, reach: int) -> bool:
        """Whether a whole draft fits the drafter after a step whose longest sequence had `reach` tokens.

        As in vLLM's `_input_fits_in_drafter`, one sequence that is too long stops drafting for the whole batch, and a
        step counts with all of its drafts, accepted or not.
        """
        limit = self._limit
        return limit is None or reach + self.k <= limit

    @property
    def _limit(self) -> int | None:
        """The tokens of a sequence, drafts included, from which on nothing is drafted; None for no limit."""
        stops = self.drafter is not None and (self.like == "vllm-v1" or self.drafter.positions_end)
        return self.drafter.max_positions if stops and self.drafter is not None else None

    def _broken(self, whose: Broken, generation: Generation) -> NonFiniteError:
        self._capacity = 0  # no cache that may hold NaN is used again
        where = f"request {generation.request.id}, after {generation.length} tokens"
        return NonFiniteError(f"the {whose}'s forward gives NaN or infinity: {where}", hint=HINT)

    def _k_for(self, batch: int) -> int:
        """How many tokens are drafted in a round with a batch of this size."""
        if not self.k_by_batch:
            return self.k
        return next((k for largest, k in self.k_by_batch.items() if batch <= largest), 0)

    def _batch_of(self, active: dict[int, Generation]) -> Batch:
        """The batch of the active slots, made anew only when they or their requests have changed."""
        running = {slot: generation.request for slot, generation in active.items()}
        if self._batch is None or self._running != running:
            self._rows = self._rounds.rows(sorted(running))
            self._batch = Batch.of(running, self.draft_sampling, self.target.device, self._rows)
            self._running = running
        return self._batch

    def _record(self, generation: Generation, outcome: Outcome, *, beyond: bool) -> None:
        position = generation.length
        emitted = self._extend(generation, outcome.emitted)
        accepted = len(outcome.emitted) - 1
        drafted = len(outcome.proposal)
        generation.rounds.append(
            Round(
                position,
                drafted,
                accepted,
                emitted,
                outcome.expected,
                outcome.proposal,
                beyond,
                outcome.confidences,
                outcome.probabilities,
                outcome.parents,
            )
        )

    def _extend(self, generation: Generation, tokens: list[int]) -> int:
        """Append tokens up to one that ends the generation or the length limit; return how many were appended."""
        generation.times.append(time.perf_counter())
        appended = 0
        for token in tokens:
            generation.tokens.append(token)
            appended += 1
            generation.finished = self._end(generation, token)
            if generation.finished is not None:
                break
        return appended

    def _end(self, generation: Generation, token: int) -> FinishReason | None:
        request = generation.request
        if token in self.target.eos_token_ids and not request.ignore_eos:
            return "eos"
        if token in request.stop_token_ids:
            return "stop"
        return "length" if len(generation.tokens) >= request.max_new_tokens else None
