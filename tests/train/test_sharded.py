"""A draft that FSDP2 shards among processes trains as it does in one, with every recipe and with adapters, beside the
target that it shares weights with; its checkpoints are whole, and any number of processes goes on with them.

Accelerate turns FSDP on where there are GPUs, so that the processes here are made to believe that it has.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin
from fixtures.checkpoints import pico
from fixtures.training.samples import samples
from safetensors.torch import load_file
from test_two_processes import given, history, settings  # noqa: F401
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from draftkit.data.packing import row_tensors
from draftkit.data.states.online import OnlineStates
from draftkit.errors import DraftkitError
from draftkit.train.batch import TrainingBatch
from draftkit.train.checkpoint import newest_checkpoint
from draftkit.train.config import read_config
from draftkit.train.recipes import recipe_class, recipe_names
from draftkit.train.recipes.eagle_eagle3 import Eagle3, Eagle3Options
from draftkit.train.recipes.recipe import Origin, Recipe
from draftkit.train.run import train_draft
from draftkit.train.sharding import load_whole_optimizer, shard_trained_alone, state_of, whole, whole_optimizer

torch.set_num_threads(1)
STEPS = 10
LAUNCH = (
    sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--num_machines", "1",
    "--mixed_precision", "no", "--dynamo_backend", "no", "--use_fsdp", "--fsdp_version", "2",
)  # fmt: skip
WORK = """
import json, os, shutil, signal, sys, torch
from pathlib import Path
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from draftkit.train.config import read_config
from draftkit.train.run import train_draft

torch.set_num_threads(1)
begin = AcceleratorState.__init__

def with_fsdp(self, *arguments, fsdp_plugin=None, **more):
    begin(self, *arguments, fsdp_plugin=fsdp_plugin, **more)
    if fsdp_plugin is not None:
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

AcceleratorState.__init__ = with_fsdp

class Sharded(TrainerCallback):
    def on_step_begin(self, args, state, control, model, **_):
        assert all(isinstance(p, DTensor) == p.requires_grad for p in model.parameters())
        groups = {module for module in model.modules() if isinstance(module, FSDPModule)}
        assert groups == {model, *model.layers_run_once}, groups

class Killed(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        if state.global_step == 6 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)

for settings, how in json.load(open(sys.argv[1])):
    callbacks = (Sharded(), Killed()) if how == "killed" else (Sharded(),)
    train_draft(read_config(None, [], settings), resume=how == "resume", callbacks=callbacks)
