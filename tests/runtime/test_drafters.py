"""Every drafter against straight-line references, over random acceptance, and in the engine.

The references follow the published descriptions (facts: runtime.md 1.12, formats.md 10–13). They work on the foreign
checkpoint's own tensors and recompute everything from position 0; they share no code with modules, caches or
transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from fixtures import pico
from fixtures.published import medusa, mlp_speculator, speculators
from test_eagle_reference import attend, eagle3_reference, eagle_reference, mlp, rms
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from draftkit.convert.api import convert_checkpoint
from draftkit.doctor.patient import changed
from draftkit.errors import DraftkitError, LayoutError, TargetError
from draftkit.layout.families.causal_lm import CausalLMSpec
from draftkit.layout.folder import read_draft
from draftkit.loading import load_drafter
from draftkit.models.target import FINAL, Target
from draftkit.models.tokens import same_vocabulary, token_names
from draftkit.requests import DraftSampling, Request, SamplingParameters
from draftkit.runtime.attention import NAME as ATTENTION
from draftkit.runtime.cache import CacheRows, SlotCache
from draftkit.runtime.drafters.causal_lm import CausalLMDrafter
from draftkit.runtime.drafters.causal_lm_parallel import PardDrafter
from draftkit.runtime.drafters.eagle import EagleDrafter
from draftkit.runtime.drafters.ngram import NgramDrafter
from draftkit.runtime.drafters.protocol import Committed, Drafter, Proposal
from draftkit.runtime.drafters.shared_vocabulary import SharedVocabulary
from draftkit.runtime.engine import Engine
from draftkit.runtime.records import Generation

V, H, LAYERS = pico.VOCABULARY, pico.HIDDEN, pico.LAYERS
K = 4
BASE = 500000.0  # of rope, in the drafts made here
Tensors = dict[str, Tensor]
# Chain and parallel drafts as a reference sees them: committed tokens [n] and the target's features [n−1, F] of all but
# the newest one → the logits of K draft positions [K, Vd].
Reference = Callable[[Tensor, Tensor], Tensor]


# --- References


def llama(w: Tensors, x: Tensor, base: float = BASE) -> Tensor:
    """The logits [T, V] of a Llama for input embeddings [T, H] at positions 0 … T−1."""
    for index in range(sum(name.endswith("o_proj.weight") for name in w)):
        prefix = f"model.layers.{index}."
        x = x + attend(rms(x, w[f"{prefix}input_layernorm.weight"]), w, prefix, base)
        x = x + mlp(rms(x, w[f"{prefix}post_attention_layernorm.weight"]), w, prefix)
    return rms(x, w["model.norm.weight"]) @ w["lm_head.weight"].T


def chain(next_logits: Callable[[Tensor], Tensor], ids: Tensor | None, tokens: Tensor) -> Tensor:
    """K greedy steps of `next_logits` [Vd] on a growing sequence; `ids` are the target's of the draft's."""
    rows = []
    for _ in range(K):
        rows.append(next_logits(tokens))
        best = rows[-1].argmax()
        tokens = torch.cat((tokens, (best if ids is None else ids[best])[None]))
    return torch.stack(rows)


def causal_lm_reference(w: Tensors, tokens: Tensor, _: Tensor) -> Tensor:
    return chain(lambda known: llama(w, w["model.embed_tokens.weight"][known])[-1], None, tokens)


def pard_reference(w: Tensors, mask: int, tokens: Tensor, _: Tensor) -> Tensor:
    tokens = torch.cat((tokens, torch.full((K - 1,), mask)))
    return llama(w, w["model.embed_tokens.weight"][tokens])[-K:]


def pard2_reference(w: Tensors, mask: int, scale: float, tokens: Tensor, features: Tensor) -> Tensor:
    """Features one to the right, none at first; mask rows repeat the last."""
    tokens = torch.cat((tokens, torch.full((K - 1,), mask)))
    shifted = torch.cat((torch.zeros(1, features.shape[1]), features, features[-1:].repeat(K - 1, 1)))
    added = shifted @ w["target_proj.weight"].T + w.get("target_proj.bias", 0.0)
    return llama(w, w["model.embed_tokens.weight"][tokens] + scale * added)[-K:]


def eagle_chain(w: Tensors, kind: str, head: Tensor, tokens: Tensor, features: Tensor) -> Tensor:
    forward = eagle3_reference if kind == "eagle3" else eagle_reference
    hidden = features @ w["fc.weight"].T if kind == "eagle3" else features
    ids = w["d2t"] + torch.arange(len(w["d2t"])) if "d2t" in w else torch.arange(V)
    rows, tokens = [], tokens[1:]
    for _ in range(K):
        head_input, feedback = forward(w, tokens, hidden, 10000.0)
        rows.append(head_input[-1] @ head.T)
        tokens = torch.cat((tokens, ids[rows[-1].argmax()][None]))
        hidden = torch.cat((hidden, feedback[-1:]))
    return torch.stack(rows)


def p_eagle_reference(w: Tensors, mask: int, normed_residual: bool, tokens: Tensor, features: Tensor) -> Tensor:
    """Features of real rows, the learned vector for mask rows; both through the norms and fc."""
    features = torch.cat((features, w["mask_hidden"][0].expand(K - 1, -1)))
    if "input_norm.weight" in w:
        features = rms(features, w["input_norm.weight"])
    if "fc_norm.0.weight" in w:
        parts = zip(features.split(H, dim=1), (w[f"fc_norm.{i}.weight"] for i in range(3)), strict=True)
        features = torch.cat([rms(part, weight) for part, weight in parts], dim=1)
    x = features @ w["fc.weight"].T
    tokens = torch.cat((tokens[1:], torch.full((K - 1,), mask)))
    embedding = rms(w["embed_tokens.weight"][tokens], w["layers.0.input_layernorm.weight"])
    normed = rms(x, w["layers.0.hidden_norm.weight"])
    x = (normed if normed_residual else x) + attend(torch.cat((embedding, normed), dim=1), w, "layers.0.", BASE)
    x = x + mlp(rms(x, w["layers.0.post_attention_layernorm.weight"]), w, "layers.0.")
    x = x + attend(rms(x, w["layers.1.input_layernorm.weight"]), w, "layers.1.", BASE)
    x = x + mlp(rms(x, w["layers.1.post_attention_layernorm.weight"]), w, "layers.1.")
    return rms(x, w["norm.weight"])[-K:] @ w["lm_head.weight"].T


def mlp_speculator_reference(w: Tensors, config: dict[str, Any], tokens: Tensor, features: Tensor) -> Tensor:
    def norm(x: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean() + 1e-6)

    steps, inner, tied = config["n_predict"], config["inner_dim"], config["tie_weights"]
    state_weight = 0.5 ** (0.5 / steps)
    ratio = math.sqrt((1 - state_weight**2) * inner / 2) / state_weight
    state, token, rows = features[-1], tokens[-1], []
    if config["scale_input"]:
        state = norm(state) / math.sqrt(2)
    for i in range(K):
        own, projection = (0, min(i, 1)) if tied else (i, i)
        z = w[f"speculator.emb.{own}.weight"][token]
        x = w[f"speculator.proj.{projection}.weight"] @ state + ratio * z
        x = w[f"speculator.ln.{own}.weight"] * norm(x) + w[f"speculator.ln.{own}.bias"]
        state = x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
        rows.append(w[f"speculator.head.{own}.weight"] @ state)
        token = rows[-1].argmax()
    return torch.stack(rows)


def medusa_reference(
    blocks: Sequence[tuple[Tensor, Tensor | None]], heads: list[Tensor], _: Tensor, f: Tensor
) -> Tensor:
    rows = []
    for (weight, bias), head in zip(blocks[:K], heads, strict=False):
        x = weight @ f[-1] if bias is None else weight @ f[-1] + bias
        rows.append(head @ (f[-1] + x * torch.sigmoid(x)))
    return torch.stack(rows)


# --- Drafters, loaded from foreign checkpoints


@dataclass(frozen=True)
class Case:
    """A drafter, its reference, the target's ids of its own, and the width of the features it reads."""

    drafter: Drafter
    reference: Reference
    ids: Tensor | None = None
    feature_size: int = 0


