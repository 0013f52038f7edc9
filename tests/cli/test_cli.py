"""The command line: its surface is frozen, its JSON is pure, and it converts from the Hub."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
from conftest import Command
from fixtures.checkpoints import pico
from fixtures.servers.hub_server import HubServer

from draftkit.cli import app
from draftkit.convert.destinations import destinations
from draftkit.convert.detect import all_formats
from draftkit.layout.folder import read_draft
from draftkit.version import __version__

# fmt: off
# Arguments in capitals, optional ones in brackets. Users and scripts rely on these: add, and do not rename.
SURFACE = {
    "": ["--version", "--install-completion", "--show-completion"],
    "convert": [
        "SOURCE",
        "[OUT]",
        "--target",
        "--revision",
        "--to",
        "--type",
        "--quantize",
        "--from",
        "--part",
        "--into",
        "--set",
        "--settings",
        "--ignore-key",
        "--check",
        "--digest",
        "--allow-lossy",
        "--dry-run",
        "--force",
        "--for",
        "--verbose",
        "-v",
        "--json",
    ],
    "inspect": [
        "[SOURCE]", "--target", "--revision", "--from", "--check", "--formats", "--for", "--verbose", "-v", "--json",
    ],
    "eval": [
        "--target", "--target-adapter", "--draft", "--k", "--tree", "--temperature", "--set", "--settings", "--dataset",
        "--prompts", "--limit",
        "--max-new-tokens", "--context", "--slice", "--concurrency", "--device", "--device-map", "--dtype",
        "--compile", "--trust-remote-code", "--engine", "--vllm-python", "--server", "--server-baseline", "--advise",
        "--dry-run", "--out", "--resume", "--records", "--require-al", "--min-acceptance-length", "--details",
        "--for", "--json", "--csv",
    ],
    "gate": [
        "--against", "[NEW]", "--tolerance", "--undecided", "--target", "--draft", "--device", "--trust-remote-code",
        "--engine", "--vllm-python", "--server", "--out", "--junit", "--summary", "--json",
    ],
    "certify": [
        "--target", "--draft", "--k", "--set", "--dataset", "--prompts", "--limit", "--max-new-tokens",
        "--concurrency", "--device", "--device-map", "--dtype", "--compile", "--trust-remote-code", "--engine",
        "--vllm-python", "--server", "--server-baseline", "--out", "--json",
    ],
    "calibrate": ["RECORDS", "--of", "--out", "--json"],
    "train": [
        "--config",
        "--recipe",
        "--target",
        "--data",
        "--out",
        "--draft",
        "--states",
        "--states-from",
        "--vllm-python",
        "--lora",
        "--set",
        "--settings",
        "--resume",
        "--plan-vocab",
        "--dry-run",
        "--dry-run-step",
        "--device-map",
        "--trust-remote-code",
        "--json",
    ],
    "doctor": [
        "--target",
        "--draft",
        "--target-adapter",
        "--k",
        "--dataset", "--prompts",
        "--limit",
        "--max-new-tokens",
        "--context",
        "--device",
        "--device-map",
        "--dtype",
        "--strict",
        "--trust-remote-code",
        "--json",
    ],
    "adapt": [
        "--draft",
        "--target",
        "--traffic",
        "--out",
        "--target-adapter",
        "--own",
        "--replay",
        "--replay-share",
        "--held-out",
        "--limit",
        "--temperature",
        "--max-new-tokens",
        "--max-length",
        "--k",
        "--seed",
        "--lora",
        "--set",
        "--concurrency",
        "--endpoint",
        "--served-model",
        "--strict",
        "--media-root",
        "--device",
        "--trust-remote-code",
        "--json",
    ],
    "report": ["RESULTS", "--out", "--figures", "--force"],
    "push": [
        "FOLDER",
        "REPO",
        "--results",
        "--license",
        "--base-model",
        "--dataset",
        "--language",
        "--private",
        "--revision",
        "--allow-unmeasured",
        "--dry-run",
        "--force",
        "--for",
        "--json",
    ],
    "vocab transplant": [
        "DONOR",
        "--tokenizer-of",
        "--out",
        "--weighting",
        "--layers",
        "--intermediate",
        "--corpus",
        "--dry-run",
        "--force",
        "--trust-remote-code",
        "--json",
    ],
    "vocab prune": [
        "DRAFT",
        "--data",
        "--size",
        "--out",
        "--target",
        "--keep",
        "--k",
        "--plan",
        "--force",
        "--trust-remote-code",
        "--json",
    ],
    "data prepare": [
        "SOURCE",
        "OUT",
        "--target",
        "--split",
        "--subset",
        "--revision",
        "--limit",
        "--max-length",
        "--drop-loops",
        "--exclude-near",
        "--system",
        "--template-option",
        "--media-root",
        "--strict",
        "--dry-run",
        "--force",
        "--trust-remote-code",
        "--json",
    ],
    "data regenerate": [
        "SOURCE",
        "OUT",
        "--target",
        "--temperature",
        "--top-k",
        "--top-p",
        "--seed",
        "--max-new-tokens",
        "--concurrency",
        "--endpoint",
        "--served-model",
        "--split",
        "--subset",
        "--revision",
        "--limit",
        "--system",
        "--template-option",
        "--media-root",
        "--template",
        "--no-template",
        "--device",
        "--device-map",
        "--dtype",
        "--strict",
        "--dry-run",
        "--trust-remote-code",
        "--json",
    ],
    "data synthesize": [
        "--target",
        "--count",
        "--out",
        "--language",
        "--min-words",
        "--max-new-tokens",
        "--temperature",
        "--top-k",
        "--top-p",
        "--seed",
        "--concurrency",
        "--endpoint",
        "--served-model",
        "--system",
        "--begin",
        "--template-option",
        "--device",
        "--device-map",
        "--dtype",
        "--trust-remote-code",
        "--json",
    ],
    "data states": [
        "SAMPLES",
        "OUT",
        "--target",
        "--target-adapter",
        "--layers",
        "--encoding",
        "--tokens-per-row",
        "--shard-tokens",
        "--vllm-python",
        "--tensor-parallel",
        "--media-root",
        "--device",
        "--device-map",
        "--dtype",
        "--workers",
        "--shard",
        "--dry-run",
        "--with-parent",
        "--trust-remote-code",
        "--json",
    ],
    "data stream": [
        "FOLDER",
        "--target",
        "--vllm-python",
        "--tensor-parallel",
        "--device",
        "--rows",
        "--with-parent",
        "--trust-remote-code",
    ],
    "data check": [
        "SAMPLES",
        "--target",
        "--draft",
        "--row",
        "--skip-model",
        "--media-root",
        "--device",
        "--device-map",
        "--dtype",
        "--trust-remote-code",
        "--json",
    ],
}
# fmt: on


def commands() -> dict[str, Any]:
    """Every command by its name, those of groups as `data prepare`, and the options of `draftkit` itself as ``."""
    group = typer.main.get_command(app)
    found = {"": group}
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", None)
        found |= {name: command} if inner is None else {f"{name} {part}": inner[part] for part in inner}
    return found


def test_the_surface_is_what_it_was() -> None:
    found: dict[str, list[str]] = {}
    for name, command in commands().items():
        found[name] = []
        for parameter in command.params:
            if parameter.param_type_name == "argument":
                label = parameter.name.upper()
                found[name].append(label if parameter.required else f"[{label}]")
            else:
                found[name] += parameter.opts + parameter.secondary_opts
    assert found == SURFACE


def test_every_parameter_is_explained() -> None:
    for command in commands().values():
        assert command.help
        assert all(parameter.help for parameter in command.params)


def test_version(draftkit: Command) -> None:
    ran = draftkit("--version")
    assert (ran.code, ran.out, ran.err) == (0, f"{__version__}\n", "")


def test_formats(draftkit: Command) -> None:
    ran = draftkit("inspect", "--formats")
    assert (ran.code, ran.err) == (0, "")
    assert {"causal-lm", "eagle", "eagle3"} <= {format.NAME for format in all_formats()}
    assert all(format.NAME in ran.out and format.TITLE in ran.out for format in all_formats())
    assert all(f"--to {name}" in ran.out for name in destinations())
    rows = json.loads(draftkit("inspect", "--formats", "--json").out)["formats"]
    assert {"name": "eagle3", "title": "EAGLE-3 (SafeAILab layout)", "written_by": "eagle"} in rows
    assert [row["name"] for row in rows] == [format.NAME for format in all_formats()]
    nothing = draftkit("inspect")
    assert (nothing.code, "Missing argument 'SOURCE' (or --formats)" in nothing.err) == (2, True)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return pico.write_checkpoint(tmp_path / "source", pico.eagle3_config(), pico.eagle3_tensors())


PLAN_KEYS = {
    "schema", "source", "revision", "format", "spec", "facts", "missing", "dropped_keys", "moves", "tensors",
    "engines", "findings",
}  # fmt: skip
CONVERSION_KEYS = PLAN_KEYS | {"to", "export", "losses"}


def test_convert_prints_pure_json(draftkit: Command, source: Path, target: Path, tmp_path: Path) -> None:
    ran = draftkit("convert", source, tmp_path / "out", "--target", target, "--json")
    assert (ran.code, ran.err) == (0, "")
    printed = json.loads(ran.out)
    draft = read_draft(tmp_path / "out")
    assert printed.keys() == CONVERSION_KEYS | {"out"}
    assert (printed["schema"], printed["format"], printed["missing"]) == (1, "eagle3", [])
    assert (printed["out"], printed["source"]) == (str(tmp_path / "out"), str(source))
    assert printed["spec"] == draft.spec.to_dict()
    assert {move["destination"] for move in printed["moves"]} - {None} == draft.tensors.keys()
    assert printed["dropped_keys"]["torch_dtype"]


def test_inspect_prints_pure_json(draftkit: Command, source: Path, target: Path, tmp_path: Path) -> None:
    unknown, known = draftkit("inspect", source, "--json"), draftkit("inspect", source, "--target", target, "--json")
    dry = draftkit("convert", source, "--target", target, "--dry-run", "--json")
    assert draftkit("convert", source, tmp_path / "out", "--target", target).code == 0
    unified = draftkit("inspect", tmp_path / "out", "--json")
    for ran in (unknown, known, dry, unified):
        assert (ran.code, ran.err) == (0, "")
    assert json.loads(unknown.out)["spec"] is None
    assert json.loads(unknown.out)["missing"][0]["next"].startswith("pass --target")
    assert json.loads(known.out).keys() == PLAN_KEYS
    assert json.loads(known.out).items() <= json.loads(dry.out).items()
    assert json.loads(dry.out).keys() == CONVERSION_KEYS
    draft, printed = read_draft(tmp_path / "out"), json.loads(unified.out)
    assert printed["format"] == "unified"
    assert printed["spec"] == draft.spec.to_dict() == json.loads(known.out)["spec"]
    assert printed["tensors"]["d2t"] == {"dtype": "I64", "shape": [128]}
    assert printed["provenance"]["source"] == source.name


def test_convert_reports_what_it_assumed(draftkit: Command, source: Path, target: Path, tmp_path: Path) -> None:
    ran = draftkit("convert", source, tmp_path / "out", "--target", target)
    assert ran.out.startswith(f"written: eagle3, 14 tensors, {tmp_path / 'out'} (unified); from ")
    doubted = ["rope_theta", "norm_before_residual", "feedback", "aux_layer_ids"]
    assert [line.split()[0] for line in ran.out.splitlines() if line.startswith("  ")] == doubted
    assert "hidden_act" not in ran.out  # the config states it
    shown = draftkit("convert", source, "--target", target, "--dry-run", "-v").out
    assert "from target" in shown
    places = [shown.index(fact) for fact in (*doubted, "head_dim", "hidden_act", "token_entry")]
    assert places == sorted(places)
    assert ran.err == f"next: draftkit eval --target {target} --draft {tmp_path / 'out'}\n"


def test_inspect_shows_tensors_facts_and_dropped_keys(
    draftkit: Command, source: Path, target: Path, tmp_path: Path
) -> None:
    short = draftkit("inspect", source, "--target", target)
    assert (
        short.out.splitlines()[0] == f"{source}: EAGLE-3 (SafeAILab layout), sound: no known defects; 9 facts assumed"
    )
    assert "hidden_act" not in short.out
    assert short.err == f"next: draftkit convert {source} OUT --target {target}\n"
    seen = draftkit("inspect", source, "--target", target, "-v").out
    for text in ("midlayer.hidden_norm.weight", "[64, 192]", "hidden_act", "transformers_version"):
        assert text in seen
    draftkit("convert", source, tmp_path / "out", "--target", target)
    assert draftkit("inspect", tmp_path / "out").out.startswith(
        f"{tmp_path / 'out'}: unified draft of the method eagle3"
    )
    seen = draftkit("inspect", tmp_path / "out", "-v").out
    for text in ("converted from source ", "layers.0.hidden_norm.weight", "aux_layer_ids"):
        assert text in seen


def test_inspect_says_what_an_incomplete_reading_lacks(draftkit: Command, source: Path) -> None:
    ran = draftkit("inspect", source)
    assert "not complete" in ran.out.splitlines()[0]
    assert "missing: aux_layer_ids" in ran.out
    assert ran.err == f"next: draftkit inspect {source} --target TARGET\n"


@pytest.mark.parametrize(("named", "why"), [("mlp-speculator", "MLP"), ("pard", "PARD"), ("lora", "LoRA")])
def test_a_checkpoint_of_another_family_than_from_says_what_it_looks_like(
    named: str, why: str, draftkit: Command, source: Path
) -> None:
    ran = draftkit("inspect", source, "--from", named)
    assert (ran.code, why in ran.out.splitlines()[0]) == (1, True)
    assert f"looks like EAGLE-3 (SafeAILab layout), the format eagle3, and cannot be read as {named}" in ran.err


def test_a_draft_that_vllm_must_refuse_is_announced(draftkit: Command, tmp_path: Path) -> None:
    pico.write_checkpoint(tmp_path / "source", pico.eagle_config(), pico.eagle_tensors(bias=True))
    assert "vLLM drops fc.bias" in draftkit("convert", tmp_path / "source", tmp_path / "out").out
    assert "vLLM drops fc.bias" in draftkit("inspect", tmp_path / "out").out
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["DraftkitOnlyModel"]


# Sends the process SIGINT where it first imports the module that is named.
INTERRUPTED = """
import importlib.abc, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background ignores
_, imported, *arguments = sys.argv
class Interrupting(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == imported:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
from draftkit.__main__ import main
sys.argv = ["draftkit", *arguments]
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("imported", "said"),
    [
        ("typer", "nothing was begun"),
        ("draftkit.results.saved", "nothing was written"),
        ("torch", "0 of 2 cells kept"),
        ("draftkit.evaluate.evaluate", "0 of 2 cells kept"),
    ],
)
def test_ctrl_c_while_imports_run_is_one_line(imported: str, said: str, tmp_path: Path) -> None:
    """In the first moments too, where an exception would be a traceback out of an import."""
    measure = (
        "eval",
        "--target",
        "zoo:target",
        "--draft",
        "zoo:eagle",
        "--k",
        "2,4",
        "--out",
        tmp_path / "result.json",
    )
    command = [sys.executable, "-c", INTERRUPTED, imported, *map(str, measure)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert (ran.returncode, ran.stdout) == (130, "")
    assert ran.stderr.strip().startswith(f"stopped; {said}")
    assert len(ran.stderr.strip().splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("floor", "code"), [(1, 0), (5.1, 3)])  # K + 1 = 5 is the most
def test_eval_prints_pure_json_and_holds_drafts_to_a_floor(
    floor: float, code: int, draftkit: Command, running_target: Path, tmp_path: Path
) -> None:
    source = pico.write_checkpoint(tmp_path / "source", pico.eagle_config(), pico.eagle_tensors())
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "def f(x):"}\n')
    ran = draftkit(
        "eval", "--target", running_target, "--draft", source, "--prompts", tmp_path / "prompts.jsonl",
        "--max-new-tokens", 6, "--k", 4, "--min-acceptance-length", floor, "--json",
    )  # fmt: skip
    (cell,) = json.loads(ran.out)["cells"]
    assert (cell["method"], cell["output_tokens"], cell["matches_greedy"]) == ("eagle", 6, True)
    assert ran.code == code
    below = (
        f"{source} (K=4, T=0, concurrency 1): acceptance length {cell['acceptance_length']['mean']:.2f} is below 5.1\n"
    )
    assert ran.err.partition("\n")[2] == (below if code else "")  # after the line of its one cell


