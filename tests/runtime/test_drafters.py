"""Every drafter against straight-line references, over random acceptance, and in the engine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
import pytest
import torch
from fixtures.checkpoints import pico
from fixtures.engines.draft_references import H, K, Tensors, V, chain, llama, pard_reference, within
from fixtures.engines.drafter_cases import (
    CASES,
    Case,
    Load,
    llama_draft,
    mlp_head,
    p_eagle,
    pard2,
    requests,
    sampled,
    target,
)
from fixtures.examples import examples
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from draftkit.errors import DraftkitError, LayoutError, NonFiniteError, TargetError
from draftkit.layout.families.ngram import NgramSpec
from draftkit.layout.families.suffix import SuffixSpec
from draftkit.requests import DraftSampling, Request, SamplingParameters
from draftkit.runtime import prefill
from draftkit.runtime.cache import CacheRows, SlotCache
from draftkit.runtime.drafters.causal_lm import CausalLMDrafter, SharedVocabulary
from draftkit.runtime.drafters.dflash import DFlashDrafter
from draftkit.runtime.drafters.eagle import EagleDrafter
from draftkit.runtime.drafters.ngram import NgramDrafter
from draftkit.runtime.drafters.protocol import Committed, Drafter, NewSequence, Proposal
from draftkit.runtime.drafters.suffix import SuffixDrafter
from draftkit.runtime.engine import Engine
from draftkit.runtime.records import Generation
from draftkit.targets.target import Target
from draftkit.targets.tokens import same_vocabulary, token_names

# --- Made-up decoding: a target whose tokens, features and verdicts are random


class Recorder:
    """Draws greedily and keeps the logits."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []
        self.ids: Tensor | None = None

    def __call__(self, step: int, logits: Tensor, ids: Tensor | None = None) -> Tensor:
        assert step == len(self.logits)
        self.logits.append(logits)
        self.ids = ids
        best = logits.argmax(-1)
        return best if ids is None else ids[best]


class Decoding:
    """Sequences whose every round accepts a random number of drafts; rejected slots hold junk and NaN."""

    LENGTH = 48

    def __init__(self, drafter: Drafter, feature_size: int, num_slots: int, tokens: Tensor | None = None):
        self.generator = torch.Generator().manual_seed(num_slots)
        self.drafter = drafter
        random = torch.randint(3, V, (num_slots, self.LENGTH), generator=self.generator)
        self.tokens = random if tokens is None else tokens
        self.features = torch.randn(num_slots, self.LENGTH, feature_size, generator=self.generator)
        self.known = [0] * num_slots
        self.pending = [0] * num_slots
        drafter.allocate(num_slots, self.LENGTH + K, K)

    def admit(self, lengths: Mapping[int, int], size: int | None = None) -> None:
        """Start sequences together: by slot the length of a prompt, after which the target's first token stands. With
        `size` the drafter is given pieces of so many positions, one after the other."""
        prompts = []
        for slot, length in lengths.items():
            features = self.features[slot, :length] if self.features.shape[-1] else None
            prompts.append(NewSequence(slot, self.tokens[slot, :length], features))
            self.known[slot], self.pending[slot] = length + 1, 1
        if size is None or not self.features.shape[-1]:
            self.drafter.prefill(prompts)
            return
        for done in range(0, max(lengths.values()), size):
            left = (prompt for prompt in prompts if len(prompt.tokens) > done)
            self.drafter.prefill([self._piece(prompt, done, done + size) for prompt in left])

    def _piece(self, prompt: NewSequence, begin: int, end: int) -> NewSequence:
        begin = max(begin - self.drafter.overlap, 0)
        assert prompt.features is not None
        return NewSequence(prompt.slot, prompt.tokens[begin:end], prompt.features[begin:end], begin, len(prompt.tokens))

    def propose(self, slots: Sequence[int]) -> tuple[Proposal, Recorder]:
        draw = Recorder()
        return self.drafter.propose(self.committed(slots), K, draw), draw

    def committed(self, slots: Sequence[int]) -> Committed:
        tokens = torch.randint(3, V, (len(slots), K + 1), generator=self.generator)
        features = torch.full((len(slots), K + 1, self.features.shape[-1]), torch.nan)
        start = [self.known[slot] - self.pending[slot] for slot in slots]
        for row, (slot, first) in enumerate(zip(slots, start, strict=True)):
            tokens[row, : self.pending[slot]] = self.tokens[slot, first : self.known[slot]]
            features[row, : self.pending[slot]] = self.features[slot, first - 1 : self.known[slot] - 1]
        return Committed(
            slots=torch.tensor(slots),
            tokens=tokens,
            counts=torch.tensor([self.pending[slot] for slot in slots]),
            start=torch.tensor(start),
            features=features if self.features.shape[-1] else None,
            length=max(self.known[slot] for slot in slots) + K,
        )

    def accept(self, slot: int) -> None:
        """A random number of drafts, and the target's own token."""
        self.pending[slot] = int(torch.randint(1, K + 2, (1,), generator=self.generator))
        self.known[slot] += self.pending[slot]

    def rounds(self, count: int) -> Iterator[tuple[list[int], Proposal, Recorder]]:
        """Random rounds of random subsets of the slots, each as it stands before it is judged."""
        for _ in range(count):
            chosen = torch.rand(len(self.known), generator=self.generator) < 0.8
            chosen[int(torch.randint(len(self.known), (1,), generator=self.generator))] = True
            slots = chosen.nonzero()[:, 0].tolist()
            yield slots, *self.propose(slots)
            for slot in slots:
                self.accept(slot)


