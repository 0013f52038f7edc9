"""What engines have by release: the tables, what families need of them, and the comparison with a release's source."""

from __future__ import annotations

import ast
import hashlib
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from draftkit.engines.known import known
from draftkit.engines.releases import Release, against, lacks, verdict
from draftkit.engines.vllm.releases import RELEASES
from draftkit.layout.families import families, family_names, named
from draftkit.layout.spec import DraftSpec
from scripts.check import releases as checked

PACKAGE = Path(__file__).resolve().parents[2] / "draftkit"
PRESENT = next(release for release in RELEASES if release.number == "0.32")
NGRAM = DraftSpec(architecture=named("ngram:2-4"), dtype="F32")  # type: ignore[arg-type]
# Where the numbers of releases may stand; docstrings and comments cite what they were written from.
TABLES = {
    *(f"{engine}/{file}.py" for engine in ("vllm", "sglang") for file in ("names", "releases")),
    "llama_cpp/releases.py",
    "transformers.py",
    "speculators.py",
}
ENGINES = r"(vLLM|SGLang|llama\.cpp|transformers|speculators|TensorRT-LLM)"
NUMBER = re.compile(ENGINES + r"\s+(≥\s*)?v?\d+\.\d|\bb1\d{4}\b|\b0\.3\d\b|\d_3\d\b")


def test_families_and_tables_name_the_same_capabilities() -> None:
    needed = {capability.name for family in families().values() for capability in family.NEEDS}
    assert all(needed == release.capabilities.keys() for release in RELEASES)


def test_a_name_is_one_capability() -> None:
    rows = [capability for family in families().values() for capability in family.NEEDS]
    assert len({row.name for row in rows}) == len(set(rows))


def test_no_capability_names_a_family() -> None:
    families_named = [name for name in PRESENT.capabilities if any(family in name for family in family_names())]
    assert not families_named


def test_what_no_row_tells_is_not_known() -> None:
    (fc_bias, *_) = families()["eagle"].NEEDS
    needing = type("Needing", (type(NGRAM.architecture),), {"NEEDS": (replace(fc_bias, needed=lambda _: True),)})
    spec = replace(NGRAM, architecture=needing(min_n=2, max_n=4))
    assert verdict(PRESENT, spec, "unified", None).sentence == "vLLM drops fc.bias"
    nothing = replace(PRESENT, capabilities={})
    found = verdict(nothing, spec, "unified", None)
    assert (found.outcome, found.sentence) == ("unknown", "draftkit does not know whether vLLM runs a bias in fc")
    assert verdict(nothing, NGRAM, "unified", None).runs


def test_a_draft_is_marked_where_a_release_would_run_it_wrongly_or_none_runs_it() -> None:
    runs, refuses = (replace(verdict(PRESENT, NGRAM, "unified", None), outcome=one) for one in ("runs", "refuses"))
    wrong = replace(runs, outcome="wrong", reason="drops fc.bias")
    assert against([runs, refuses]) is None
    assert against([wrong, wrong]) == "vLLM drops fc.bias"
    assert against([wrong, runs]) == "vLLM 0.32: no, it drops fc.bias; 0.32: yes"
    assert against([refuses, refuses]) is not None


def test_methods_classes_and_settings_are_looked_up() -> None:
    without = replace(PRESENT, methods={}), replace(PRESENT, methods={"ngram": lacks("")})
    assert "does not know how vLLM runs ngram" in verdict(without[0], NGRAM, "unified", None).sentence
    assert "no proposer for ngram" in verdict(without[1], NGRAM, "unified", None).sentence
    assert "no class Unheard" in verdict(PRESENT, NGRAM, "unified", "Unheard").sentence
    no_keys = replace(PRESENT, config_keys={})
    assert "no setting prompt_lookup_min" in verdict(no_keys, NGRAM, "unified", None).sentence


def written(folder: Path, methods: set[str], keys: set[str], classes: set[str]) -> Path:
    """As much of vLLM's source as is compared by name."""
    package = folder / "vllm"
    for name in ("config", "model_executor/models"):
        (package / name).mkdir(parents=True)
    (package / "_version.py").write_text("__version__ = version = '0.32.0'\n")
    (package / "v1/spec_decode").mkdir(parents=True)
    (package / "v1/spec_decode/metrics.py").write_text(f"NAMES = {sorted(PRESENT.metrics)}\n")
    fields = "".join(f"    {key}: int\n" for key in sorted(keys))
    literal = ", ".join(map(repr, sorted(methods)))
    (package / "config/speculative.py").write_text(
        f"RejectionSampleMethod = Literal{sorted(PRESENT.verifications)}\n"
        f"Own = Literal[{literal}]\nSpeculativeMethod = Literal[Own]\nclass SpeculativeConfig:\n{fields}"
    )
    registry = dict.fromkeys(classes, "")
    (package / "model_executor/models/registry.py").write_text(f"_SPECULATIVE_DECODING_MODELS = {registry}\n")
    return package