@cache
def target() -> PreTrainedModel:
    model = pico.llama(eos_token_id=None)
    model.set_attn_implementation(ATTENTION)
    return model


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Drafter]:
    """Write a foreign checkpoint, convert it (`known`: for the target) and load its drafter.

    `warp` are the weights beside PARD-2's model, `tokenizers` those of target and draft.
    """
    target_folder = tmp_path_factory.mktemp("target")
    target().save_pretrained(target_folder)

    def loaded(
        config: dict[str, Any],
        tensors: Tensors,
        warp: Tensors | None = None,
        tokenizers: tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase] | None = None,
        known: bool = True,
        features: bool = True,
    ) -> Drafter:
        folder = tmp_path_factory.mktemp("draft")
        source = pico.write_checkpoint(folder / "source", config, tensors, safetensors=True)
        if warp is not None:
            torch.save(warp, source / "warp_model.bin")
        if tokenizers is not None:
            tokenizers[1].save_pretrained(source)
        out = convert_checkpoint(str(source), folder / "draft", target=str(target_folder) if known else None)
        draft = read_draft(out)
        if not features:
            lm = draft.spec.architecture.expect(CausalLMSpec)
            draft = changed(draft, replace(lm, target_features=None))
        return load_drafter(draft, target(), tokenizers[0] if tokenizers else None)

    return loaded


