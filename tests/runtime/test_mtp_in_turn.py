"""Several multi-token prediction modules: each draft step runs the next in turn, or always the first."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fixtures.checkpoints.mtp_targets import Saved, proposal, proposals_in_turn, save_with_head
from fixtures.eval_results import cell, write
from torch import Tensor

from draftkit.checks.measurement import heads_used_again
from draftkit.convert.api import convert_checkpoint, target_with_heads
from draftkit.engines.serving import serve_commands, uses_of_heads
from draftkit.engines.vllm.serve import method_note, serve_command
from draftkit.layout.facts import facts_of
from draftkit.layout.folder import read_draft
from draftkit.layout.spec import DraftSpec
from draftkit.loading import load_drafter
from draftkit.requests import Request
from draftkit.results.record import read_result
from draftkit.runtime import rounds
from draftkit.runtime.attention import NAME as ATTENTION
from draftkit.runtime.batch import SamplingTensors
from draftkit.runtime.drafters.mtp import MtpDrafter, MtpInTurnDrafter, slot_bytes
from draftkit.runtime.emitted import Drafted, Emitted, emit
from draftkit.runtime.engine import Engine
from draftkit.targets.target import Target, load_target

MODULES = 2


@pytest.fixture(scope="module", params=["glm4_moe", "deepseek_v3", "qwen3_next"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save_with_head(request.param, tmp_path_factory.mktemp(request.param), MODULES)


@pytest.fixture(scope="module")
def engine_of(saved: Saved, tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, MtpDrafter]:
    folder = convert_checkpoint(str(saved.folder), tmp_path_factory.mktemp("head") / "head", format="mtp")
    model = load_target(saved.folder, device="cpu", dtype=torch.float32, attention=ATTENTION)
    drafter = load_drafter(read_draft(folder), model, None)
    assert isinstance(drafter, MtpDrafter)
    return Target(model, drafter.aux_layers), drafter


def requests() -> list[Request]:
    return [Request(f"{n}", tuple(range(3 + n, 4 + 4 * n)), 10) for n in range(4)]


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_drafts_equal_the_reference_after_any_rejections(
    saved: Saved, engine_of: tuple[Target, MtpDrafter], k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds in which some drafts were accepted and some rejected, of sequences side by side; also more steps than
    modules, which are used again and overwrite their own keys. Prompts come in pieces of four tokens."""
    target, drafter = engine_of
    assert type(drafter) is MtpInTurnDrafter
    coins = torch.Generator().manual_seed(0)

    def verify(drafted: Drafted, logits: Tensor, parameters: SamplingTensors, start: Tensor) -> Emitted:
        stands = (torch.rand(drafted.tokens.shape, generator=coins) < 0.7) & drafted.valid
        accepted = stands.long().cumprod(1).sum(1)
        token = logits.argmax(-1).gather(1, accepted[:, None])[:, 0]
        return emit(drafted, accepted, token, stands.float())

    monkeypatch.setattr(rounds, "verification", lambda mode, *, all_greedy: verify)
    engine = Engine(target, drafter, num_speculative_tokens=k, num_slots=2, prefill_chunk=4)
    accepted = set()
    for generation in engine.generate(requests()):
        text = torch.tensor([*generation.request.prompt, *generation.tokens])
        accepted |= {round.accepted for round in generation.rounds}
        expected = proposals_in_turn(saved, text, [round.position for round in generation.rounds], k)
        assert [list(round.proposal) for round in generation.rounds] == expected
        if k <= MODULES:  # then whatever the rounds were
            assert expected == [proposals_in_turn(saved, text, [round.position], k)[0] for round in generation.rounds]
    assert len(accepted) > 1


@pytest.mark.slow
def test_greedy_output_is_that_of_plain_decoding(engine_of: tuple[Target, MtpDrafter]) -> None:
    target, drafter = engine_of
    plain = Engine(Target(target.model), None, num_speculative_tokens=0, num_slots=2).generate(requests())
    found = Engine(target, drafter, num_speculative_tokens=3, num_slots=2).generate(requests())
    assert [g.tokens for g in found] == [g.tokens for g in plain]


@pytest.mark.slow
def test_a_round_that_drafts_fewer_leaves_no_gap(saved: Saved, engine_of: tuple[Target, MtpDrafter]) -> None:
    """Side by side the sequences draft one token, alone two."""
    target, drafter = engine_of
    engine = Engine(target, drafter, num_speculative_tokens=2, num_slots=2, k_by_batch={1: 2, 2: 1})
    both = [Request("short", (5, 6, 7, 8), 4), Request("long", (9, 8, 7), 12)]
    long = engine.generate(both)[1]
    text = torch.tensor([*long.request.prompt, *long.tokens])
    assert {len(round.proposal) for round in long.rounds} == {1, 2}
    for round in long.rounds:
        assert [list(round.proposal)] == proposals_in_turn(saved, text, [round.position], len(round.proposal))