@pytest.mark.parametrize("missing", [True, False])
def test_a_release_is_compared_both_ways(missing: bool, tmp_path: Path) -> None:
    known = checked.LEFT_OUT["vLLM"]
    methods, keys, classes = (
        {name for name, row in getattr(PRESENT, table).items() if row.there} | set(known.get(table, {}))
        for table in ("methods", "config_keys", "architectures")
    )
    if missing:
        same = written(tmp_path, methods - {"eagle"}, keys - {"method"}, classes - {"DFlashDraftModel"})
        expected = {
            "eagle is in the table alone",
            "method is in the table alone",
            "DFlashDraftModel is in the table alone",
        }
    else:
        same = written(tmp_path, methods | {"telepathy"}, keys | {"depth"}, classes | {"NewModel"})
        expected = {"the table lacks telepathy", "the table lacks depth", "the table lacks NewModel"}
    found = {problem.split(": ", 1)[1] for problem in checked.problems_of(checked.Package(same)) if " table" in problem}
    assert expected <= found
    assert not [problem for problem in found - expected if "table" in problem]


def test_evidence_is_looked_for(tmp_path: Path) -> None:
    package = written(tmp_path, {"ngram"}, {"method"}, {"EagleLlamaForCausalLM"})
    (package / "model_executor/models/llama_eagle.py").write_text("fc = Linear(bias = True)\n")
    problems = [problem for problem in checked.problems_of(checked.Package(package)) if ", fc-bias: " in problem]
    assert problems == [
        "vLLM 0.32, capabilities, fc-bias: model_executor/models/llama_eagle.py does not say bias=False"
    ]


@pytest.mark.parametrize("release", [*RELEASES, *known()["SGLang"]], ids=str)
def test_the_tables_say_what_was_read(release: Release) -> None:
    file = f"{release.engine.lower()}-{release.number}.json"
    assert not list(checked.problems_of(checked.Stored.of(checked.STORED / file)))


def test_a_row_that_was_not_read_is_named() -> None:
    stored = checked.Stored.of(checked.STORED / "vllm-0.33.json")
    names = {**stored.content["names"], "methods": ["dflash"], "raised_ropes": ["yarn"]}
    other = replace(stored, content={**stored.content, "names": names, "says": {}})
    found = list(checked.problems_of(other))
    assert "vLLM 0.33, methods: eagle3 is in the table alone" in found
    assert "vLLM 0.33: the ropes whose positions are raised are ['yarn']" in found
    assert any("fc-bias" in problem and "does not say bias=False" in problem for problem in found)


@pytest.mark.skipif("DRAFTKIT_WHEELS" not in os.environ, reason="DRAFTKIT_WHEELS names no folder of sources")
def test_what_was_read_is_what_the_sources_say() -> None:
    folders = [path for name in checked.ARCHIVES for path in Path(os.environ["DRAFTKIT_WHEELS"]).glob(f"*/{name}")]
    assert folders, "python -m scripts.check.releases vllm==NUMBER fetches them"
    for package in map(checked.Package, folders):
        assert not list(checked.problems_of(package))
        stored = checked.Stored.of(checked.STORED / f"{package.folder.name}-{package.number}.json")
        for file, digest in stored.content["digests"].items():
            path = package.folder / file
            assert path.is_dir() or hashlib.sha256(path.read_bytes()).hexdigest() == digest, file


@pytest.mark.slow
def test_numbers_of_releases_stand_in_the_tables_alone() -> None:
    """Neither in strings, but those that are prose, nor in names."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if str(path.relative_to(PACKAGE)).removeprefix("engines/") in TABLES:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            said = node.id if isinstance(node, ast.Name) else getattr(node, "value", None)
            if id(node) not in prose and isinstance(said, str) and NUMBER.search(said):
                found.append(f"{path.relative_to(PACKAGE)}: {said}")
    assert not found, "\n".join(found)
