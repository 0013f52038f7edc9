"""A training run: it can be stopped and resumed bit for bit, its checkpoints are drafts, bad input is found first."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Command
from fixtures.checkpoints import pico
from fixtures.fuzzing.killed import killed_at_rename, train_until_killed
from fixtures.training.samples import samples
from peft import PeftModel
from safetensors.torch import load_file
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, TrainerState

from draftkit import convert_checkpoint
from draftkit.data.sample_files import write_samples
from draftkit.data.samples import Sample, SamplesOrigin
from draftkit.data.vocabulary import choose_vocabulary, plan_vocabulary
from draftkit.errors import DraftkitError
from draftkit.layout.folder import read_draft
from draftkit.layout.provenance import trained_tokens
from draftkit.loading import load_drafter, load_model
from draftkit.train import setup
from draftkit.train.checkpoint import STATE_FILE, newest_checkpoint
from draftkit.train.config import read_config
from draftkit.train.run import train_draft
from draftkit.train.setup import _check_output
from draftkit.train.trainer import WholeState

torch.set_num_threads(1)
V = 320


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = pico.save_llama(tmp_path_factory.mktemp("target"), num_hidden_layers=6)
    return pico.save_tokenizer(folder)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "samples.jsonl"
    write_samples(path, samples(40), SamplesOrigin(target="pico", tokenizer_sha256="0" * 64))
    return path


def settings(target: Path, data: Path, out: Path, **more: object) -> list[object]:
    given = {
        "optimization.max_steps": 8, "tokens_per_row": 128, "draft_vocab_size": 64, "options.steps": 3,
        "options.layers": "[1, 3, 5]", "save_every": 4, "log_every": 1, "validation.share": 0.2,
        "optimization.lr": "1e-3",
    } | more  # fmt: skip
    flags = ["--recipe", "eagle3", "--target", target, "--data", data, "--out", out]
    return flags + [part for name, value in given.items() for part in ("--set", f"{name}={value}")]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def whole(target: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train_draft(config(target, data, out))
    return out


def config(target: Path, data: Path, out: Path, **more: object) -> Any:
    arguments = list(map(str, settings(target, data, out, **more)))
    flags = dict(zip(("recipe", "target", "data", "out"), arguments[1:8:2], strict=True))
    return read_config(None, arguments[9::2], flags)


@pytest.mark.slow
def test_checkpoints_are_drafts(whole: Path, target: Path) -> None:
    model, _ = load_model(str(target), device="cpu", dtype=torch.float32)
    for folder in ("checkpoint-4", "checkpoint-8", "draft"):
        draft = read_draft(whole / folder)
        assert draft.spec.method == "eagle3"
        assert (trained_tokens(draft.provenance.facts) or 0) > 2
        assert load_drafter(draft, model).aux_layers is not None
        assert (whole / folder / "train.yaml").is_file()
        assert json.loads((whole / folder / "versions.json").read_text())["torch"] == torch.__version__
    assert_same(
        {name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
         for name, tensor in weights(whole / "checkpoint-8").items()},
        {name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
         for name, tensor in weights(whole / "draft").items()},
    )  # fmt: skip


@pytest.mark.slow
def test_the_saved_run_can_be_repeated(whole: Path, target: Path, data: Path, tmp_path: Path) -> None:
    again = read_config(whole / "checkpoint-8" / "train.yaml", [], {"out": str(tmp_path / "again")})
    train_draft(again)
    assert_same(weights(tmp_path / "again" / "checkpoint-8"), weights(whole / "checkpoint-8"))


@pytest.mark.slow
def test_recomputed_activations_change_nothing(whole: Path, target: Path, data: Path, tmp_path: Path) -> None:
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "checkpoint", lambda *a, **k: calls.append(1) or checkpoint(*a, **k))
        train_draft(config(target, data, tmp_path / "run", **{"optimization.recompute": True}))
    assert calls
    assert_same(weights(tmp_path / "run" / "checkpoint-8"), weights(whole / "checkpoint-8"))


@pytest.fixture(scope="module")
def states(target: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's states of the samples in files."""
    out = tmp_path_factory.mktemp("states") / "states"
    command = ["data", "states", data, out, "--target", target, "--layers", "1,3,5", "--encoding", "float32"]
    subprocess.run([sys.executable, "-m", "draftkit", *map(str, command)], check=True, capture_output=True, timeout=300)
    return out


