"""Gemma-4's assistant: drafts equal those of a reference without a cache, and transformers' where it computes alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints import pico
from fixtures.checkpoints.gemma4_assistants import TARGET, Pair, proposal, save_pair
from fixtures.checkpoints.zoo_models import draw_greedy
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Gemma4AssistantForCausalLM, Gemma4ForCausalLM, Gemma4TextConfig
from transformers.generation import candidate_generator

import draftkit
from draftkit.convert.api import convert_checkpoint
from draftkit.doctor.patient import changed
from draftkit.errors import DraftkitError, TargetError
from draftkit.layout.facts import with_facts
from draftkit.layout.folder import Draft, read_draft
from draftkit.loading import load_drafter
from draftkit.requests import Request, SamplingParameters
from draftkit.results.settings import Settings
from draftkit.runtime.attention import NAME as ATTENTION
from draftkit.runtime.cache import SlotCache
from draftkit.runtime.drafters.protocol import Committed, Drafter
from draftkit.runtime.engine import Engine
from draftkit.runtime.tree_kinds import read_tree
from draftkit.targets.target import Target, load_target

K = 4


@pytest.fixture(scope="module", params=[True, False], ids=["ordered", "plain"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return save_pair(tmp_path_factory.mktemp("pair"), use_ordered_embeddings=request.param)


@pytest.fixture(scope="module")
def draft(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Draft:
    out = tmp_path_factory.mktemp("draft") / "draft"
    return read_draft(convert_checkpoint(str(pair.assistant), out, target=str(pair.folder)))


def loaded(pair: Pair, draft: Draft) -> tuple[Target, Drafter]:
    model = load_target(pair.folder, device="cpu", dtype=torch.float32, attention=ATTENTION)
    drafter = load_drafter(draft, model)
    return Target(model, drafter.aux_layers), drafter


def drafted(target: Target, drafter: Drafter, texts: list[Tensor], k: int, stale: int = 0) -> list[list[int]]:
    """The drafts after each of some texts, in slots of one cache, which holds `stale` tokens more of others."""
    cache = SlotCache(len(texts) + 1, 64)
    features = []
    for slot, text in enumerate(texts, start=1):
        seen = torch.cat((text[:-1], torch.arange(20, 20 + stale)))
        positions = torch.arange(len(seen))[None]
        output = target.forward(
            seen[None], positions, cache.rows(torch.tensor([slot]), positions, len(seen), prompt=True)
        )
        assert output.features is not None
        features.append(output.features[:, len(text) - 2])
    committed = Committed(
        slots=torch.arange(1, len(texts) + 1),
        tokens=torch.stack([text[-1:] for text in texts]),
        counts=torch.ones(len(texts), dtype=torch.int64),
        start=torch.tensor([len(text) - 1 for text in texts]),
        features=torch.stack(features),
        length=64,
        cache=cache,
    )
    return drafter.propose(committed, k, draw_greedy).tokens.tolist()


def random_texts() -> list[Tensor]:
    torch.manual_seed(5)
    return [torch.randint(3, pico.VOCABULARY, (length,)) for length in (2, 7, 12, 30)]


@pytest.mark.slow
@pytest.mark.parametrize("stale", [0, 3])
def test_drafts_equal_the_reference(pair: Pair, draft: Draft, stale: int) -> None:
    """In a ragged batch, whatever rejected tokens have left in the cache."""
    found = drafted(*loaded(pair, draft), random_texts(), K, stale)
    assert found == [proposal(pair, text, K) for text in random_texts()]
    assert len({token for drafts in found for token in drafts}) > K


def test_the_position_is_a_fact(pair: Pair, draft: Draft) -> None:
    late = changed(draft, with_facts(draft.spec.architecture, position="token"))
    found = drafted(*loaded(pair, late), random_texts(), K)
    assert found == [proposal(pair, text, K, late=True) for text in random_texts()]
    assert found != drafted(*loaded(pair, draft), random_texts(), K)


@pytest.mark.slow
def test_sampled_output_is_that_of_plain_decoding(pair: Pair, draft: Draft) -> None:
    """Though most tokens have no chance to be drafted."""
    target, drafter = loaded(pair, draft)
    sampling = SamplingParameters(temperature=1.0, seed=3)
    plain = Engine(Target(target.model), None, num_speculative_tokens=0, num_slots=2, verification="coupled")
    engine = Engine(target, drafter, num_speculative_tokens=K, num_slots=2, verification="coupled")
    prompts = [range(3, 9), range(4, 12)]
    expected, found = (e.generate(prompts, sampling, max_new_tokens=8) for e in (plain, engine))
    assert [g.tokens for g in found] == [g.tokens for g in expected]


@pytest.mark.slow
def test_trees_leave_the_output_as_it_is(pair: Pair, draft: Draft) -> None:
    """And the tree with one child everywhere is the chain, round by round."""
    target, drafter = loaded(pair, draft)
    requests = [Request(str(n), tuple(range(3 + n, 8 + 2 * n)), 8) for n in range(3)]
    chain = Engine(target, drafter, num_speculative_tokens=K, num_slots=2).generate(requests)
    for name in ("eagle:topk=1,depth=4,nodes=4", "eagle:topk=3,depth=4,nodes=12"):
        tree = read_tree(name)
        found = Engine(target, drafter, num_speculative_tokens=K, num_slots=2, tree=tree).generate(requests)
        assert [g.tokens for g in found] == [g.tokens for g in chain]
        if tree.nodes == K:
            told = [[[(r.position, r.accepted, r.proposal) for r in g.rounds] for g in run] for run in (found, chain)]
            assert told[0] == told[1]


@pytest.mark.slow
def test_a_round_of_the_engine_drafts_what_the_reference_does(pair: Pair, draft: Draft) -> None:
    """Every round of generations that run side by side; the output is that of plain decoding."""
    target, drafter = loaded(pair, draft)
    requests = [Request(f"{n}", tuple(range(3 + n, 9 + 2 * n)), 10) for n in range(3)]
    plain = Engine(Target(target.model), None, num_speculative_tokens=0, num_slots=2).generate(requests)
    found = Engine(target, drafter, num_speculative_tokens=K, num_slots=2).generate(requests)
    assert [g.tokens for g in found] == [g.tokens for g in plain]
    for generation in found:
        text = torch.tensor([*generation.request.prompt, *generation.tokens])
        for round in generation.rounds:
            assert list(round.proposal) == proposal(pair, text[: round.position], K)


class Oracle:
    """transformers' assistant; its release 5.23 builds none, as all layers share keys and values of no layer."""

    def __init__(self, pair: Pair, monkeypatch: pytest.MonkeyPatch):
        own: Any = Gemma4TextConfig.kv_sharing_modes
        everything = property(
            lambda c: ["reuse"] * c.num_hidden_layers if c.num_kv_shared_layers == c.num_hidden_layers else own.fget(c)
        )
        monkeypatch.setattr(Gemma4TextConfig, "kv_sharing_modes", everything)
        self.assistant = Gemma4AssistantForCausalLM.from_pretrained(pair.assistant)
        self.target = Gemma4ForCausalLM.from_pretrained(pair.folder)
        self.assistant.generation_config.num_assistant_tokens = K
        self.assistant.config.text_config.sliding_window -= 1  # its windows take one token more