def started(case: Case, num_slots: int, size: int | None = None) -> Decoding:
    decoding = Decoding(case.drafter, case.feature_size, num_slots)
    decoding.admit(dict(zip(range(num_slots), (7, 1, 12, 3), strict=False)), size)
    return decoding


@pytest.mark.slow
@pytest.mark.parametrize("num_slots", [1, 4])
def test_proposals_equal_the_reference(case: Case, num_slots: int) -> None:
    check_proposals(case, started(case, num_slots), rounds=3)


def test_prompts_may_be_taken_in_by_pieces(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of which end in the middle of one, and begin there."""
    monkeypatch.setattr(prefill, "PREFILL_CHUNK", 5)
    check_proposals(case, started(case, num_slots=4), rounds=1)


@pytest.mark.parametrize("size", [1, 4])
def test_a_drafter_follows_a_prompt_that_the_target_takes_in_by_pieces(case: Case, size: int) -> None:
    check_proposals(case, started(case, num_slots=4, size=size), rounds=1)


def check_proposals(case: Case, decoding: Decoding, *, rounds: int) -> None:
    for slots, proposal, draw in decoding.rounds(rounds):
        assert proposal.lengths is None
        for row, slot in enumerate(slots):
            known = decoding.known[slot]
            expected = case.reference(decoding.tokens[slot, :known], decoding.features[slot, : known - 1])
            logits = torch.stack([step[row] for step in draw.logits])
            atol = 1e-3 * float(expected[expected.isfinite()].std())
            torch.testing.assert_close(logits, expected, rtol=0, atol=atol)
            best = expected.argmax(-1)
            assert proposal.tokens[row].tolist() == (best if case.ids is None else case.ids[best]).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["draft model", "PARD", "PARD-2", "EAGLE-1", "EAGLE-3", "P-EAGLE", "DFlash", "DSpark"])
@pytest.mark.parametrize(("window", "sink_tokens"), [(4, 0), (3, 2)])
def test_a_window_and_first_tokens_are_facts_of_every_draft_that_attends(
    name: str, window: int, sink_tokens: int, load: Load
) -> None:
    facts = {"sliding_window": window, "sink_tokens": sink_tokens}
    case = CASES[name](partial(load, facts=facts))
    case = replace(case, reference=within(window, sink_tokens, case.reference))
    check_proposals(case, started(case, 4), rounds=3)


@pytest.mark.slow
@pytest.mark.parametrize("case", [name for name in CASES if not name.startswith("MLP")], indirect=True, scope="module")
def test_caches_equal_those_of_a_fresh_prefill(case: Case) -> None:
    drafter = case.drafter
    assert isinstance(drafter, CausalLMDrafter | EagleDrafter | DFlashDrafter)
    decoding = started(case, 4)
    seen: dict[int, int] = {}
    for slots, _, _ in decoding.rounds(6):
        seen |= {slot: decoding.known[slot] for slot in slots}
    used = drafter.cache
    for slot, known in seen.items():
        drafter.allocate(1, Decoding.LENGTH, K)
        features = decoding.features[slot, :known] if case.feature_size else None
        drafter.prefill([NewSequence(0, decoding.tokens[slot, :known], features)])
        waiting = isinstance(drafter, EagleDrafter | DFlashDrafter)  # the last state waits for the token after it
        valid = known - waiting
        assert len(drafter.cache.layers) == len(used.layers) > 0
        for layer, pools in drafter.cache.layers.items():
            for fresh, pool in zip(pools, used.layers[layer], strict=True):
                torch.testing.assert_close(pool[slot, :, :valid], fresh[0, :, :valid], rtol=1e-3, atol=1e-3)


# --- In the engine


def generate(drafter: Drafter | None, wanted: Sequence[Request], num_slots: int, k: int = 3) -> list[Generation]:
    engine = Engine(
        Target(target(), drafter.aux_layers if drafter else None), drafter, num_speculative_tokens=k if drafter else 0,
        num_slots=num_slots, verification="coupled", draft_sampling=DraftSampling(mode="probabilistic"),
    )  # fmt: skip
    return engine.generate(wanted)


@cache
def plain(wanted: tuple[Request, ...]) -> list[list[int]]:
    return [g.tokens for g in generate(None, wanted, 1)]


def check_output(drafter: Drafter, settings: Sequence[tuple[int, int]]) -> list[Generation]:
    """With these numbers of slots and of draft tokens, the output is plain decoding's. Returns the last greedy run."""
    for num_slots, k in settings:
        assert [g.tokens for g in generate(drafter, sampled(), num_slots, k)] == plain(sampled())
        generations = generate(drafter, requests(), num_slots, k)
        assert [g.tokens for g in generations] == plain(requests())
    return generations


BATCHES_AND_K = ((1, 2), (3, 1), (3, K))


@pytest.mark.slow
@pytest.mark.few(4)
def test_output_equals_plain_decoding(case: Case) -> None:
    check_output(case.drafter, BATCHES_AND_K)


def poison_before_every_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the rows of a forward must not see is NaN: what is new in a cache, and from their first entry on.

    Whatever was there, of rejected tokens, mask rows and earlier sequences, is thereby replaced before it is seen.
    """
    rows_of = SlotCache.rows

    def rows(cache: SlotCache, slots: Tensor, positions: Tensor, length: int, **options: bool) -> CacheRows:
        for slot, row in zip(slots.tolist(), positions, strict=True):
            for pool in (pool for pools in cache.layers.values() for pool in pools):
                pool[slot, :, int(row[row >= 0].min()) :] = torch.nan
            cache.written[slot] = cache.capacity
        return rows_of(cache, slots, positions, length, **options)

    new = SlotCache._pool
    monkeypatch.setattr(SlotCache, "rows", rows)
    monkeypatch.setattr(SlotCache, "_pool", lambda cache, like: new(cache, like).fill_(torch.nan))


@pytest.mark.slow
@pytest.mark.few(3)
def test_nan_that_no_row_sees_reaches_no_output(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain(sampled()), plain(requests())
    poison_before_every_forward(monkeypatch)
    for wanted, tokens in zip((sampled(), requests()), expected, strict=True):
        assert [g.tokens for g in generate(case.drafter, wanted, 3)] == tokens


def test_nan_would_reach_the_logits_of_a_cache_that_clears_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_before_every_forward(monkeypatch)
    monkeypatch.setattr(SlotCache, "left_over", lambda *_: [])
    with pytest.raises(NonFiniteError, match="the target's forward gives NaN or infinity"):
        generate(None, requests(), 3)


def test_a_draft_without_enough_heads_is_refused(load: Load) -> None:
    with pytest.raises(DraftkitError, match="K = 5 draft tokens a round\n  expected: 1 to 4"):
        generate(mlp_head(load, tied=True).drafter, requests(), 1, k=5)


@pytest.mark.parametrize("bias", [False, True])
def test_features_of_pard2_are_the_hidden_states_that_transformers_numbers(bias: bool, load: Load) -> None:
    drafter = pard2(load, bias).drafter
    tokens, positions = torch.tensor([requests()[0].prompt]), torch.arange(15)[None]
    rows = SlotCache(1, 15).rows(torch.tensor([0]), positions, 15)
    features = Target(target(), drafter.aux_layers).forward(tokens, positions, rows).features
    reference = pico.llama(eos_token_id=None)(tokens, output_hidden_states=True).hidden_states
    assert features is not None
    torch.testing.assert_close(features, torch.cat([reference[i] for i in (-1, 5, -8)], dim=-1), rtol=1e-4, atol=1e-4)


# --- N-grams


def longest_earliest(text: list[int], min_n: int, max_n: int) -> list[int]:
    """What followed the text's end where it stood before."""
    for n in range(min(max_n, len(text) - 1), min_n - 1, -1):
        for start in range(len(text) - n):
            if text[start : start + n] == text[-n:]:
                return text[start + n : start + n + K]
    return []


@pytest.mark.parametrize("num_slots", [1, 4])
@pytest.mark.parametrize("limits", [(1, 1), (1, 3), (2, 2), (2, 5)], ids=str)
def test_ngrams_are_the_earliest_of_the_longest(limits: tuple[int, int], num_slots: int) -> None:
    drafter = NgramDrafter(V, min_n=limits[0], max_n=limits[1])
    text = torch.randint(0, 3, (num_slots, Decoding.LENGTH), generator=torch.Generator().manual_seed(1))
    decoding = Decoding(drafter, 0, num_slots, text)
    lengths = set()
    for slot in range(num_slots):
        decoding.admit({slot: slot + 1})
    for slots, proposal, _ in decoding.rounds(8):
        assert proposal.lengths is not None
        for row, slot in enumerate(slots):
            expected = longest_earliest(decoding.tokens[slot, : decoding.known[slot]].tolist(), *limits)
            assert proposal.tokens[row, : proposal.lengths[row]].tolist() == expected
            lengths.add(len(expected))
    assert {0, K} <= lengths


def test_ngram_of_vllm() -> None:
    drafter = NgramDrafter(V, min_n=1, max_n=3)
    decoding = Decoding(drafter, 0, 1, torch.tensor([[1, 2, 3, 9, 1, 2, 3]]))
    decoding.admit({0: 6})
    proposal, _ = decoding.propose([0])
    assert proposal.tokens.tolist() == [[9, 1, 2, 3]]


@pytest.mark.slow
def test_ngrams_in_the_engine() -> None:
    """The tokens are certain: sampled requests accept them with the target's probability of them, and no more."""
    generations = check_output(NgramDrafter(V, min_n=2, max_n=4), BATCHES_AND_K)
    drafted = {r.drafted for g in generations for r in g.rounds}
    assert 0 in drafted
    assert drafted - {0}
    wanted = tuple(Request(str(i), (7, 8, 9) * 4, 30, SamplingParameters(temperature=1.5, seed=i)) for i in range(12))
    engine = Engine(
        Target(target()), NgramDrafter(V, min_n=1, max_n=3), num_speculative_tokens=3, num_slots=12,
        draft_sampling=DraftSampling(mode="probabilistic"),
    )  # fmt: skip
    rounds = [r for g in engine.generate(wanted) for r in g.rounds if r.drafted]
    reached = [r.expected[i] for r in rounds for i in range(min(r.accepted + 1, r.drafted))]
    accepted = sum(r.accepted for r in rounds)
    assert abs(accepted - sum(reached)) < 4 * math.sqrt(sum(p * (1 - p) for p in reached) + 1)


def test_impossible_ngrams_are_refused() -> None:
    with pytest.raises(DraftkitError, match="n-grams of 3 to 2 tokens"):
        NgramSpec(min_n=3, max_n=2)


# --- Suffix decoding


def most_frequent_path(text: list[int], k: int, spec: SuffixSpec) -> list[int]:
    """The published rule, straight: for each match, count what follows its occurrences token by token."""
    best, best_score = [], 0.0
    for size in range(1, min(len(text), spec.max_depth)):
        match = text[len(text) - size :]
        path, score, frequency = [], 0.0, np.float32(1)
        before = ends_of(text, match)
        while len(path) < min(k, int(size * spec.max_spec_factor + 1e-6)) and size + len(path) < spec.max_depth:
            followers = [text[end + 1] for end in before if end + 1 < len(text)]
            if not followers:
                break
            most = max(map(followers.count, followers))
            last = {token: at for at, token in enumerate(followers) if followers.count(token) == most}
            token = max(last, key=last.__getitem__) if most > 1 else followers[0]
            frequency *= np.float32(most) / np.float32(len(before))
            if frequency < np.float32(spec.min_token_prob):
                break
            path.append(token)
            score += frequency
            before = ends_of(text, match + path)
        if score >= best_score:
            best, best_score = path, score
    return best


def ends_of(text: list[int], part: list[int]) -> list[int]:
    return [end for end in range(len(part) - 1, len(text)) if text[end - len(part) + 1 : end + 1] == part]


def suffix(**facts: float) -> SuffixSpec:
    return SuffixSpec(**({"max_depth": 24, "max_spec_factor": 1.0, "min_token_prob": 0.1} | facts))


@examples(150)
@given(
    texts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=40), min_size=1, max_size=4),
    spec=st.builds(
        suffix,
        max_depth=st.sampled_from([2, 5, 24]),
        max_spec_factor=st.sampled_from([0.5, 1.0, 3.0]),
        min_token_prob=st.sampled_from([0.0, 0.1, 0.5]),
    ),
    k=st.integers(1, 8),
)
def test_suffix_decoding_is_the_published_rule(texts: list[list[int]], spec: SuffixSpec, k: int) -> None:
    """In ragged batches, whatever lies behind the texts."""
    context = torch.full((len(texts), max(map(len, texts)) + k + 1), 1)
    for row, text in enumerate(texts):
        context[row, : len(text)] = torch.tensor(text)
    known = torch.tensor([len(text) for text in texts])
    tokens, lengths = SuffixDrafter(3, spec).look_up(context, known, k)
    for row, text in enumerate(texts):
        assert tokens[row, : lengths[row]].tolist() == most_frequent_path(text, k, spec)