Load = Callable[..., Drafter]


def llama_draft(**keys: Any) -> tuple[dict[str, Any], Tensors]:
    model = pico.llama(seed=1, num_hidden_layers=2, rms_norm_eps=1e-5)
    return model.config.to_dict() | keys, dict(model.state_dict())


def draft_model(load: Load) -> Case:
    config, w = llama_draft()
    return Case(load(config, w), partial(causal_lm_reference, w))


def pard(load: Load) -> Case:
    config, w = llama_draft(pard_token=300, spd_type="pard")
    drafter = load(config, w)
    assert isinstance(drafter, PardDrafter)
    return Case(drafter, partial(pard_reference, w, 300))


def pard2(load: Load, bias: bool = False, features: bool = True) -> Case:
    layers = [-1, 5, -8]
    config, w = llama_draft(
        pard_token=300, spd_type="pard2", pard2_scale=0.3, pard2_target_dim=3 * H, pard2_target_layers=layers,
        pard2_proj_bias=bias,
    )  # fmt: skip
    torch.manual_seed(2)
    warp = {"target_proj.weight": torch.randn(H, 3 * H) * 0.2} | ({"target_proj.bias": torch.randn(H)} if bias else {})
    drafter = load(config, w, warp, features=features)
    if not features:
        return Case(drafter, partial(pard_reference, w, 300))
    assert drafter.aux_layers is not None
    assert drafter.aux_layers.states == (FINAL, 5, 1)
    return Case(drafter, partial(pard2_reference, w | warp, 300, 0.3), feature_size=3 * H)


def eagle(load: Load) -> Case:
    config, w = pico.eagle_config(), pico.eagle_tensors(dtype=torch.float32)
    return Case(load(config, w), partial(eagle_chain, w, "eagle", target().lm_head.weight), feature_size=H)


def eagle3(load: Load) -> Case:
    config, w = pico.eagle3_config(), pico.eagle3_tensors(embed=True, dtype=torch.float32)
    ids = w["d2t"] + torch.arange(len(w["d2t"]))
    return Case(load(config, w), partial(eagle_chain, w, "eagle3", w["lm_head.weight"]), ids, 3 * H)


def p_eagle(load: Load, joint: bool = False, per_layer: bool = False, mask: int = 319) -> Case:
    config = speculators.peagle_config(
        {"num_hidden_layers": 2},
        norm_before_fc=joint,
        fc_norm=per_layer,
        norm_before_residual=joint,
        mask_token_id=mask,
    )
    w = speculators.eagle3_tensors(torch.float32, layers=2, mask=True, joint=joint, per_layer=per_layer)
    ids = w["d2t"] + torch.arange(len(w["d2t"]))
    return Case(load(config, w), partial(p_eagle_reference, w, mask, joint), ids, 3 * H)


