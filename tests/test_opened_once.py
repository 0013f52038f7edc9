"""What a user names is located once, each of its files read once, and each of transformers' loaders called once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fixtures.checkpoints import pico
from fixtures.servers.hub_server import Commit, HubServer
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedModel

import draftkit.hub.locate
from draftkit import (
    AdaptSettings,
    DraftTuner,
    Sample,
    TrainConfig,
    adapt_draft,
    convert_checkpoint,
    diagnose_draft,
    evaluate_draft,
    train_draft,
)
from draftkit.checks.training_data import check_data
from draftkit.cli import main
from draftkit.data.sample_files import write_samples
from draftkit.data.samples import SamplesOrigin
from draftkit.data.states.write import StatesSettings, open_states_job
from draftkit.data.tokenizer import load_tokenizer
from draftkit.engines.vllm.settings import VllmSettings
from draftkit.evaluate.engines.vllm import VllmEngine
from draftkit.io import jsonfile
from draftkit.results.settings import Settings
from draftkit.train.config import read_config
from draftkit.train.dry_run import check_run

ASKED = Settings(prompts="zoo", limit=1, max_new_tokens=2, concurrency=1, device="cpu", dtype="float32")
FAKE_VLLM = Path(__file__).parent / "fixtures/engines/fake_vllm"
LOADERS = (AutoConfig, AutoTokenizer, GenerationConfig)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts by what is located, what draftkit reads, and what each loader of transformers loads."""
    counts: Counter[str] = Counter()
    inside = 0  # calls of transformers' loaders that run: what these open is theirs

    def counted(
        name: Callable[..., str], function: Callable[..., object], *, loads: bool = False
    ) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            nonlocal inside
            if not inside:
                counts[name(*args)] += 1
            inside += loads
            try:
                return function(*args, **kwargs)
            finally:
                inside -= loads

        return call

    replaced = {
        draftkit.hub.locate.locate: counted(lambda source: f"locate {source}", draftkit.hub.locate.locate),
        jsonfile.read_text: counted(lambda path: f"read {path}", jsonfile.read_text),
    }
    for module in [module for name, module in sys.modules.items() if name.startswith("draftkit.")]:
        for name, value in list(vars(module).items()):
            if callable(value) and getattr(value, "__hash__", None) and value in replaced:
                monkeypatch.setattr(module, name, replaced[value])
    for loader in (*LOADERS, PreTrainedModel):
        method = loader.from_pretrained.__func__

        def named(cls: type, folder: object, *_: object, loader: type = loader) -> str:
            return f"{loader.__name__} {folder}"

        monkeypatch.setattr(loader, "from_pretrained", classmethod(counted(named, method, loads=True)))
    return counts