@pytest.mark.parametrize(
    ("modules", "k", "words"),
    [
        ("in_turn", 4, ["the target has 2 multi-token prediction module(s)"]),
        ("in_turn", 3, ["the target has 2", "vLLM refuses this K"]),
        ("in_turn", 2, None),
        ("first", 2, ["only the first of 2"]),
        ("first", 1, None),
    ],
)
def test_modules_that_draft_again_are_a_warning(modules: str, k: int, words: list[str] | None, tmp_path: Path) -> None:
    (made,) = read_result(write(tmp_path / "result.json", cell("mtp", num_speculative_tokens=k))).cells
    found = [f.message for f in heads_used_again.find(made, {"num_modules": MODULES, "modules": modules})]
    assert len(found) == (words is not None)
    for message in found:
        assert all(part in message for part in words or [])
        assert ("vLLM refuses" in message) == (k % MODULES > 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "modules", "tokens"), [("mimo", 1, 1), ("mimo", 2, 1), ("glm4_moe", 1, 1), ("glm4_moe", 2, 2)]
)
def test_no_more_tokens_are_advised_than_modules_draft(kind: str, modules: int, tokens: int, tmp_path: Path) -> None:
    """In the command for a head's folder as in what is said of its target, so that `eval` has nothing to warn of."""
    saved = save_with_head(kind, tmp_path / "target", modules)
    draft = read_draft(convert_checkpoint(str(saved.folder), tmp_path / "head", format="mtp"))
    assert f'"num_speculative_tokens": {tokens}}}' in serve_commands(draft, draft.path)["vLLM"]
    seen = target_with_heads(str(saved.folder))
    assert seen is not None
    assert f'"num_speculative_tokens": {tokens}}}' in uses_of_heads(seen[1].kind, modules, kind)["vLLM"]
    (made,) = read_result(write(tmp_path / "result.json", cell("mtp", num_speculative_tokens=tokens))).cells
    assert not [*heads_used_again.find(made, facts_of(draft.spec.architecture))]


@pytest.mark.slow
def test_of_mimo_the_first_alone_drafts(tmp_path: Path) -> None:
    """As in vLLM's first runner; its second one stops at them."""
    saved = save_with_head("mimo", tmp_path / "target", MODULES)
    folder = convert_checkpoint(str(saved.folder), tmp_path / "head", format="mtp")
    model = load_target(saved.folder, device="cpu", dtype=torch.float32, attention=ATTENTION)
    drafter = load_drafter(read_draft(folder), model, None)
    assert type(drafter) is MtpDrafter
    target = Target(model, drafter.aux_layers)
    for generation in Engine(target, drafter, num_speculative_tokens=3, num_slots=2).generate(requests()):
        text = torch.tensor([*generation.request.prompt, *generation.tokens])
        for round in generation.rounds:
            assert list(round.proposal) == proposal(saved, text[: round.position], 3)


def test_memory_is_that_of_every_step(saved: Saved, engine_of: tuple[Target, MtpDrafter], tmp_path: Path) -> None:
    draft = read_draft(convert_checkpoint(str(saved.folder), tmp_path / "head", format="mtp"))
    kept = slot_bytes(draft, torch.float32)
    assert kept(10, 3) == 3 * kept(10, 1) > 0
    target, drafter = engine_of
    Engine(target, drafter, num_speculative_tokens=3, num_slots=2).generate([[5, 6, 7]], max_new_tokens=6)
    assert isinstance(drafter, MtpInTurnDrafter)
    assert sum(
        pool.nbytes for cache in drafter.caches for pools in cache.layers.values() for pool in pools
    ) == 2 * kept(3 + 6 + 3 + 1, 3)


@pytest.mark.parametrize(("wanted", "told"), [(1, 1), (2, 2), (3, 2), (5, 4)])
def test_vllm_is_told_a_number_that_it_takes(wanted: int, told: int, engine_of: tuple[Target, MtpDrafter]) -> None:
    spec = DraftSpec(architecture=engine_of[1].model.spec, dtype="F32")
    assert f'"num_speculative_tokens": {told}' in serve_command(spec, "TARGET", Path("head"), wanted)
    assert "multiple of 2" in " ".join(method_note(spec))