@pytest.mark.slow
def test_transformers_drafts_alike_at_its_own_position(
    pair: Pair, draft: Draft, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a prompt, where its cache holds no rejected token; of tokens that are not suppressed."""
    oracle = Oracle(pair, monkeypatch)
    proposals: list[list[int]] = []
    generator = candidate_generator.SinglePositionMultiTokenCandidateGenerator
    own = generator.get_candidates

    def noted(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        candidates, scores = own(self, input_ids, *args, **kwargs)
        proposals.append(candidates[0].tolist())
        return candidates, scores

    monkeypatch.setattr(generator, "get_candidates", noted)
    facts = with_facts(draft.spec.architecture, position="token", suppressed_tokens=[])
    target, drafter = loaded(pair, changed(draft, facts))
    for text in random_texts():
        proposals.clear()
        oracle.target.generate(text[None], assistant_model=oracle.assistant, max_new_tokens=K + 3, do_sample=False)
        first = torch.tensor(next(ids for ids in proposals if len(ids) > len(text)))
        assert first[len(text) + 1 :].tolist() == drafted(target, drafter, [first[: len(text) + 1]], K)[0]


@pytest.mark.long
def test_eval(pair: Pair, draft: Draft) -> None:
    pico.save_tokenizer(pair.folder)
    settings = Settings(num_speculative_tokens=2, limit=2, max_new_tokens=6, device="cpu", dtype="float32")
    cell = draftkit.evaluate_draft(str(pair.folder), [str(pair.assistant)], settings).cells[0]
    assert cell.method == "gemma4-assistant"
    assert cell.matches_greedy


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer_types": ["full_attention"] * 6}, r"layer 0 .* finds no keys and values"),
        ({"global_head_dim": 48}, r"layer 2 .* finds no keys and values"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, r"layer 0 .* finds no keys and values"),
        ({"hidden_size": 32}, "hidden states"),
    ],
)
def test_another_target_is_one_message(draft: Draft, change: dict[str, Any], words: str) -> None:
    with pytest.raises(TargetError, match=words):
        load_drafter(draft, Gemma4ForCausalLM(Gemma4TextConfig(**(TARGET | change))))


def test_an_ordering_that_lacks_tokens_is_one_message(tmp_path: Path) -> None:
    pair = save_pair(tmp_path)
    path = pair.assistant / "model.safetensors"
    stored = load_file(path)
    stored["masked_embedding.token_ordering"][0] = stored["masked_embedding.token_ordering"][1]
    save_file(stored, path, {"format": "pt"})
    pico.save_tokenizer(pair.folder)
    with pytest.raises(DraftkitError, match="does not have every token once"):
        draftkit.evaluate_draft(str(pair.folder), [str(pair.assistant)], Settings(limit=1, device="cpu"))