@pytest.mark.parametrize(
    ("text", "drafts"),
    [
        # What SuffixTree::speculate of arctic-inference 0.3.0 returned, with K=4 and the settings of `suffix`.
        ([1, 2, 3, 9, 1, 2, 3], [9, 1, 2]),
        ([5, 6, 7, 5, 6, 8, 5, 6, 8, 5, 6], [8, 5, 6]),
        ([1, 2, 3, 4, 5, 6], []),
        ([4, 4, 4, 4, 4, 4, 4, 4], [4, 4, 4, 4]),
    ],
)
def test_suffix_decoding_of_vllm(text: list[int], drafts: list[int]) -> None:
    tokens, lengths = SuffixDrafter(V, suffix()).look_up(torch.tensor([text]), torch.tensor([len(text)]), 4)
    assert tokens[0, : lengths[0]].tolist() == drafts


@pytest.mark.parametrize("num_slots", [1, 4])
def test_suffixes_of_running_sequences(num_slots: int) -> None:
    drafter = SuffixDrafter(V, suffix())
    text = torch.randint(0, 3, (num_slots, Decoding.LENGTH), generator=torch.Generator().manual_seed(1))
    decoding = Decoding(drafter, 0, num_slots, text)
    for slot in range(num_slots):
        decoding.admit({slot: slot + 1})
    for slots, proposal, _ in decoding.rounds(8):
        assert proposal.lengths is not None
        for row, slot in enumerate(slots):
            expected = most_frequent_path(decoding.tokens[slot, : decoding.known[slot]].tolist(), K, drafter.spec)
            assert proposal.tokens[row, : proposal.lengths[row]].tolist() == expected