def repeated(counts: Counter[str]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count > 1}


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["zoo:eagle3", "ngram", "zoo:draft-model"])
def test_an_evaluation(opened: Counter[str], draft: str) -> None:
    evaluate_draft("zoo:target", draft, ASKED)
    assert opened["locate zoo:target"] == 1
    assert repeated(opened) == {}


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["zoo:eagle3", "zoo:draft-model"])
def test_an_evaluation_in_vllm(
    opened: Counter[str], draft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At two settings, for each of which vLLM starts anew."""
    monkeypatch.setenv("PYTHONPATH", str(FAKE_VLLM))
    monkeypatch.setenv("FAKE_VLLM_JOURNAL", str(tmp_path / "journal"))
    engine = VllmEngine(VllmSettings(python=sys.executable))
    evaluate_draft("zoo:target", draft, replace(ASKED, repeats=0).sweep(k=(1, 2)), engines=[engine])
    assert opened["locate zoo:target"] == opened[f"locate {draft}"] == 1
    assert repeated(opened) == {}


@pytest.mark.slow
def test_a_diagnosis(opened: Counter[str]) -> None:
    diagnose_draft("zoo:target", "zoo:eagle3", limit=1, max_new_tokens=2, device="cpu", dtype="float32")
    assert opened["locate zoo:target"] == opened["locate zoo:eagle3"] == 1
    assert repeated(opened) == {}


@pytest.mark.parametrize("to", ["unified", "speculators", "gguf"])
def test_a_conversion(opened: Counter[str], tmp_path: Path, to: str) -> None:
    convert_checkpoint("zoo:eagle3", tmp_path / "out.gguf", to=to, target="zoo:target")
    assert opened["locate zoo:target"] == opened["locate zoo:eagle3"] == 1
    assert repeated(opened) == {}


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    """A file of samples that the embedded target reads, as if it had written their second half."""
    origin = SamplesOrigin("zoo:target", load_tokenizer("zoo:target").sha256)
    write_samples(path := tmp_path / "samples.jsonl", [sample(str(n)) for n in range(20)], origin)
    return path


def sample(name: str, size: int = 12) -> Sample:
    return Sample.of(name, [5 + (7 * i + len(name)) % 50 for i in range(size)], [(size // 2, size)])


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["zoo:eagle3", ""])
def test_a_training(samples: Path, opened: Counter[str], draft: str, tmp_path: Path) -> None:
    train_draft(training(samples, draft, tmp_path / "run"))
    assert opened["locate zoo:target"] == 1
    assert opened["locate zoo:eagle3"] == bool(draft)
    assert repeated(opened) == {}


def training(samples: Path, draft: str, out: Path) -> TrainConfig:
    flags = {"recipe": "eagle3", "target": "zoo:target", "draft": draft, "data": str(samples), "out": str(out)}
    return read_config(None, ["optimization.max_steps=1", "tokens_per_row=64", "device=cpu"], flags)


def test_the_plan_of_a_training(samples: Path, opened: Counter[str], tmp_path: Path) -> None:
    check_run(training(samples, "zoo:eagle3", tmp_path / "run"))
    assert opened["locate zoo:target"] == opened["locate zoo:eagle3"] == 1
    assert repeated(opened) == {}


def test_stored_states(samples: Path, opened: Counter[str], tmp_path: Path) -> None:
    settings = StatesSettings(target="zoo:target", device="cpu", tokens_per_row=64)
    with open_states_job(samples, tmp_path / "states", settings) as job:
        job.write()
    assert opened["locate zoo:target"] == 1
    again = repeated(opened)
    assert [Path(name).name for name in again] == ["manifest.json"]  # which other workers may have written since


def test_a_preflight(samples: Path, opened: Counter[str]) -> None:
    check_data(samples, "zoo:target", "zoo:eagle3", device="cpu", dtype="float32")
    assert opened["locate zoo:target"] == opened["locate zoo:eagle3"] == 1
    assert repeated(opened) == {}


@pytest.mark.slow
def test_a_tuner(opened: Counter[str], tmp_path: Path) -> None:
    tuner = DraftTuner("zoo:eagle3", "zoo:target", device="cpu")
    tuner.step([sample("one")])
    tuner.save(tmp_path / "draft")
    assert opened["locate zoo:target"] == opened["locate zoo:eagle3"] == 1
    assert repeated(opened) == {}


def test_answers_of_the_target(opened: Counter[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps({"prompt": "a b c d"}))
    given = [source, tmp_path / "out.jsonl", "--target", "zoo:target", "--max-new-tokens", 16, "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", list(map(str, ["draftkit", "data", "regenerate", *given])))
    with pytest.raises(SystemExit, match="0"):
        main()
    assert opened["locate zoo:target"] == 1
    assert repeated(opened) == {}


@pytest.mark.long
def test_an_adaptation(opened: Counter[str], tmp_path: Path) -> None:
    """Judged twice, with weights that are not kept through the training between."""
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps({"id": str(n), "prompt": f"{n} {n}"}) + "\n" for n in range(24)))
    settings = AdaptSettings(
        draft="zoo:eagle3", target="zoo:target", traffic=str(log), out=str(tmp_path / "out"), replay="none",
        held_out=0.3, max_new_tokens=4, device="cpu", training=("optimization.max_steps=1",),
    )  # fmt: skip
    adapt_draft(settings)
    assert opened["locate zoo:target"] == opened["locate zoo:eagle3"] == 1
    assert {what: times for what, times in repeated(opened).items() if "PreTrainedModel" not in what} == {}


class Moving(HubServer):
    """A Hub whose `main` is another commit from the `after`-th request on."""

    def __init__(self, folder: Path, other: Path, after: int):
        super().__init__({"org/target": folder, "org/target@other": other})
        self.after = after

    def commit(self, repo: str, revision: str) -> Commit:
        moved = revision == "main" and len(self.requests) >= self.after
        return super().commit(repo, "other" if moved else revision)


@pytest.mark.long
@pytest.mark.parametrize("after", [4, 6, 9])
def test_a_branch_that_moves_meanwhile_changes_nothing(after: int, tmp_path: Path) -> None:
    """It moves to weights of the same shapes, after the third request, whose answer says which commit `main` is.

    In a process of its own, as `huggingface_hub` reads its address once.
    """
    begun, moved = (pico.save_tokenizer(pico.save_llama(tmp_path / str(seed), seed=seed)) for seed in (0, 1))

    def measured(target: str | Path, **environment: str) -> list[object]:
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text(json.dumps({"id": "one", "turns": ["a b c d"]}))
        options = ["--prompts", prompts, "--max-new-tokens", "8", "--set", "template=false", "--json"]
        out = command("eval", "--target", target, "--draft", "ngram", *options, **environment)
        return [cell["samples"] for cell in json.loads(out)["cells"]]

    with Moving(begun, moved, after) as hub:
        found = measured("org/target", HF_ENDPOINT=hub.endpoint, HF_HOME=str(tmp_path / "home"))
        assert len(hub.requests) > after
    assert found == measured(begun)
    assert found != measured(moved)


def command(*arguments: object, **environment: str) -> str:
    """What a command prints, in a process of its own."""
    ran = subprocess.run(
        [sys.executable, "-m", "draftkit", *map(str, arguments)],
        env=os.environ | {"HF_HUB_DISABLE_XET": "1"} | environment, check=False, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.long
@pytest.mark.parametrize("program", ["own", "vllm"])
@pytest.mark.parametrize("task", ["eval", "data states"])
def test_nothing_is_fetched_of_the_commit_to_which_a_branch_moves(task: str, program: str, tmp_path: Path) -> None:
    """It moves after the request whose answer says which commit `main` is; vLLM is given the folder of that one."""
    begun, moved = (pico.save_tokenizer(pico.save_llama(tmp_path / str(seed), seed=seed)) for seed in (0, 1))
    prompts, samples = tmp_path / "prompts.jsonl", tmp_path / "samples.jsonl"
    prompts.write_text(json.dumps({"id": "one", "turns": ["a b c d"]}))
    write_samples(samples, [sample("one")], SamplesOrigin("org/target", load_tokenizer(str(begun)).sha256))
    vllm = ["--vllm-python", sys.executable] if program == "vllm" else []
    if task == "eval":
        settings = ["--max-new-tokens", 4, "--set", "template=false", "--set", "repeats=0"]
        asked = ["eval", "--draft", "ngram", "--prompts", prompts, *settings]
        vllm += ["--engine", "vllm"] if vllm else []
    else:
        asked = ["data", "states", samples, tmp_path / "states"]
    with Moving(begun, moved, 4) as hub:
        environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(FAKE_VLLM)}
        journal = tmp_path / "journal"
        command(*asked, "--target", "org/target", *vllm, FAKE_VLLM_JOURNAL=str(journal), **environment)
        assert len(hub.requests) > 4
    (fetched,) = (tmp_path / "home").rglob("snapshots/*")
    assert fetched.name == Commit(begun).sha
    if vllm:
        named = [entry["arguments"]["model"] for entry in map(json.loads, journal.open()) if "arguments" in entry]
        assert set(named) == {str(fetched)}
