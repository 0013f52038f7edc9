"""A target's own head in training: its forward is what serving computes, it is saved under its own names, it learns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import Command
from fixtures.checkpoints import pico
from fixtures.checkpoints.mtp_targets import HEADS, Saved, save_with_head
from fixtures.fuzzing.killed import train_until_killed
from fixtures.precision import LAYER, assert_close
from fixtures.training.samples import samples
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import pad

from draftkit.convert.api import convert_checkpoint, put_heads_back
from draftkit.data.sample_files import write_samples
from draftkit.data.samples import SamplesOrigin
from draftkit.data.states.online import OnlineStates, load_training_target
from draftkit.layout.folder import read_draft
from draftkit.loading import load_drafter
from draftkit.runtime.attention import NAME as ATTENTION
from draftkit.runtime.drafters.protocol import Committed, Drafter, NewSequence
from draftkit.targets.target import load_target
from draftkit.train.batch import TrainingBatch
from draftkit.train.checkpoint import save_draft
from draftkit.train.config import read_config
from draftkit.train.recipes.mtp import Mtp, MtpOptions
from draftkit.train.recipes.recipe import Origin
from draftkit.train.run import train_draft

K = 3
LENGTHS = (12, 8)
DEPTH = (K + 1) * 2 * LAYER  # products from the states to the logits of the last step, generously


@pytest.fixture(scope="module", params=[*sorted(HEADS), "qwen3_next 2"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """With one module, or with so many that draft in turn."""
    kind, _, modules = request.param.partition(" ")
    return save_with_head(kind, tmp_path_factory.mktemp(kind), int(modules or 1))


@pytest.fixture(scope="module")
def head(saved: Saved, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert_checkpoint(str(saved.folder), tmp_path_factory.mktemp("head") / "head", format="mtp")


@pytest.fixture
def recipe(saved: Saved, head: Path) -> Mtp:
    target = load_training_target(str(saved.folder), device="cpu", dtype=torch.float32)
    return Mtp.start(Origin(target, read_draft(head)), MtpOptions(steps=K))


def batch_for(saved: Saved, recipe: Mtp) -> TrainingBatch:
    """Two samples and padding."""
    torch.manual_seed(3)
    texts = [torch.randint(3, pico.VOCABULARY, (length,)) for length in LENGTHS]
    online = OnlineStates(load_training_target(str(saved.folder), device="cpu", dtype=torch.float32), recipe.aux_layers)
    parts = []
    for number, text in enumerate(texts):
        positions = torch.arange(len(text))[None]
        states = online.states(text[None], positions, torch.zeros_like(positions))
        parts.append((text[None], positions, torch.full_like(positions, number), states))
    joined = [torch.cat([part[index] for part in parts], dim=1) for index in range(3)]
    last = torch.cat([states.last for *_, states in parts], dim=1)
    features = None
    if recipe.aux_layers is not None:
        features = torch.cat([states.features for *_, states in parts], dim=1)  # type: ignore[misc]
        features = pad(features, (0, 0, 0, 2))
    tokens, positions, numbers = joined
    return TrainingBatch(
        pad(tokens, (0, 2)),
        pad(positions, (0, 2)),
        pad(numbers, (0, 2), value=-1),
        pad(torch.ones_like(tokens, dtype=torch.bool), (0, 2)),
        features,
        pad(last, (0, 0, 0, 2)),
    )


def served(drafter: Drafter, text: Tensor, states: Tensor, anchor: int) -> Tensor:
    """The logits [K, V] of a chain after a fresh prefill, which goes on with the text's own tokens."""
    drafter.allocate(1, len(text) + K + 1, K)
    known = anchor + 1
    drafter.prefill([NewSequence(0, text[:known], states[:known])])
    true, found = pad(text[known + 1 :], (0, K)), []

    def draw(step: int, logits: Tensor, ids: Tensor | None = None) -> Tensor:
        found.append(logits[0])
        return true[step : step + 1]

    drafter.propose(
        Committed(
            slots=torch.tensor([0]),
            tokens=text[known : known + 1][None],
            counts=torch.tensor([1]),
            start=torch.tensor([known]),
            features=states[anchor : anchor + 1][None],
            length=known + K + 1,
        ),
        K,
        draw,
    )
    return torch.stack(found)


@pytest.mark.slow
def test_the_training_forward_is_what_serving_computes(saved: Saved, head: Path, recipe: Mtp) -> None:
    batch = batch_for(saved, recipe)
    drafted = batch.drafted(K)
    rows = recipe.rows(recipe.steps(batch, drafted))
    found = torch.zeros(*drafted.shape, pico.VOCABULARY)
    found[rows.steps, rows.positions] = recipe.draft.logits(rows.hidden).detach()
    target = load_target(saved.folder, device="cpu", dtype=torch.float32, attention=ATTENTION)
    drafter = load_drafter(read_draft(head), target)
    states = batch.last[0] if batch.features is None else batch.features[0]
    begin = 0
    for length in LENGTHS:
        here = slice(begin, begin + length)
        for anchor in range(length - 2):
            expected = served(drafter, batch.tokens[0, here], states[here], anchor)
            kept = drafted[:, begin + anchor]
            assert_close(found[:, begin + anchor][kept], expected[kept], depth=DEPTH)
        begin += length