@pytest.mark.slow
def test_suffixes_in_the_engine() -> None:
    generations = check_output(SuffixDrafter(V, suffix()), BATCHES_AND_K)
    assert {r.drafted for g in generations for r in g.rounds} > {0}


# --- Drafts with another tokenizer


def tokenizer_of(words: Sequence[str], specials: Sequence[str] = ()) -> PreTrainedTokenizerBase:
    """A tokenizer with these words as ids 0, 1, …, then the special tokens; the last of those ends a text."""
    tokenizer = Tokenizer(BPE({word: index for index, word in enumerate(words)}, merges=[]))
    tokenizer.add_special_tokens([AddedToken(special, special=True) for special in specials])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=specials[-1] if specials else None)


def test_tokens_are_compared_as_bytes() -> None:
    byte_level = tokenizer_of(["a", "Ġa", "Ã©", "Ċ", "ĠĠ"], ["<s>"])
    sentencepiece = tokenizer_of(["▁a", "é", "Ã", "<0x0A>", "a", "▁▁", "<0xZZ>"], ["<s>", "</s>"])
    assert token_names(byte_level, 9) == {b"a": 0, b" a": 1, "é".encode(): 2, b"\n": 3, b"  ": 4, "<s>": 5}
    shared = SharedVocabulary.of(
        byte_level, sentencepiece, vocab_size=8, draft_vocab_size=9, device=torch.device("cpu")
    )
    assert shared.draft_ids.tolist() == [0, 1, 3, 4, 5, 7]
    assert shared.target_ids.tolist() == [1, 2, 3, 0, 4, 5]
    assert shared.to_draft.tolist() == [4, 0, 1, 3, 5, 7, 8, 8]  # what the draft lacks is its end token


