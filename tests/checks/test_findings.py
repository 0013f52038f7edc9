"""Known defects: each is found where it is, not found where it is not, and gone once its fix is applied."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Command
from fixtures.checkpoints import pico

from draftkit import zoo
from draftkit.checks.checkpoint import findings_of_draft, findings_of_reading
from draftkit.checks.evidence import Evidence
from draftkit.checks.pair import other_precision, other_target
from draftkit.checks.registry import check, checks_of, run_checks
from draftkit.checks.registry import findings as findings_in
from draftkit.checks.tensors import looks_random
from draftkit.convert.api import Reading, convert_checkpoint, inspect_checkpoint, plan_conversion
from draftkit.finding import Finding
from draftkit.io.handles import memory_handle
from draftkit.io.safetensors_file import read_safetensors
from draftkit.layout.folder import read_draft
from draftkit.layout.target import read_target_facts
from draftkit.loading import open_draft

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A checkpoint with one defect, and how it differs from a sound one."""

    config: dict[str, Any] = field(default_factory=dict)
    spoil: Callable[[Tensors], object] = lambda tensors: None
    eagle1: bool = False
    target: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> tuple[str, str]:
        tensors = pico.eagle_tensors() if self.eagle1 else pico.eagle3_tensors()
        if "embed_tokens.weight" in tensors:
            tensors["embed_tokens.weight"] *= 0.5 + torch.rand(320, 1)  # as a trained table: rows of different size
        self.spoil(tensors)
        make = pico.eagle_config if self.eagle1 else pico.eagle3_config
        source = pico.write_checkpoint(folder / "source", make(**self.config), tensors, safetensors=True)
        return str(source), str(pico.save_target_config(folder / "target", **self.target))


def rename_layers(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith("midlayer.")]:
        tensors[name.replace("midlayer.", "layers.0.")] = tensors.pop(name)
    del tensors["t2d"]


def reset_embedding(tensors: Tensors) -> None:
    tensors["embed_tokens.weight"] = (torch.randn(320, 64) * 0.02).half()


def full_vocabulary_without_head(tensors: Tensors) -> None:
    for name in ("lm_head.weight", "d2t", "t2d"):
        del tensors[name]


def zero_map(tensors: Tensors) -> None:
    tensors["d2t"].zero_()
    tensors["t2d"] = torch.arange(320) < 128


SGLANG = {"architectures": ["LlamaForCausalLMEagle3"]}
CASES = {
    "zero-d2t": Case(spoil=zero_map),
    "layer-ids-as-outputs": Case(config=SGLANG | {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}),
    "layer-ids-as-states": Case(config=SGLANG | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}}),
    "random-embedding": Case(eagle1=True, spoil=reset_embedding),
    "bias-as-attention-bias": Case(eagle1=True, config={"bias": True}),
    "no-lm-head": Case(config={"draft_vocab_size": 320}, spoil=full_vocabulary_without_head),
    "unused-rope-base": Case(config={"architectures": ["Eagle3LlamaForCausalLM"], "rope_theta": 1e6}),
    "doubtful-rope-base": Case(config={"rope_theta": 500000.0}),
    "double-norm": Case(config=SGLANG, spoil=rename_layers),
    "norm-output": Case(config=SGLANG | {"norm_output": True}),
    "norm-output, false": Case(config=SGLANG | {"norm_output": False}),
}
# These need layouts of their own, and are tested beside them.
ELSEWHERE = {
    *("contradiction", "unstated-residual", "vocabulary-map", "not-run"),
    *("causality-in-vllm", "merged-adapter", "narrow-window", "other-sizes"),
}
SOUND = (
    Case(),
    Case(eagle1=True),
    Case(config=SGLANG | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}),
)


def findings(folder: Path, case: Case) -> list[Finding]:
    source, target = case.write(folder)
    found = inspect_checkpoint(source, target=target)
    assert isinstance(found, Reading)
    return findings_of_reading(found)


def test_every_check_has_a_case() -> None:
    checks = {check.name.replace(" ", "-") for check in checks_of("checkpoint")}
    assert checks == {name.partition(",")[0] for name in CASES} | ELSEWHERE


@pytest.mark.parametrize("name", CASES)
def test_a_defect_is_found_alone(name: str, tmp_path: Path) -> None:
    found = findings(tmp_path, CASES[name])
    assert [finding.name for finding in found] == [name.partition(",")[0]]
    assert found[0].message
    assert found[0].fix
    assert found[0].source


@pytest.mark.parametrize("case", SOUND)
def test_a_sound_checkpoint_has_none(case: Case, tmp_path: Path) -> None:
    assert findings(tmp_path, case) == []


@pytest.mark.parametrize(
    "name", [name for name in CASES if name.startswith(("layer-ids", "short", "doubtful", "norm-output"))]
)
def test_the_fix_of_a_finding_can_be_typed_and_works(name: str, tmp_path: Path) -> None:
    source, target = CASES[name].write(tmp_path)
    found = inspect_checkpoint(source, target=target)
    assert isinstance(found, Reading)
    fact, _, value = findings_of_reading(found)[0].fix.removeprefix("--set ").split(" ")[0].partition("=")
    repaired = plan_conversion(source, target=target, overrides={fact: value})
    assert repaired.reading is not None
    assert findings_of_reading(repaired.reading) == []