def test_names_are_printed_as_they_are(draftkit: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Brackets and colons mean markup and emoji to rich."""
    name = "[bold]:smile:"
    pico.write_checkpoint(tmp_path / name, pico.eagle_config(), pico.eagle_tensors())
    monkeypatch.chdir(tmp_path)
    ran = draftkit("convert", name)
    written = f"written: eagle, 10 tensors, {name}-draftkit (unified); from {name} (eagle)"
    assert (ran.code, ran.out.splitlines()[0]) == (0, written)
    assert name in draftkit("inspect", f"{name}-draftkit").out


def test_commands_that_are_printed_can_be_pasted(draftkit: Command, source: Path, target: Path, tmp_path: Path) -> None:
    """Whatever the paths are called."""
    out, odd_target = tmp_path / "sp ace" / "ü" / "o'ut $HOME", tmp_path / "the target"
    out.parent.mkdir(parents=True)
    shutil.copytree(target, odd_target)
    ran = draftkit("convert", source, out, "--target", odd_target)
    assert shlex.split(ran.err.splitlines()[-1]) == [
        "next:", "draftkit", "eval", "--target", str(odd_target), "--draft", str(out),
    ]  # fmt: skip
    assert shlex.split(ran.out.splitlines()[-1])[:4] == ["vLLM:", "vllm", "serve", str(odd_target)]
    ran = draftkit("push", out, "ORG/NAME", "--dry-run", "--allow-unmeasured")
    assert shlex.split(ran.err) == ["next:", "draftkit", "push", str(out), "ORG/NAME"]
    ran = draftkit("convert", out, tmp_path / "again")
    assert shlex.split(ran.err.splitlines()[-1]) == ["next:", "draftkit", "inspect", str(out)]


def process(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    clean = {name: value for name, value in os.environ.items() if not name.upper().startswith(("HF_", "HTTP"))}
    command = [sys.executable, "-c", "from draftkit.cli import main; main()", *map(str, arguments)]
    return subprocess.run(command, env=clean | environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.long
@pytest.mark.parametrize("safetensors", [False, True], ids=["bin", "safetensors"])
def test_a_hub_repository_converts(safetensors: bool, tmp_path: Path) -> None:
    folder = pico.write_checkpoint(
        tmp_path / "repo", pico.eagle_config(attn_temperature=0.5), pico.eagle_tensors(), safetensors=safetensors
    )
    with HubServer({"org/eagle-draft": folder}) as server:
        settings = {"HF_ENDPOINT": server.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
        ignored = ("--ignore-key", "attn_temperature")
        ran = process("convert", "org/eagle-draft@main", tmp_path / "out", "--json", *ignored, **settings)
        commit = server.sha("org/eagle-draft")
    assert (ran.returncode, ran.stderr) == (0, "")
    provenance = read_draft(tmp_path / "out").provenance
    assert (provenance.source, provenance.source_revision) == ("org/eagle-draft", commit)
    assert {file.name: (file.size, file.sha256) for file in provenance.files} == {
        path.name: (path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()) for path in folder.iterdir()
    }
    printed = json.loads(ran.stdout)
    assert (printed["source"], printed["revision"]) == ("org/eagle-draft", commit)


@pytest.mark.slow
def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    plain, debug = (process("inspect", tmp_path / "nothing", DRAFTKIT_DEBUG=flag) for flag in ("", "1"))
    assert (plain.returncode, debug.returncode) == (1, 1)
    assert "Traceback" not in plain.stderr
    assert debug.stderr.startswith("Traceback")
    assert "SourceError: there is no folder" in debug.stderr


# Says when it is in the middle of its work, and waits.
SLOW = """
import signal, sys, time
from draftkit.cli import main

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests that nohup runs would ignore it, and so would the command

def wait(*arguments, **options):
    print("begun", flush=True)
    time.sleep(60)

if sys.argv[1] == "convert":
    from draftkit.convert import unified
    unified.write_checkpoint = wait
else:
    from draftkit.evaluate.engines import own
    own.engine_of = wait
main()
"""


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize(("command", "number"), [("convert", signal.SIGTERM), ("eval", signal.SIGHUP)])
def test_a_signal_ends_a_command_and_leaves_nothing(command: str, number: int, tmp_path: Path) -> None:
    """A conversion in the middle of writing, and a measurement of a draft that was converted on the way."""
    (tmp_path / "tmp").mkdir()
    arguments = ["eval", "--target", "zoo:target", "--draft", "zoo:eagle", "--limit", "1"]
    if command == "convert":
        arguments = ["convert", "zoo:eagle", str(tmp_path / "out")]
    run = subprocess.Popen(
        [sys.executable, "-c", SLOW, *arguments],
        env=os.environ | {"TMPDIR": str(tmp_path / "tmp")}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with run:
        assert run.stdout is not None
        assert run.stderr is not None
        assert run.stdout.readline() == "begun\n", run.stderr.read()
        assert list(tmp_path.rglob("lock"))
        run.send_signal(number)
        assert run.wait(60) == 128 + number
        assert "Traceback" not in run.stderr.read()
    assert [path.name for path in tmp_path.rglob("*")] == ["tmp"]