def test_special_tokens_do_not_make_another_vocabulary() -> None:
    ours, theirs = tokenizer_of(["a", "b"], ["<s>"]), tokenizer_of(["a", "b"], ["<|start|>"])
    assert same_vocabulary(ours, theirs, 3)
    assert not same_vocabulary(ours, tokenizer_of(["b", "a"], ["<s>"]), 3)


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (tokenizer_of(["x"], ["</s>"]), "no token in common"),
        (tokenizer_of(["a"]), "neither an unknown nor an end token"),
    ],
)
def test_tokenizers_that_do_not_go_together(draft: PreTrainedTokenizerBase, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        SharedVocabulary.of(tokenizer_of(["a"]), draft, vocab_size=2, draft_vocab_size=2, device=torch.device("cpu"))


WORDS = [chr(0x100 + i // 16) + chr(0x110 + i % 16) for i in range(V - 1)]  # byte-level words of two bytes


@dataclass(frozen=True)
class Foreign:
    """A draft whose tokenizer has some of the target's words in another order."""

    kept: Tensor  # target ids, in the draft's order

    @property
    def tokenizers(self) -> tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase]:
        return tokenizer_of(WORDS, ["</s>"]), tokenizer_of([WORDS[i] for i in self.kept.tolist()], ["</s>"])

    def rows(self, matrix: Tensor) -> Tensor:
        """The rows of a matrix over the target's vocabulary, for the draft's, whose last token ends a text."""
        return matrix[torch.cat((self.kept, torch.tensor([V - 1])))]

    @property
    def config(self) -> dict[str, int]:
        return {"vocab_size": len(self.kept) + 1}


def shuffled(size: int) -> Tensor:
    return torch.randperm(V - 1, generator=torch.Generator().manual_seed(3))[:size]


def renumbered(w: Tensors, foreign: Foreign) -> Tensors:
    matrices = ("model.embed_tokens.weight", "lm_head.weight")
    return {name: foreign.rows(tensor) if name in matrices else tensor for name, tensor in w.items()}


@pytest.mark.slow
def test_another_numbering_of_the_same_words_changes_nothing(load: Load) -> None:
    """The target as its own draft, renumbered: all is accepted."""
    foreign = Foreign(shuffled(V - 1))
    model = pico.llama(eos_token_id=None)
    w = renumbered(dict(model.state_dict()), foreign)
    drafter = load(model.config.to_dict(), w, tokenizers=foreign.tokenizers, known=False)
    assert isinstance(drafter, CausalLMDrafter)
    assert drafter.vocabulary is not None
    generations = check_output(drafter, BATCHES_AND_K)
    assert {r.accepted for g in generations for r in g.rounds} == {K}


def test_the_same_tokenizer_needs_no_map(load: Load) -> None:
    config, w = llama_draft()
    words = tokenizer_of(WORDS, ["</s>"])
    drafter = load(config, w, tokenizers=(words, words))
    assert isinstance(drafter, CausalLMDrafter)
    assert drafter.vocabulary is None


@pytest.mark.long
@pytest.mark.parametrize("mask", [None, 5])
def test_a_draft_with_fewer_words_equals_the_reference(mask: int | None, load: Load) -> None:
    """It reads its end token where it lacks a word, and proposes words that it shares only."""
    foreign = Foreign(shuffled(200))
    config, w = llama_draft(**foreign.config, **({} if mask is None else {"pard_token": mask}))
    w = renumbered(w, foreign)
    ids = torch.cat((foreign.kept, torch.tensor([V - 1])))
    own = torch.full((V,), 200)
    own[ids] = torch.arange(201)

    def chained(tokens: Tensor, _: Tensor) -> Tensor:
        return chain(lambda known: llama(w, w["model.embed_tokens.weight"][own[known]])[-1], ids, tokens)

    def parallel(tokens: Tensor, features: Tensor) -> Tensor:
        return pard_reference(w, 5, own[tokens], features)

    drafter = load(config, w, tokenizers=foreign.tokenizers, known=False)
    test_proposals_equal_the_reference(Case(drafter, chained if mask is None else parallel, ids), 4)
    check_output(drafter, BATCHES_AND_K)


# --- Drafts that do not fit


def test_a_mask_token_beyond_the_vocabulary_is_refused(load: Load) -> None:
    with pytest.raises(LayoutError, match="mask token is 320; the draft has 320 tokens"):
        p_eagle(load, mask=320)


@pytest.mark.parametrize(
    ("layers", "size", "message"),
    [
        ([-1, 9], 2 * H, "reads hidden state 9; the target has 9"),
        ([-1], 3 * H, "features of 192 numbers from 1 layers"),
    ],
)
def test_pard2_of_another_target_is_refused(layers: list[int], size: int, message: str, load: Load) -> None:
    keys = {"pard_token": 300, "spd_type": "pard2", "pard2_target_dim": size, "pard2_target_layers": layers}
    with pytest.raises(TargetError, match=message):
        load(*llama_draft(**keys), {"target_proj.weight": torch.zeros(H, size)}, known=False)
