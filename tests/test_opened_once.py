"""What a user names is located once, each of its files read once, and each of transformers' loaders called once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from fixtures.checkpoints import pico
from fixtures.servers.hub_server import Commit, HubServer
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedModel

import draftkit.hub.locate
from draftkit import convert_checkpoint, diagnose_draft, evaluate_draft
from draftkit.io import jsonfile
from draftkit.results.settings import Settings

ASKED = Settings(prompts="zoo", limit=1, max_new_tokens=2, concurrency=1, device="cpu", dtype="float32")
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
        jsonfile.read_object: counted(lambda path: f"read {path}", jsonfile.read_object),
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


@pytest.mark.parametrize("draft", ["zoo:eagle3", "ngram"])
def test_an_evaluation(opened: Counter[str], draft: str) -> None:
    evaluate_draft("zoo:target", draft, ASKED)
    assert opened["locate zoo:target"] == 1
    assert repeated(opened) == {}


def test_a_diagnosis(opened: Counter[str]) -> None:
    diagnose_draft("zoo:target", "zoo:eagle3", limit=1, max_new_tokens=2, device="cpu", dtype="float32")
    assert opened["locate zoo:target"] == opened["locate zoo:eagle3"] == 1
    assert repeated(opened) == {}


@pytest.mark.parametrize("to", ["unified", "speculators", "gguf"])
def test_a_conversion(opened: Counter[str], tmp_path: Path, to: str) -> None:
    convert_checkpoint("zoo:eagle3", tmp_path / "out.gguf", to=to, target="zoo:target")
    assert opened["locate zoo:target"] == opened["locate zoo:eagle3"] == 1
    assert repeated(opened) == {}


class Moving(HubServer):
    """A Hub whose `main` is another commit from the `after`-th request on."""

    def __init__(self, folder: Path, other: Path, after: int):
        super().__init__({"org/target": folder, "org/target@other": other})
        self.after = after

    def commit(self, repo: str, revision: str) -> Commit:
        moved = revision == "main" and len(self.requests) >= self.after
        return super().commit(repo, "other" if moved else revision)


@pytest.mark.slow
@pytest.mark.parametrize("after", [pytest.param(4, marks=pytest.mark.long), 6, pytest.param(9, marks=pytest.mark.long)])
def test_a_branch_that_moves_meanwhile_changes_nothing(after: int, tmp_path: Path) -> None:
    """It moves to weights of the same shapes, after the third request, whose answer says which commit `main` is.

    In a process of its own, as `huggingface_hub` reads its address once.
    """
    begun, moved = (pico.save_tokenizer(pico.save_llama(tmp_path / str(seed), seed=seed)) for seed in (0, 1))

    def measured(target: str | Path, **environment: str) -> list[object]:
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text(json.dumps({"id": "one", "turns": ["a b c d"]}))
        options = ["--prompts", prompts, "--max-new-tokens", "8", "--set", "template=false", "--json"]
        ran = subprocess.run(
            [sys.executable, "-m", "draftkit", "eval", "--target", target, "--draft", "ngram", *options],
            env=os.environ | {"HF_HUB_DISABLE_XET": "1"} | environment, check=False, capture_output=True, text=True,
            timeout=300,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        return [cell["samples"] for cell in json.loads(ran.stdout)["cells"]]

    with Moving(begun, moved, after) as hub:
        found = measured("org/target", HF_ENDPOINT=hub.endpoint, HF_HOME=str(tmp_path / "home"))
        assert len(hub.requests) > after
    assert found == measured(begun)
    assert found != measured(moved)
