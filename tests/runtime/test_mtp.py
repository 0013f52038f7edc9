"""A target's own multi-token prediction head: drafts equal those of a reference without a cache, output is lossless."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints import pico
from fixtures.checkpoints.mtp_targets import HEADS, LAYERS, RELATIVES, Saved, proposal, save_with_head
from fixtures.checkpoints.zoo_models import draw_greedy
from safetensors.torch import load_file, save_file

import draftkit
from draftkit.convert.api import convert_checkpoint
from draftkit.convert.quantization import plain_draft
from draftkit.convert.quantize import quantized, read_formats
from draftkit.doctor.patient import changed
from draftkit.errors import DraftkitError
from draftkit.layout.facts import with_facts
from draftkit.layout.folder import read_draft
from draftkit.loading import load_drafter
from draftkit.requests import Request
from draftkit.results.settings import Settings
from draftkit.runtime.attention import NAME as ATTENTION
from draftkit.runtime.cache import SlotCache
from draftkit.runtime.drafters.protocol import Committed, Drafter, NewSequence
from draftkit.runtime.engine import Engine
from draftkit.runtime.tree_kinds import read_tree
from draftkit.targets.target import Target, load_target

K = 3


@pytest.fixture(scope="module", params=sorted(HEADS))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save_with_head(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def folder(saved: Saved, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The head, taken out."""
    return convert_checkpoint(str(saved.folder), tmp_path_factory.mktemp("head") / "head", format="mtp")


def loaded(saved: Saved, folder: Path, **facts: object) -> tuple[Target, Drafter]:
    model = load_target(saved.folder, device="cpu", dtype=torch.float32, attention=ATTENTION)
    draft = read_draft(folder)
    drafter = load_drafter(changed(draft, with_facts(draft.spec.architecture, **facts)), model)
    return Target(model, drafter.aux_layers), drafter


@pytest.mark.slow
@pytest.mark.parametrize("facts", [{}, {"sliding_window": 4, "sink_tokens": 2}], ids=["", "a window"])
def test_drafts_equal_the_reference_after_any_rejections(saved: Saved, folder: Path, facts: dict[str, Any]) -> None:
    """The rounds of a text in which anything from one token to all were accepted."""
    target, drafter = loaded(saved, folder, **facts)
    saved = replace(saved, **facts)
    torch.manual_seed(5)
    text = torch.randint(3, pico.VOCABULARY, (30,))
    captured = captured_states(target, text)
    drafter.allocate(2, 64, K)
    drafter.prefill([NewSequence(1, text[:5], captured[:5]), NewSequence(0, text[:9], captured[:9])])
    start = 9
    for count in (1, 3, 1, 4, 2):
        committed = Committed(
            slots=torch.tensor([0]),
            tokens=text[None, start : start + count],
            counts=torch.tensor([count]),
            start=torch.tensor([start]),
            features=captured[None, start - 1 : start - 1 + count],
            length=64,
        )
        drafts = drafter.propose(committed, K, draw_greedy).tokens[0].tolist()
        start += count
        assert drafts == proposal(saved, text[:start], K)