@pytest.mark.parametrize(
    ("stated", "given", "same"),
    [
        ("zoo:target", str(zoo.path("target")), True),
        ("org/llama", "models/Llama", True),
        ("org/llama", "org/llama@v2", True),
        ("zoo:target", "org/target", False),
        ("org/llama", "org/llama-tuned", False),
    ],
)
def test_a_target_is_the_same_by_another_name(stated: str, given: str, same: bool, tmp_path: Path) -> None:
    source, target = Case().write(tmp_path)
    draft = read_draft(convert_checkpoint(source, tmp_path / "draft", target=target))
    draft = replace(draft, provenance=replace(draft.provenance, target=stated))
    facts = replace(read_target_facts(Path(target), given, None), revision=None)
    found = other_target.run(Evidence(draft=draft, target=facts))
    assert [finding.name for finding in found] == ["other-target"] * (not same)


@pytest.mark.parametrize(("given", "quantized", "found"), [
    ("org/target-FP8", True, True), ("org/target-FP8", False, False), ("org/target", True, False),
])  # fmt: skip
def test_a_quantized_target_has_another_precision(given: str, quantized: bool, found: bool, tmp_path: Path) -> None:
    source, target = Case().write(tmp_path)
    draft = read_draft(convert_checkpoint(source, tmp_path / "draft", target=target))
    draft = replace(draft, provenance=replace(draft.provenance, target="org/target"))
    config = {"quantization_config": {"quant_method": "fp8"}} if quantized else {}
    facts = replace(read_target_facts(Path(target), given, None), revision=None, config=config)
    told = other_precision.run(Evidence(draft=draft, target=facts))
    assert [finding.name for finding in told] == ["other-precision"] * found
    assert all("the target is quantized (fp8), and the draft was trained on another" in one.message for one in told)


@pytest.mark.parametrize("name", ["dspark", "p-eagle"])
def test_drafts_of_the_zoo_are_for_its_target_by_any_name(name: str) -> None:
    """Their configs say `zoo:target`; it was an alarm in every run where the folder was given."""
    folder = zoo.path("target")
    with open_draft(f"zoo:{name}", str(folder)) as draft:
        assert other_target.run(Evidence.of_draft(draft, target=read_target_facts(folder, str(folder), None))) == []


@pytest.mark.parametrize(("hidden", "vocabulary", "told"), [
    (64, 320, None), (96, 320, "64 hidden states; {} has 96"), (64, 400, "320 tokens; {} has 400"),
])  # fmt: skip
def test_a_target_of_other_sizes_is_told_of_a_draft_that_is_converted(
    hidden: int, vocabulary: int, told: str | None, tmp_path: Path
) -> None:
    """What `convert` refuses of a foreign draft, `inspect` called sound once it was converted."""
    source, target = Case().write(tmp_path)
    draft = read_draft(convert_checkpoint(source, tmp_path / "draft", target=target))
    facts = replace(read_target_facts(Path(target), target, None), hidden_size=hidden, vocab_size=vocabulary)
    found = {finding.name: finding for finding in findings_of_draft(draft, facts)}
    assert ("other-sizes" in found) == (told is not None)
    if told is not None:
        assert found["other-sizes"].severity == "error"
        assert told.format(target) in found["other-sizes"].message


def test_a_check_runs_where_all_it_needs_is_known_and_nothing_explains_it() -> None:
    said = Finding("said", "note", "first")

    def look(format: str, config: dict[str, object], draft_name: str = "") -> Iterator[Finding]:
        yield Finding("seen", "note", f"{format} {config} {draft_name}")

    assert check(look).needs == {"format", "config"}
    assert check(look).run(Evidence(format="eagle")) == []
    assert [f.message for f in check(look).run(Evidence(format="eagle", config={}))] == ["eagle {} "]
    evidence = Evidence(contradictions=[replace(said, name="d2t")], tensors={}, format="modelopt")
    assert [name for name, _ in run_checks(evidence, "checkpoint")] == ["contradiction", "double-norm"]


def test_the_problem_of_a_map_is_said_once() -> None:
    zero = {"d2t": memory_handle("d2t", torch.zeros(4, dtype=torch.int64), Path("x"))}
    known = Finding("d2t", "error", "the map contradicts the mask")
    assert [f.name for f in findings_in(Evidence(tensors=zero), "checkpoint")] == ["zero-d2t"]
    assert [f.name for f in findings_in(Evidence(tensors=zero, contradictions=[known]), "checkpoint")] == ["d2t"]


def test_findings_are_shown_with_their_fix(draftkit: Command, tmp_path: Path) -> None:
    source, target = CASES["layer-ids-as-outputs"].write(tmp_path)
    ran = draftkit("inspect", source, "--target", target)
    assert "--set aux_layer_ids=2,4,5" in ran.out
    assert "vllm #43671" in ran.out
    printed = json.loads(draftkit("inspect", source, "--target", target, "--json").out)
    assert [(f["name"], f["severity"]) for f in printed["findings"]] == [("layer-ids-as-outputs", "error")]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [64, 1024])
def test_initializations_look_random_and_tables_do_not(dtype: torch.dtype, width: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    matrices = {
        "normal": torch.randn(4000, width) * 0.02,
        "uniform": torch.rand(4000, width) - 0.5,
        "trained": torch.randn(4000, width) * (1 + 0.3 * torch.randn(4000, 1)),
        "constant": torch.zeros(4000, width),
        "few": torch.randn(10, width),
    }
    folder = pico.write_checkpoint(tmp_path, {}, {n: m.to(dtype) for n, m in matrices.items()}, safetensors=True)
    handles = read_safetensors(folder / "model.safetensors")
    assert {handle.name for handle in handles if looks_random(handle)} == {"normal", "uniform"}
