"""A draft judged and trained a step at a time, on a target whose weights change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fixtures.checkpoints import pico
from fixtures.checkpoints.zoo_models import requests, zoo_drafter, zoo_target
from fixtures.precision import assert_close
from fixtures.training.samples import samples
from test_train import config, data  # noqa: F401
from test_train import target as pico_folder  # noqa: F401

from draftkit import DraftTuner, simulate_acceptance
from draftkit.data.sample_files import read_training_samples
from draftkit.data.samples import Sample
from draftkit.data.states.online import load_training_target
from draftkit.errors import DraftkitError
from draftkit.layout.folder import read_draft
from draftkit.runtime.engine import Engine
from draftkit.targets.target import Target
from draftkit.train.run import train_draft
from draftkit.train.settings import LoraSettings, Optimization

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def draft(pico_folder: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    out = tmp_path_factory.mktemp("tuner") / "run"
    found = train_draft(config(pico_folder, data, out)).draft
    assert found is not None
    return found


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "k"), [("eagle3", 4), ("dflash", 7)])
def test_what_is_simulated_is_what_decoding_accepts(name: str, k: int) -> None:
    """Round by round, for a whole block too; `test_simulated_rounds.py` has the other kinds and parts of a block."""
    drafter = zoo_drafter(name)
    engine = Engine(Target(zoo_target(), drafter.aux_layers), drafter, num_speculative_tokens=k, num_slots=4)
    generations = engine.generate(requests()[:6])
    answers = [
        Sample.of(g.request.id, [*g.request.prompt, *g.tokens], [(len(g.request.prompt), g.length)], f"c{n % 2}")
        for n, g in enumerate(generations)
    ]
    simulated = simulate_acceptance(f"zoo:{name}", "zoo:target", answers, k=k)
    counted = {
        n: (sum(min(r.accepted, g.length - r.position) for r in g.rounds), len(g.rounds))
        for n, g in enumerate(generations)
        if g.rounds
    }
    assert simulated.sums == counted
    accepted, rounds = (sum(column) for column in zip(*counted.values(), strict=True))
    assert simulated.length.mean == pytest.approx(1 + accepted / rounds)
    assert simulated.length.low <= simulated.length.mean <= simulated.length.high
    assert simulated.by_category.keys() == {"c0", "c1"}
    assert sum(len(simulated.of(name)) for name in simulated.by_category) == len(counted)


@pytest.mark.slow
def test_a_step_is_the_trainers_step(pico_folder: Path, data: Path, draft: Path, tmp_path: Path) -> None:  # noqa: F811
    """One row, one step, a constant learning rate: the same weights as `train_draft` gives."""
    flat = {
        "optimization.max_steps": 1, "optimization.schedule": "constant", "optimization.warmup": 0,
        "validation.share": 0, "save_every": 1, "tokens_per_row": 2048, "draft_vocab_size": 0,
    }  # fmt: skip
    train_draft(config(pico_folder, data, tmp_path / "run", **flat, draft=str(draft)))
    tuner = DraftTuner(
        draft, str(pico_folder), options={"steps": 3}, optimization=Optimization(lr=1e-3), device="cpu"
    )  # fmt: skip
    tuner.step(data)
    after = read_draft(tmp_path / "run" / "checkpoint-1")
    found = tuner.recipe.tensors()
    assert after.tensors.keys() == found.keys()
    for name, handle in after.tensors.items():
        expected = handle.load()
        if expected.is_floating_point():
            assert_close(found[name], expected, depth=200)
        else:
            assert torch.equal(found[name], expected)


@pytest.mark.long
def test_a_target_that_changes_is_followed(pico_folder: Path, draft: Path, tmp_path: Path) -> None:  # noqa: F811
    """As a loop of reinforcement learning has it: judge, update the target in place, judge again, train on."""
    target = load_training_target(str(pico_folder), device="cpu", dtype=torch.float32)
    tuner = DraftTuner(draft, target, optimization=Optimization(lr=3e-3))
    answers = samples(12)
    before = tuner.simulate_acceptance(answers, mode="sampled")
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for parameter in target.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    changed = tuner.simulate_acceptance(answers, mode="sampled")
    assert changed.sums != before.sums
    target.save_pretrained(tmp_path / "changed")
    pico.save_tokenizer(tmp_path / "changed")
    fresh = simulate_acceptance(draft, str(tmp_path / "changed"), answers, mode="sampled", device="cpu")
    assert fresh.sums == changed.sums  # nothing of the old target was kept
    losses = [tuner.step(answers) for _ in range(6)]
    assert losses[-1] < losses[0]
    tuner.save(tmp_path / "draft")
    assert read_draft(tmp_path / "draft").spec.method == "eagle3"


@pytest.mark.slow
def test_adapters(pico_folder: Path, data: Path, draft: Path) -> None:  # noqa: F811
    tuner = DraftTuner(draft, str(pico_folder), lora=LoraSettings(r=2), device="cpu")
    before = {name: tensor.clone() for name, tensor in tuner.recipe.tensors().items()}
    tuner.step(data)
    tuner.step(data)
    after = tuner.recipe.tensors()
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed
    assert not any("lora" in name for name in changed)
    assert "lm_head.weight" not in changed


def test_bad_input(pico_folder: Path, draft: Path, data: Path) -> None:  # noqa: F811
    with pytest.raises(DraftkitError, match="no recipe trains a draft of the kind ngram"):
        DraftTuner("ngram:2-4", str(pico_folder), device="cpu")
    tuner = DraftTuner(draft, str(pico_folder), device="cpu")
    with pytest.raises(DraftkitError, match="there are no samples"):
        tuner.step([])
    long = read_training_samples(data)[0]
    with pytest.raises(DraftkitError, match="tokens"):
        tuner.simulate_acceptance([Sample.of("long", [5] * 9000, [(4, 9000)]), long])
