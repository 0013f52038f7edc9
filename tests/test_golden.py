"""Golden files: what the ways to measure and the subjects of the net give, so that a rebuilt house gives the same.

Sentences are left out, and what a machine decides: times, speeds, versions, its paths. `DRAFTKIT_GOLDEN=write` writes
the files anew, which is done on purpose only: a difference is a fault, or it is named in the note of the change that
makes it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from conftest import Command
from fixtures import net
from fixtures.servers.llama_program import write_program
from fixtures.servers.speaking import SpeakingServer, simulated
from fixtures.servers.vllm_server import VllmTestServer

GOLDEN = Path(__file__).parent / "fixtures" / "golden"
FAKE_VLLM = Path(__file__).parent / "fixtures/engines/fake_vllm"
K = 3
SHORT = ("--target", "zoo:target", "--limit", 4, "--max-new-tokens", 16, "--device", "cpu", "--set", "repeats=0")
# What the machine decides: figures of time and what is made of them, and what says where and when.
TIMES = {
    "runtime_s", "tokens_per_second", "baseline_tokens_per_second", "speedup", "speedup_interval", "pace_error",
    "ttft_ms", "tpot_ms", "itl_ms", "baseline_ttft_ms", "ttft_quantiles_ms", "tpot_quantiles_ms", "itl_quantiles_ms",
    "seconds", "plain_seconds", "speed_models", "verdicts", "memory",
    "expected_acceptance_length",
}  # fmt: skip
OF_TIMES = {"latency-disagrees", "speed-unexplained", "speed-disturbed", "no-warm-up", "mostly-prompts"}
PLACES = {
    "date",
    "hardware",
    "threads",
    "versions",
    "torch",
    "transformers",
    "draftkit",
    "python",
    "platform",
    "path",
    "url",
}
SENTENCES = {"message", "fix", "cost", "title", "convention"}

OWN: dict[str, tuple[object, ...]] = {
    "own-greedy": ("--draft", "zoo:eagle3", "--draft", "zoo:dflash", "--draft", "ngram", "--k", "2,4"),
    "own-sampled": ("--draft", "zoo:p-eagle", "--temperature", "1", "--concurrency", "1,4", "--slice", "category"),
    "own-coupled": (
        "--draft", "zoo:draft-model", "--set", "verification=coupled", "--temperature", 0.7, "--context", 128,
    ),
}  # fmt: skip


def steady(value: Any) -> Any:
    """A JSON value without what the machine decides, and without sentences."""
    if isinstance(value, dict):
        return {key: steady(part) for key, part in value.items() if key not in TIMES | PLACES | SENTENCES}
    if isinstance(value, list):
        return [steady(part) for part in value]
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, str) and ("127.0.0.1" in value or value.startswith("/")):
        return "(a place)"
    return value


def compare(name: str, found: object) -> None:
    """Hold `found` against the golden file of this name, or write it."""
    path = GOLDEN / name
    text = found if isinstance(found, str) else json.dumps(found, indent=1, sort_keys=True) + "\n"
    if os.environ.get("DRAFTKIT_GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text()


def measured(draftkit: Command, *arguments: object) -> Any:
    outcome = draftkit("eval", *arguments, "--json")
    assert outcome.code == 0, outcome.err
    found = steady(json.loads(outcome.out))
    found["warnings"] = [warning for warning in found["warnings"] if warning["name"] not in OF_TIMES]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_the_own_engine(name: str, draftkit: Command) -> None:
    compare(f"{name}.json", measured(draftkit, *SHORT, *OWN[name]))


@pytest.mark.slow
def test_vllm_that_is_started_beside_the_own_engine(
    draftkit: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FAKE_VLLM))
    monkeypatch.setenv("FAKE_VLLM_JOURNAL", str(tmp_path / "journal"))
    options = ("--draft", "zoo:eagle3", "--draft", "zoo:p-eagle", "--engine", "vllm", "--vllm-python", sys.executable)
    compare("vllm-beside.json", measured(draftkit, *SHORT, *options, "--k", "2,3"))


@pytest.mark.slow
@pytest.mark.parametrize("dialect", ["vllm", "sglang", "tensorrt_llm", "openai"])
def test_a_server(dialect: Any, draftkit: Command) -> None:
    with SpeakingServer(dialect, simulated(K), K) as drafting, SpeakingServer(dialect, simulated(0)) as plain:
        options = ("--server", drafting.url, "--server-baseline", plain.url, "--dataset", "zoo", "--concurrency", "1,2")
        compare(f"server-{dialect}.json", measured(draftkit, *SHORT, *options, "--k", K))


def test_a_server_of_vllm_with_the_counts_of_each_request(draftkit: Command) -> None:
    with ExitStack() as stack:
        drafting = stack.enter_context(VllmTestServer(k=K, by_request=True))
        plain = stack.enter_context(VllmTestServer(k=0))
        options = (
            "--server",
            drafting.url,
            "--server-baseline",
            plain.url,
            "--dataset",
            "zoo",
            "--draft",
            "zoo:eagle3",
            "--k",
            K,
        )
        compare("server-vllm-by-request.json", measured(draftkit, *SHORT, *options))


def test_llama_cpp(draftkit: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = write_program(tmp_path / "llama-server")
    options = (
        "--engine",
        "llama.cpp",
        "--set",
        f"llama_server={program}",
        "--draft",
        "zoo:eagle3",
        "--draft",
        "zoo:draft-model",
    )
    compare("llama-cpp.json", measured(draftkit, *SHORT, *options, "--k", K))


@pytest.mark.slow
@pytest.mark.parametrize("subject", net.SUBJECTS)
def test_the_net(subject: str) -> None:
    found = dict(importlib.import_module(f"fixtures.net.{subject}").found(full=False))
    if os.environ.get("DRAFTKIT_GOLDEN") == "write":
        net.write(subject, found.items())
    differences = net.differences(subject, found.items())
    assert not differences, "\n".join(differences)