def kill_at_step(step: int, target: Path, data: Path, out: Path, **more: object) -> None:
    flags = {"recipe": "eagle3", "target": str(target), "data": str(data), "out": str(out)}
    train_until_killed(step, flags, list(map(str, settings(target, data, out, **more)))[9::2])


@pytest.mark.long
@pytest.mark.parametrize("offline", [False, pytest.param(True, marks=pytest.mark.long)], ids=["online", "offline"])
def test_a_run_resumes_bit_for_bit(
    offline: bool, target: Path, data: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """20 steps are 10, a kill at 13, and 10 more; beside the checkpoint lies one that was not finished."""
    more: dict[str, object] = {"optimization.max_steps": 20, "save_every": 10}
    if offline:
        more["states"] = request.getfixturevalue("states")
    train_draft(config(target, data, tmp_path / "whole", **more))
    out = tmp_path / "run"
    kill_at_step(13, target, data, out, **more)
    (out / "checkpoint-13").mkdir()
    train_draft(config(target, data, out, **more), resume=True)
    assert_same(weights(out / "checkpoint-20"), weights(tmp_path / "whole" / "checkpoint-20"))


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_a_stop_signal_saves_and_ends_the_run(
    number: int, whole: Path, target: Path, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    arguments = [*settings(target, data, out), "--set", "save_every=0"]
    command = [sys.executable, "-m", "draftkit", "train", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as run:
        assert run.stderr is not None
        lines = []
        for line in run.stderr:
            lines.append(line)
            if line.startswith("step 2/"):
                run.send_signal(number)
                break
        rest = run.stderr.read()
        assert run.wait(60) == 128 + number, "".join(lines) + rest
    assert "--resume" in rest
    assert not (out / "draft").exists()
    (stopped,) = out.glob("checkpoint-*")
    assert 2 <= int(stopped.name.rpartition("-")[2]) < 8
    trained = train_draft(config(target, data, out, save_every=0), resume=True)
    assert trained.draft is not None
    assert_same(weights(out / "checkpoint-8"), weights(whole / "checkpoint-8"))


@pytest.mark.slow
@pytest.mark.parametrize("lora", ["default", "r=4,alpha=8,targets=q_proj+fc,dora=true"])
def test_adapters(lora: str, whole: Path, target: Path, data: Path, tmp_path: Path, draftkit: Command) -> None:
    """They leave the rest as it was, are saved merged and by themselves, and resume bit for bit."""
    base, out = whole / "checkpoint-8", tmp_path / "run"
    flags = ("--draft", base, "--lora", lora)
    arguments = settings(target, data, out)
    assert draftkit("train", *arguments, *flags).code == 0
    before, after = weights(base), weights(out / "checkpoint-8")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all(before[name].ndim == 2 and "lm_head" not in name for name in changed)
    if lora != "default":
        assert {name.split(".")[-2] for name in changed} == {"q_proj", "fc"}
    else:
        assert draftkit("convert", out / "checkpoint-8", tmp_path / "exported", "--part", "adapter").code == 0
        assert_same({n: after[n] for n in changed}, _merged(before, tmp_path / "exported"))
    assert (out / "draft" / "adapter" / "adapter_config.json").is_file()
    for leftover in (out / "draft", out / "checkpoint-8"):
        shutil.rmtree(leftover)
    assert draftkit("train", *arguments, *flags, "--resume").code == 0
    assert_same(weights(out / "checkpoint-8"), after)


def _merged(base: dict[str, torch.Tensor], adapter: Path) -> dict[str, torch.Tensor]:
    """The weights that an adapter changes, W + alpha / r · B·A in float32."""
    stated = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    halves = {n.removeprefix("base_model.model."): t for n, t in tensors.items()}
    modules = [name.removesuffix(".lora_A.weight") for name in halves if name.endswith(".lora_A.weight")]
    return {
        f"{module}.weight": base[f"{module}.weight"]
        + (halves[f"{module}.lora_B.weight"] @ halves[f"{module}.lora_A.weight"]) * (stated["lora_alpha"] / stated["r"])
        for module in modules
    }


@pytest.mark.slow
@pytest.mark.parametrize("lora", ["default", "r=4,alpha=8,targets=q_proj+down_proj,dora=true"])
def test_an_adapter_is_one_of_peft(lora: str, target: Path, data: Path, tmp_path: Path, draftkit: Command) -> None:
    """It names its base model, is loaded by peft, and converts to what the checkpoint has merged."""
    base, out = pico.save_llama(tmp_path / "base", num_hidden_layers=2), tmp_path / "run"
    arguments = ["--recipe", "draft-model", "--target", target, "--data", data, "--out", out, "--draft", base]
    sets = ("optimization.max_steps=4", "optimization.lr=1e-2", "tokens_per_row=128")
    assert draftkit("train", *arguments, "--lora", lora, *(part for s in sets for part in ("--set", s))).code == 0
    adapter = out / "checkpoint-4" / "adapter"
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    merged = weights(out / "checkpoint-4")
    assert draftkit("convert", adapter, tmp_path / "converted").code == 0
    converted, before = weights(tmp_path / "converted"), weights(base)
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).merge_and_unload()
    changed = 0
    for name, tensor in loaded.state_dict().items():
        torch.testing.assert_close(merged[name], tensor, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(converted[name], tensor, rtol=1e-4, atol=1e-5)
        changed += name in before and not torch.allclose(tensor, before[name], rtol=1e-3, atol=1e-4)
    assert changed


class Killed(BaseException):
    """As a kill would end it: nothing is cleaned up."""


def test_a_kill_while_the_last_file_is_written(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(state: TrainerState, path: str) -> None:
        Path(path).write_text('{"best_global_step": 4, ')
        raise Killed

    monkeypatch.setattr(TrainerState, "save_to_json", half)
    with pytest.raises(Killed):
        train_draft(config(target, data, tmp_path / "run"))
    assert (tmp_path / "run" / "checkpoint-4" / "model.safetensors").exists()
    assert newest_checkpoint(tmp_path / "run") is None


def test_a_copy_of_a_checkpoint_is_none(tmp_path: Path) -> None:
    for name in ("checkpoint-4", "checkpoint-10", "checkpoint-10-backup"):
        (tmp_path / name).mkdir()
        (tmp_path / name / STATE_FILE).touch()
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-10"


def test_what_a_kill_leaves_in_a_checkpoint_is_no_stranger_s(tmp_path: Path) -> None:
    """As the half of its last file, which lies in a hidden folder beside it."""
    source = pico.write_checkpoint(tmp_path / "source", pico.eagle3_config(), pico.eagle3_tensors())
    folder = tmp_path / "run" / "checkpoint-4"
    convert_checkpoint(str(source), folder, target=str(pico.save_target_config(tmp_path / "target")))
    assert killed_at_rename(0, lambda: WholeState().save_to_json(str(folder / "trainer_state.json")))
    assert any(path.name.startswith(".trainer_state.json.tmp-") for path in folder.iterdir())
    _check_output(tmp_path / "run", resume=True)
    (folder / "notes").touch()
    with pytest.raises(DraftkitError, match="checkpoint-4 holds what draftkit has not written"):
        _check_output(tmp_path / "run", resume=True)


def test_default_layers_of_a_target_that_has_too_few(target: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(DraftkitError, match=r"\[2, 3, 3\]") as raised:
        train_draft(config(target, data, tmp_path / "run", **{"options.layers": "[]"}))
    assert "options.layers" in str(raised.value)


@pytest.mark.slow
def test_validation_chooses_the_best(target: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    more = {"validation.every": 2, "save_every": 2, "keep": 5, "optimization.lr": "3e-2"}
    trained = train_draft(config(target, data, out, **more))
    state = json.loads((trained.checkpoint / "trainer_state.json").read_text())
    judged = {
        entry["step"]: (entry["eval_acceptance_length"], entry["eval_alpha"])
        for entry in state["log_history"] if "eval_alpha" in entry
    }  # fmt: skip
    assert sorted(judged) == [2, 4, 6, 8]
    best = max(judged, key=lambda step: judged[step])
    assert state["best_global_step"] == best
    own = {name: t.to(torch.float32) for name, t in weights(out / "draft").items()}
    chosen = {name: t.to(torch.float32) for name, t in weights(out / f"checkpoint-{best}").items()}
    assert all(torch.allclose(own[name], chosen[name], rtol=1e-2) for name in own)


@pytest.mark.slow
def test_a_run_ends_when_acceptance_no_longer_grows(target: Path, data: Path, tmp_path: Path) -> None:
    """A draft that does not change gets no better; a run that goes on knows what was found before."""
    more = {
        "validation.every": 2, "validation.patience": 3, "save_every": 2, "keep": 9, "optimization.lr": "1e-12",
        "optimization.max_steps": 40,
    }  # fmt: skip
    trained = train_draft(config(target, data, tmp_path / "run", **more))
    assert trained.checkpoint.name == "checkpoint-8"
    assert trained.draft == tmp_path / "run" / "draft"
    assert read_draft(trained.draft).spec.method == "eagle3"
    for later in (6, 8):
        shutil.rmtree(tmp_path / "run" / f"checkpoint-{later}")
    again = train_draft(config(target, data, tmp_path / "run", **more), resume=True)
    assert again.checkpoint.name == "checkpoint-8"


def test_a_run_from_flags_and_from_yaml(target: Path, data: Path, tmp_path: Path, draftkit: Command) -> None:
    shown = draftkit("train", *settings(target, data, tmp_path / "run"), "--dry-run")
    assert shown.code == 0
    file = tmp_path / "run.yaml"
    file.write_text(shown.out)
    again = draftkit("train", "--config", file, "--set", "optimization.lr=2e-4", "--dry-run")
    assert again.out == shown.out.replace("lr: 0.001", "lr: 0.0002")
    file.write_text(shown.out.replace("lr: 0.001", "lr: 1e-3"))
    assert draftkit("train", "--config", file, "--dry-run").out == shown.out
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"optimization.learning_rate": 1}, "optimization.learning_rate: unknown"),
        ({"lr": 1e-4}, r"    lr: unknown, did you mean optimization.lr\?"),
        ({"options.stepps": 1}, r"    options.stepps: unknown, did you mean steps\?"),
        ({"optimization.schedule": "cosin"}, r"did you mean cosine\?"),
        ({"optimization.schedule": "warmup_stable_decay"}, "schedule: 'warmup_stable_decay' is not one of"),
        ({"optimization.schedule": "polynomial", "optimization.lr": "1e-7"}, "above 1e-07"),
        ({"optimization.lr": ".inf"}, "lr: inf is not a finite number above 0"),
        ({"optimization.beta1": 1}, "beta1: 1"),
        ({"optimization.lr": 10**400}, "not a configuration"),
        ({"recipe": "[1]"}, r"recipe \[1\]"),
        ({"recipe": "eagle33"}, r"recipe 'eagle33', did you mean eagle3\?"),
        ({"seed": -1}, "seed: -1 is not a finite number at least 0 and below 4,294,967,296"),
        ({"seed": "2020-13-45"}, "not a configuration: month must be"),
        ({"seed": "2020-12-24"}, "not a configuration: a date"),
        ({"report_to": "[foo]"}, "report_to foo\n  expected: .*mlflow"),
        ({"lora": "{r: 0}"}, "lora.r: 0"),
        ({"options": "{broken: ["}, "not a configuration"),
        ({"options": "&a [*a]"}, "not a configuration"),
        ({"options": "[" * 500 + "]" * 500}, "not a configuration"),
        ({"draft": r'"a\0b"'}, "a text with a zero byte"),
        ({"options.reduction.decay": 2}, "decay: 2.0 is not"),
        ({"options.steps": "many"}, "steps: 'many' is not a whole number"),
        ({"options.loss": "kll"}, "kll"),
        ({"options.layers": "[1, 99]"}, r"target layers \[1, 99\]"),
        ({"draft_vocab_size": 999}, "a draft vocabulary of 999 tokens"),
        ({"tokens_per_row": 16}, "has .* tokens, a row 16"),
        ({"validation.share": 1.0}, "no sample is left to train on"),
        ({"validation.share": 0.0, "validation.every": 2}, "no sample is held out"),
        ({"validation.patience": 2}, "validation.patience 2 without validations in between"),
    ],
)  # fmt: skip
def test_bad_settings(
    more: dict[str, object], message: str, target: Path, data: Path, tmp_path: Path, draftkit: Command
) -> None:
    refused = draftkit("train", *settings(target, data, tmp_path / "run", **more))
    assert refused.code == 1
    assert re.search(message, refused.err), refused.err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_bad_input(whole: Path, target: Path, data: Path, tmp_path: Path, draftkit: Command) -> None:
    assert "gives no" not in draftkit("train", "--recipe", "eagle3").err
    assert draftkit("train", "--recipe", "eagle3").code == 1
    assert "already has checkpoint-4, checkpoint-8, draft" in draftkit("train", *settings(target, data, whole)).err
    empty = tmp_path / "empty.jsonl"
    write_samples(empty, [Sample.of("a", [5, 6, 7], [])], SamplesOrigin(target="pico", tokenizer_sha256="0" * 64))
    assert "the loss mask of every sample is empty" in draftkit("train", *settings(target, empty, tmp_path / "run")).err
    wrong = draftkit("train", *settings(target, data, tmp_path / "run"), "--draft", "zoo:eagle3")
    assert wrong.code == 1
    assert not (tmp_path / "run").exists()


def test_a_run_replaces_nothing_of_others(target: Path, data: Path, tmp_path: Path, draftkit: Command) -> None:
    out = tmp_path / "models"
    for name in ("draft", "checkpoint-8"):
        (out / name).mkdir(parents=True)
        (out / name / "notes").write_text("mine")
        for resume in ((), ("--resume",)):
            assert draftkit("train", *settings(target, data, out), *resume).code == 1
        assert (out / name / "notes").read_text() == "mine"
        shutil.rmtree(out / name)


@pytest.mark.slow
def test_a_full_disk_keeps_the_checkpoints_before(
    whole: Path, target: Path, data: Path, tmp_path: Path, draftkit: Command
) -> None:
    """The system refuses to write as much as `optimizer.pt` needs, and more than the draft."""
    out = tmp_path / "run"
    assert draftkit("train", *settings(target, data, out, **{"optimization.max_steps": 2, "save_every": 2})).code == 0
    shutil.rmtree(out / "draft")
    size = (out / "checkpoint-2" / "model.safetensors").stat().st_size
    assert (out / "checkpoint-2" / "optimizer.pt").stat().st_size > 1.6 * size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(1.5 * size), before[1]))
    try:
        ran = draftkit("train", *settings(target, data, out, save_every=4), "--resume")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert ran.code == 1
    assert "error: writing checkpoint-4 failed" in ran.err
    assert "Traceback" not in ran.err
    assert [path.name for path in out.iterdir()] == ["checkpoint-2"]