"""


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_what_is_frozen_stays_whole_and_the_rest_is_gathered(alone: None) -> None:
    """The draft's embedding is the target's. States of weights and optimizer are those of one process."""
    target = pico.llama(num_hidden_layers=6)
    options = Eagle3Options(steps=2, layers=(1, 3, 5))
    recipe, other = Eagle3.start(Origin(target), options), Eagle3.start(Origin(target), options)
    other.load_state_dict(recipe.state_dict())
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    shard_trained_alone(plugin, recipe)
    frozen = {p for module in plugin.ignored_modules for p in module.parameters()}
    fully_shard(recipe, mesh=init_device_mesh("cpu", (1,)), ignored_params=frozen)
    assert {name for name, p in recipe.named_parameters() if not isinstance(p, DTensor)} == {
        "draft.embed_tokens.weight"
    }

    optimizers = []
    for each in (recipe, other):
        optimizer = torch.optim.AdamW([p for p in each.parameters() if p.requires_grad], lr=1e-3)
        loss(each, target).backward()
        optimizer.step()
        optimizers.append(optimizer)
    states = [whole_optimizer(optimizer) for optimizer in optimizers]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    for number, state in states[1]["state"].items():
        torch.testing.assert_close(states[0]["state"][number], state, rtol=1e-4, atol=1e-9)
    load_whole_optimizer(optimizers[0], states[1])
    with whole(recipe):
        assert state_of(recipe).keys() == other.state_dict().keys()
        found = recipe.tensors()
    torch.testing.assert_close(found, other.tensors(), rtol=0, atol=1e-6)
    assert all(isinstance(p, DTensor) for p in recipe.parameters() if p.requires_grad)


@pytest.mark.parametrize("name", ["draft-model", "dflash"])
def test_layers_that_run_once_are_gathered_one_by_one(name: str, alone: None) -> None:
    target, kind = pico.llama(num_hidden_layers=6), recipe_class(name)
    options = {"layers": (1, 3), "mask_token_id": 5, "num_layers": 4} if name == "dflash" else {"num_layers": 4}
    recipe = kind.start(Origin(target), kind.options_type(**options))
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    shard_trained_alone(plugin, recipe, recipe.layers_run_once)
    assert plugin.transformer_cls_names_to_wrap == [type(recipe.layers_run_once[0]).__name__]
    frozen = {p for module in plugin.ignored_modules for p in module.parameters()}
    mesh, layers = init_device_mesh("cpu", (1,)), recipe.layers_run_once
    for module in (*layers, recipe):
        fully_shard(module, mesh=mesh, ignored_params=frozen)
    gathered: list[list[int]] = []

    def note(*_: object) -> None:
        gathered.append([n for n, layer in enumerate(layers) if not isinstance(next(layer.parameters()), DTensor)])

    for layer in layers:
        layer.register_forward_pre_hook(note)
    loss(recipe, target).backward()
    assert gathered == [[0], [1], [2], [3]]
    assert all(isinstance(p, DTensor) for layer in layers for p in layer.parameters())
    with whole(recipe):
        for _ in range(2):  # as when a draft is judged, whose layers run as often as there are parts
            loss(recipe, target)
            assert gathered[-1] == [0, 1, 2, 3]
    assert all(isinstance(p, DTensor) for layer in layers for p in layer.parameters())


def loss(recipe: Recipe, target: Any) -> Tensor:
    row = {name: tensor[None] for name, tensor in row_tensors(samples(2), 96).items()}
    states = OnlineStates(target, recipe.aux_layers).states(row["tokens"], row["positions"], row["sample_ids"])
    found: Tensor = recipe(TrainingBatch(**row, features=states.features, last=states.last)).loss
    return found


def test_the_first_version_of_fsdp_is_refused() -> None:
    with pytest.raises(DraftkitError, match="FSDP 1 cannot leave out what a draft shares with its target"):
        shard_trained_alone(FullyShardedDataParallelPlugin(fsdp_version=1), torch.nn.Linear(1, 1))


def variants(given: dict[str, str], folder: Path, **more: object) -> dict[str, dict[str, Any]]:  # noqa: F811
    """The runs of every recipe by AdamW, which can be compared to the last bits, with adapters, recomputed activations,
    in bfloat16, and judged on the way; one by Muon, which rounds its matrices to bfloat16."""

    def run(name: str, recipe: str, **other: object) -> dict[str, Any]:
        made = settings(recipe, given, folder / name, max_steps=STEPS, **{"optimizer": "adamw", **more})
        for part, values in other.items():
            made[part] = made[part] | values if isinstance(made.get(part), dict) else values
        return made

    return {name: run(name, name) for name in recipe_names()} | {
        "muon": run("muon", "eagle3", optimization={"optimizer": "muon"}),
        "lora": run("lora", "eagle3", lora={"r": 4}),
        "lora-parallel": run("lora-parallel", "p-eagle", lora={"r": 4, "dora": True}),
        "recompute": run("recompute", "eagle3", optimization={"recompute": True}),
        "bfloat16": run("bfloat16", "eagle3", optimization={"precision": "bfloat16"}),
        "judged": run("judged", "eagle3", validation={"every": 4}, save_every=5, keep=0),
        "blocks": run("blocks", "dflash", validation={"every": 4}, save_every=5, keep=0),
        "layers": run("layers", "draft-model", optimization={"recompute": True}, lora={"r": 4}),
    }


def launch(folder: Path, runs: list[tuple[dict[str, Any], str]]) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    (folder / "runs.json").write_text(json.dumps(runs))
    (folder / "work.py").write_text(WORK)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [*LAUNCH, str(folder / "work.py"), str(folder / "runs.json")],
        env=environment, check=False, capture_output=True, text=True, timeout=900,
    )  # fmt: skip


@pytest.fixture(scope="module")
def sharded(given: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """All runs in two processes, one after the other, as imports take longest."""
    folder = tmp_path_factory.mktemp("sharded")
    ran = launch(folder, [(run, "") for run in variants(given, folder).values()])
    assert ran.returncode == 0, ran.stderr[-5000:]
    return folder


def weights(out: Path, step: int = STEPS) -> dict[str, Tensor]:
    return load_file(out / f"checkpoint-{step}" / "model.safetensors")


@pytest.mark.long
def test_sharded_runs_are_those_of_one_process(given: dict[str, str], sharded: Path, tmp_path: Path) -> None:  # noqa: F811
    """Losses within 1e-5, weights within 1e-6 after ten steps by AdamW in float32."""
    for name, run in variants(given, tmp_path, accumulation=2).items():
        train_draft(read_config(None, [], run))
        one, two = history(tmp_path / name), history(sharded / name)
        assert len(one) == len(two) > STEPS
        far = max(
            abs(entry[figure] - other[figure]) / abs(entry[figure])
            for entry, other in zip(one, two, strict=True)
            for figure in {"loss", "eval_loss"} & entry.keys()
        )
        found, expected = weights(sharded / name), weights(tmp_path / name)
        assert found.keys() == expected.keys()
        apart = max(float((found[part].float() - tensor.float()).abs().max()) for part, tensor in expected.items())
        print(f"{name}: losses within {far:.1e}, weights within {apart:.1e}")
        # bfloat16 rounds, Muon its steps alone.
        allowed = {"bfloat16": (2e-2, 1.0), "muon": (1e-3, 1e-3)}
        losses, tensors = allowed.get(name, (1e-5, 1e-6))
        assert far <= losses, name
        assert apart <= tensors, name
        assert (sharded / name / "draft" / "model.safetensors").is_file()


@pytest.mark.long
@pytest.mark.parametrize("name", ["judged", "blocks"])
def test_a_sharded_run_goes_on_bit_for_bit_and_in_one_process_too(
    name: str,
    given: dict[str, str],  # noqa: F811
    sharded: Path,
    tmp_path: Path,
) -> None:
    """From the checkpoint in its middle, as if it had been killed after it. `blocks` has groups of single layers."""
    run = variants(given, tmp_path)[name]
    for place in (name, "single"):
        shutil.copytree(sharded / name / "checkpoint-5", tmp_path / place / "checkpoint-5")
    ran = launch(tmp_path, [(run, "resume")])
    assert ran.returncode == 0, ran.stderr[-5000:]
    unbroken = weights(sharded / name)
    assert all(torch.equal(tensor, unbroken[part]) for part, tensor in weights(tmp_path / name).items())
    train_draft(dataclasses.replace(read_config(None, [], run), out=str(tmp_path / "single")), resume=True)
    torch.testing.assert_close(weights(tmp_path / "single"), unbroken, rtol=0, atol=1e-6)


@pytest.mark.long
def test_a_killed_rank_leaves_whole_checkpoints(given: dict[str, str], sharded: Path, tmp_path: Path) -> None:  # noqa: F811
    run = variants(given, tmp_path)["judged"]
    ran = launch(tmp_path, [(run, "killed")])
    assert ran.returncode != 0
    assert signal.SIGKILL.name in ran.stderr
    newest = newest_checkpoint(tmp_path / "judged")
    assert newest is not None
    assert newest.name in ("checkpoint-4", "checkpoint-5")
    ran = launch(tmp_path, [(run, "resume")])
    assert ran.returncode == 0, ran.stderr[-5000:]
    unbroken = weights(sharded / "judged")
    assert all(torch.equal(tensor, unbroken[name]) for name, tensor in weights(tmp_path / "judged").items())