def mlp_head(load: Load, tied: bool) -> Case:
    config = mlp_speculator.mlp_config(tie_weights=tied, scale_input=tied)
    make = mlp_speculator.tied if tied else partial(mlp_speculator.untied, steps=4, inner=48)
    w = make(torch.float32)
    return Case(load(config, w), partial(mlp_speculator_reference, w, config), feature_size=H)


def medusa_heads(load: Load) -> Case:
    w = medusa.original(torch.float32)
    blocks = [(w[f"{h}.0.linear.weight"], w[f"{h}.0.linear.bias"]) for h in range(5)]
    heads = [w[f"{h}.1.weight"] for h in range(5)]
    return Case(load(medusa.CONFIG, w), partial(medusa_reference, blocks, heads), feature_size=H)


def medusa_shared(load: Load) -> Case:
    w = medusa.truncated(torch.float32, rows=128, shared=True)
    config = medusa.VLLM | {"original_lm_head": True, "truncated_vocab_size": 128}
    blocks = [(w[f"blocks.{h}.layers.0.weight"], None) for h in range(5)]
    reference = partial(medusa_reference, blocks, [w["lm_head.weight"]] * 5)
    return Case(load(config, w), reference, w["token_map"], feature_size=H)


def medusa_borrowed(load: Load) -> Case:
    w = medusa.original(torch.float32, matrices=False)
    blocks = [(w[f"{h}.0.linear.weight"], w[f"{h}.0.linear.bias"]) for h in range(5)]
    reference = partial(medusa_reference, blocks, [target().lm_head.weight] * 5)
    return Case(load(medusa.CONFIG | {"version": "2"}, w), reference, feature_size=H)


CASES: dict[str, Callable[[Load], Case]] = {
    "draft model": draft_model,
    "PARD": pard,
    "PARD-2": pard2,
    "PARD-2, bias": partial(pard2, bias=True),
    "PARD-2, target-independent": partial(pard2, features=False),
    "EAGLE-1": eagle,
    "EAGLE-3": eagle3,
    "P-EAGLE": p_eagle,
    "P-EAGLE, joint norm, norm before residual": partial(p_eagle, joint=True),
    "P-EAGLE, norm per layer": partial(p_eagle, per_layer=True),
    "MLP speculator": partial(mlp_head, tied=True),
    "MLP speculator, untied": partial(mlp_head, tied=False),
    "Medusa": medusa_heads,
    "Medusa, shared head and fewer tokens": medusa_shared,
    "Medusa, the target's head": medusa_borrowed,
}


@pytest.fixture(params=CASES, scope="module")
def case(request: pytest.FixtureRequest, load: Load) -> Case:
    return CASES[request.param](load)


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
        drafter.allocate(num_slots, self.LENGTH + K)

    def admit(self, slot: int, length: int) -> None:
        """Start a sequence with a prompt, and the target's first token."""
        features = self.features[slot, :length] if self.features.shape[-1] else None
        self.drafter.prefill(slot, self.tokens[slot, :length], features)
        self.known[slot], self.pending[slot] = length + 1, 1

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


def started(case: Case, num_slots: int) -> Decoding:
    decoding = Decoding(case.drafter, case.feature_size, num_slots)
    for slot, length in zip(range(num_slots), (7, 1, 12, 3), strict=False):
        decoding.admit(slot, length)
    return decoding


@pytest.mark.parametrize("num_slots", [1, 4])
def test_proposals_equal_the_reference(case: Case, num_slots: int) -> None:
    decoding = started(case, num_slots)
    for slots, proposal, draw in decoding.rounds(3):
        assert proposal.lengths is None
        for row, slot in enumerate(slots):
            known = decoding.known[slot]
            expected = case.reference(decoding.tokens[slot, :known], decoding.features[slot, : known - 1])
            logits = torch.stack([step[row] for step in draw.logits])
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-3 * float(expected.std()))
            best = expected.argmax(-1)
            assert proposal.tokens[row].tolist() == (best if case.ids is None else case.ids[best]).tolist()