def test_nothing_trains_on_nan(target: Path, data: Path, tmp_path: Path, draftkit: Command) -> None:
    broken = draftkit("train", *settings(target, data, tmp_path / "run", **{"optimization.lr": "1e30"}))
    assert broken.code == 1
    assert "the loss is" in broken.err
    assert not (tmp_path / "run" / "draft").exists()


# The draft vocabulary


def test_ties_go_to_the_lower_id() -> None:
    counts = torch.tensor([0, 5, 2, 2, 2, 0, 9])
    assert choose_vocabulary(counts, 4).tolist() == [1, 2, 3, 6]
    assert choose_vocabulary(counts, 6).tolist() == [0, 1, 2, 3, 4, 6]


def test_the_ceiling_of_a_vocabulary() -> None:
    counts = torch.tensor([0, 9, 8, 1])
    samples = [Sample.of("a", [1, 1, 2, 1, 3, 2, 2, 1], [(1, 8)])]
    # From token 1: drafts 2, 1 stand, 3 does not; then from 3: 2, 2 stand; then 1 is the target's own.
    small, all_of_them = plan_vocabulary(samples, counts, 2, sizes=(2,))
    assert (small.size, all_of_them.size) == (2, 4)
    assert small.coverage == pytest.approx(17 / 18)
    assert small.acceptance_length == pytest.approx(1 + 4 / 2)
    assert all_of_them.acceptance_length == pytest.approx(3)


def test_plan_vocab(target: Path, data: Path, tmp_path: Path, draftkit: Command) -> None:
    shown = draftkit("train", *settings(target, data, tmp_path / "run"), "--plan-vocab", "--json")
    (ceiling,) = json.loads(shown.out)
    assert ceiling["size"] == V
    assert ceiling["coverage"] == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_causal_lm_says_its_dtype(target: Path, data: Path, tmp_path: Path) -> None:
    flags = {"recipe": "draft-model", "target": str(target), "data": str(data), "out": str(tmp_path / "run")}
    settings = ["optimization.max_steps=1", "tokens_per_row=128", "target_dtype=bfloat16"]
    train_draft(read_config(None, settings, flags))
    for folder, dtype in (("checkpoint-1", "float32"), ("draft", "bfloat16")):
        config = json.loads((tmp_path / "run" / folder / "config.json").read_text())
        assert config["dtype"] == dtype
        stored = {str(tensor.dtype) for tensor in weights(tmp_path / "run" / folder).values()}
        assert stored == {f"torch.{dtype}"}