def captured_states(target: Target, text: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(len(text))[None]
    rows = SlotCache(1, 64).rows(torch.tensor([0]), positions, len(text), prompt=True)
    features = target.forward(text[None], positions, rows).features
    assert features is not None
    return features[0]


@pytest.mark.slow
@pytest.mark.few(1)
def test_greedy_output_is_that_of_plain_decoding(saved: Saved, folder: Path) -> None:
    target, drafter = loaded(saved, folder)
    requests = [Request(f"{n}", tuple(range(3 + n, 9 + 2 * n)), 12) for n in range(3)]
    plain = Engine(Target(target.model), None, num_speculative_tokens=0, num_slots=2)
    expected = {g.request.id: g.tokens for g in plain.generate(requests)}
    found = {
        g.request.id: g.tokens
        for g in Engine(target, drafter, num_speculative_tokens=K, num_slots=2).generate(requests)
    }
    assert found == expected


@pytest.mark.slow
@pytest.mark.few(1)
def test_trees_leave_the_output_as_it_is(saved: Saved, folder: Path) -> None:
    """And the tree with one child everywhere is the chain, round by round."""
    target, drafter = loaded(saved, folder)
    if target.without_trees is not None:
        with pytest.raises(DraftkitError, match="the target scores no tree"):
            Engine(target, drafter, num_speculative_tokens=K, num_slots=2, tree=read_tree("eagle:depth=3"))
        return
    requests = [Request(f"{n}", tuple(range(3 + n, 9 + 2 * n)), 8) for n in range(3)]
    chain = Engine(target, drafter, num_speculative_tokens=K, num_slots=2).generate(requests)
    for name in ("eagle:topk=1,depth=3,nodes=3", "eagle:topk=3,depth=3,nodes=9"):
        tree = read_tree(name)
        found = Engine(target, drafter, num_speculative_tokens=K, num_slots=2, tree=tree).generate(requests)
        assert [g.tokens for g in found] == [g.tokens for g in chain]
        if tree.nodes == K:
            told = [[[(r.position, r.accepted, r.proposal) for r in g.rounds] for g in run] for run in (found, chain)]
            assert told[0] == told[1]


def test_in_bfloat16_rotations_and_biases_of_experts_are_as_precise_as_the_targets(saved: Saved, folder: Path) -> None:
    target = load_target(saved.folder, device="cpu", dtype=torch.bfloat16, attention=ATTENTION)
    module = load_drafter(read_draft(folder), target).module
    assert module is not None
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
    own, theirs = ({name.rpartition(".")[2]: b for name, b in m.named_buffers()} for m in (module, target))
    assert {name: buffer.dtype for name, buffer in own.items()} == {name: theirs[name].dtype for name in own}
    assert own["inv_freq"].dtype == torch.float32
    if (bias := own.get("e_score_correction_bias")) is not None:
        (stored,) = (h for h in read_draft(folder).tensors.values() if h.name.endswith("e_score_correction_bias"))
        assert torch.equal(bias, stored.load())


@pytest.mark.slow
def test_loading_the_target_reports_what_is_unexpected_but_the_head(
    saved: Saved, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers' classes have no place for either."""
    place = Path(shutil.copytree(saved.folder, tmp_path / "target"))
    load_target(place, device="cpu", dtype=torch.float32, attention=ATTENTION)
    assert "UNEXPECTED" not in caplog.text
    tensors = load_file(place / "model.safetensors")
    beyond = saved.head.layer.replace(f"layers.{LAYERS}.", f"layers.{LAYERS + 1}.").replace("mtp", "mtq")
    save_file(tensors | {f"{beyond}stray.weight": torch.ones(2)}, place / "model.safetensors", {"format": "pt"})
    load_target(place, device="cpu", dtype=torch.float32, attention=ATTENTION)
    assert f"{beyond}stray.weight" in caplog.text
    assert saved.head.layer not in caplog.text


@pytest.mark.long
def test_eval_takes_the_targets_own_head(saved: Saved, folder: Path) -> None:
    pico.save_tokenizer(saved.folder)
    settings = Settings(num_speculative_tokens=2, limit=2, max_new_tokens=6, device="cpu", dtype="float32")
    own, separate = (
        draftkit.evaluate_draft(str(saved.folder), [draft], settings).cells[0] for draft in ("mtp", str(folder))
    )
    assert own.method == separate.method == "mtp"
    assert own.num_accepted_tokens_per_pos == separate.num_accepted_tokens_per_pos
    assert own.matches_greedy


def test_a_target_without_a_head_is_one_message(tmp_path: Path) -> None:
    target = pico.save_llama(tmp_path / "target")
    pico.save_tokenizer(target)
    with pytest.raises(DraftkitError, match="no multi-token prediction heads"):
        draftkit.evaluate_draft(str(target), ["mtp"], Settings(limit=1, device="cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(RELATIVES))
def test_relatives_draft_as_the_reference_does(kind: str, tmp_path: Path) -> None:
    saved = save_with_head(kind, tmp_path / "target")
    target, drafter = loaded(saved, convert_checkpoint(str(saved.folder), tmp_path / "head", format="mtp"))
    (generation,) = Engine(target, drafter, num_speculative_tokens=K, num_slots=1).generate(
        [Request("0", (4, 5, 6), 9)]
    )
    text = torch.tensor([*generation.request.prompt, *generation.tokens])
    for round in generation.rounds:
        assert list(round.proposal) == proposal(saved, text[: round.position], K)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("format", ["fp8-dynamic", "nvfp4a16", "modelopt-w4a16-nvfp4"])
def test_quantized_heads_are_the_weights_that_they_stand_for(
    saved: Saved, folder: Path, format: str, tmp_path: Path
) -> None:
    """Of a target that compressed-tensors or ModelOpt has quantized, and with the inputs that the format rounds."""
    model = load_target(saved.folder, device="cpu", dtype=torch.float32, attention=ATTENTION)
    made = quantized(read_draft(folder), read_formats(format))
    lying = {name: handle.load() for name, handle in made.tensors.items()}
    plain = {name: handle.load() for name, handle in plain_draft(made).tensors.items()}
    assert len(lying) > len(plain)
    whole = load_file(saved.folder / "model.safetensors")
    states = []
    for name, tensors, stated in (("packed", lying, made.spec.quantization), ("plain", plain, None)):
        target = Path(shutil.copytree(saved.folder, tmp_path / name))
        kept = {key: tensor for key, tensor in whole.items() if key not in plain}
        save_file(kept | tensors, target / "model.safetensors", {"format": "pt"})
        config = json.loads((target / "config.json").read_text())
        if stated is not None:
            (target / "config.json").write_text(json.dumps(config | {"quantization_config": stated}))
        head = convert_checkpoint(str(target), tmp_path / f"{name}-head", format="mtp")
        drafter = load_drafter(read_draft(head), model)
        assert drafter.module is not None
        states.append(drafter.module)
    packed, expected = (module.state_dict() for module in states)
    assert packed.keys() == expected.keys()
    assert all(torch.equal(packed[name], expected[name]) for name in packed)
    rounding = [name for name, layer in states[0].named_modules() if "forward" in vars(layer) and "proj" in name]
    assert bool(rounding) == (format == "fp8-dynamic")