@pytest.mark.slow
def test_it_is_stored_under_its_own_names(head: Path, recipe: Mtp, tmp_path: Path) -> None:
    """Saved without a step, it is the head that it was; loaded into another recipe, one that has changed."""
    save_draft(tmp_path / "same", recipe.spec, recipe.tensors(), target="")
    before, after = (load_file(folder / "model.safetensors") for folder in (head, tmp_path / "same"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    with torch.no_grad():
        for parameter in recipe.draft.parameters():
            if parameter.requires_grad:
                parameter.add_(0.01)
    changed = {name: tensor.clone() for name, tensor in recipe.tensors().items()}
    assert any(not torch.equal(changed[name], before[name]) for name in before)
    recipe.load(before)
    assert all(torch.equal(tensor, before[name]) for name, tensor in recipe.tensors().items())
    recipe.load(changed)
    assert all(torch.equal(tensor, changed[name]) for name, tensor in recipe.tensors().items())


def test_loading_a_checkpoint_keeps_the_parameters(head: Path, recipe: Mtp) -> None:
    """Which an optimizer may hold already."""
    before = dict(recipe.named_parameters())
    recipe.load(load_file(head / "model.safetensors"))
    after = dict(recipe.named_parameters())
    assert before.keys() == after.keys()
    assert all(after[name] is parameter for name, parameter in before.items())


@pytest.mark.slow
def test_it_learns(saved: Saved, recipe: Mtp) -> None:
    batch = batch_for(saved, recipe)
    optimizer = torch.optim.Adam([p for p in recipe.draft.parameters() if p.requires_grad], lr=3e-3)
    losses = []
    for _ in range(12):
        loss = recipe(batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    frozen = [recipe.draft.embed_tokens, recipe.draft.lm_head]
    assert all(p.grad is None for module in frozen for p in module.parameters())  # type: ignore[union-attr]


@pytest.mark.long
def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    """6 steps are 4 and a kill before the last, and 2 more from the checkpoint: of a hybrid target with experts."""
    target = pico.save_tokenizer(save_with_head("qwen3_next", tmp_path / "target").folder)
    data = tmp_path / "samples.jsonl"
    write_samples(data, samples(12), SamplesOrigin(target="pico", tokenizer_sha256="0" * 64))
    given = {
        "recipe": "mtp", "target": str(target), "data": str(data), "tokens_per_row": 64, "options": {"steps": K},
        "optimization": {"max_steps": 6, "lr": 1e-3}, "save_every": 4, "validation": {"share": 0.2},
    }  # fmt: skip
    whole, resumed = ({**given, "out": str(tmp_path / name)} for name in ("whole", "resumed"))
    train_draft(read_config(None, [], whole))
    train_until_killed(5, resumed)
    assert [folder.name for folder in (tmp_path / "resumed").glob("checkpoint-*")] == ["checkpoint-4"]
    train_draft(read_config(None, [], resumed), resume=True)
    one, other = (load_file(tmp_path / name / "checkpoint-6" / "model.safetensors") for name in ("whole", "resumed"))
    before = load_file(tmp_path / "whole" / "checkpoint-4" / "model.safetensors")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert any(not torch.equal(one[name], before[name]) for name in one)


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [[], pytest.param(["--lora", "r=2,alpha=4"], marks=pytest.mark.long)], ids=["whole", "LoRA"]
)
def test_from_the_target_and_back_into_it(more: list[str], saved: Saved, tmp_path: Path, draftkit: Command) -> None:
    """A run of two steps; its head is put into the target, which then drafts with it."""
    pico.save_tokenizer(saved.folder)
    data = tmp_path / "samples.jsonl"
    write_samples(data, samples(8), SamplesOrigin(target="pico", tokenizer_sha256="0" * 64))
    settings = ("optimization.max_steps=2", "tokens_per_row=64", "options.steps=2", "optimization.precision=float32")
    flags = ["train", "--recipe", "mtp", "--target", saved.folder, "--data", data, "--out", tmp_path / "run", *more]
    ran = draftkit(*flags, *(part for setting in settings for part in ("--set", setting)))
    assert ran.code == 0, ran.err
    folder, _ = put_heads_back(str(tmp_path / "run" / "draft"), str(saved.folder), tmp_path / "whole")
    arguments = (
        "--dataset",
        "zoo",
        "--limit",
        1,
        "--max-new-tokens",
        4,
        "--k",
        2,
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--json",
    )
    cells = []
    for target, draft in ((folder, "mtp"), (saved.folder, tmp_path / "run" / "draft")):
        shown = draftkit("eval", "--target", target, "--draft", draft, *arguments)
        assert shown.code == 0, shown.err
        cells.append(json.loads(shown.out)["cells"][0])
    assert cells[0]["num_accepted_tokens_per_pos"] == cells[1]["num_accepted_tokens_per_pos"]