@pytest.mark.parametrize(
    "case", [name for name in CASES if not name.startswith(("MLP", "Medusa"))], indirect=True, scope="module"
)
def test_caches_equal_those_of_a_fresh_prefill(case: Case) -> None:
    drafter = case.drafter
    assert isinstance(drafter, CausalLMDrafter | EagleDrafter)
    decoding = started(case, 4)
    seen: dict[int, int] = {}
    for slots, _, _ in decoding.rounds(6):
        seen |= {slot: decoding.known[slot] for slot in slots}
    used = drafter.cache
    for slot, known in seen.items():
        drafter.allocate(1, Decoding.LENGTH)
        features = decoding.features[slot, :known] if case.feature_size else None
        drafter.prefill(0, decoding.tokens[slot, :known], features)
        valid = known - isinstance(drafter, EagleDrafter)  # a head's last row waits for the token after it
        assert len(drafter.cache.layers) == len(used.layers) > 0
        for layer, pools in drafter.cache.layers.items():
            for fresh, pool in zip(pools, used.layers[layer], strict=True):
                torch.testing.assert_close(pool[slot, :, :valid], fresh[0, :, :valid], rtol=1e-3, atol=1e-3)


# --- In the engine


@cache
def requests() -> tuple[Request, ...]:
    """Prompts that repeat themselves, so that n-grams are found, of several lengths."""
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, V, (size,), generator=generator).tolist() * times for size, times in SHAPES]
    return tuple(Request(str(i), tuple(prompt), 6 + 2 * i) for i, prompt in enumerate(prompts))


SHAPES = ((5, 3), (1, 1), (9, 1), (3, 6))


def sampled() -> tuple[Request, ...]:
    """The same at temperatures 0.7 and 1 in turn."""
    return tuple(
        Request(r.id, r.prompt, r.max_new_tokens, SamplingParameters(temperature=(0.7, 1.0)[i % 2], seed=i))
        for i, r in enumerate(requests())
    )


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


def test_output_equals_plain_decoding(case: Case) -> None:
    check_output(case.drafter, BATCHES_AND_K)


def poison_before_every_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the rows of a forward must not see is NaN: what is new in a cache, and from their first entry on.

    Whatever was there, of rejected tokens, mask rows and earlier sequences, is thereby replaced before it is seen.
    """
    rows_of = SlotCache.rows

    def rows(cache: SlotCache, slots: Tensor, positions: Tensor, length: int) -> CacheRows:
        for slot, row in zip(slots.tolist(), positions, strict=True):
            for pool in (pool for pools in cache.layers.values() for pool in pools):
                pool[slot, :, int(row[row >= 0].min()) :] = torch.nan
            cache.written[slot] = cache.capacity
        return rows_of(cache, slots, positions, length)

    new = SlotCache._pool
    monkeypatch.setattr(SlotCache, "rows", rows)
    monkeypatch.setattr(SlotCache, "_pool", lambda cache, like: new(cache, like).fill_(torch.nan))


def test_nan_that_no_row_sees_reaches_no_output(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain(sampled()), plain(requests())
    poison_before_every_forward(monkeypatch)
    for wanted, tokens in zip((sampled(), requests()), expected, strict=True):
        assert [g.tokens for g in generate(case.drafter, wanted, 3)] == tokens


def test_nan_would_reach_the_output_of_a_cache_that_clears_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain(requests())
    poison_before_every_forward(monkeypatch)
    monkeypatch.setattr(SlotCache, "_left_over", lambda *_: [])
    assert [g.tokens for g in generate(None, requests(), 3)] != expected


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
        decoding.admit(slot, slot + 1)
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
    decoding.admit(0, 6)
    proposal, _ = decoding.propose([0])
    assert proposal.tokens.tolist() == [[9, 1, 2, 3]]


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
        NgramDrafter(V, min_n=3, max_n=2)


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
