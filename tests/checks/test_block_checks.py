"""What is said of a block drafter that is served or configured otherwise than it was trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints import pico
from fixtures.checkpoints.published import dflash, dflash_speculators
from fixtures.patients import pico_draft, pico_patient

from draftkit import zoo
from draftkit.checks.checkpoint import findings_of_draft, findings_of_reading
from draftkit.checks.dflash import _first_rows
from draftkit.checks.evidence import Evidence
from draftkit.checks.registry import checks_of_family, findings
from draftkit.convert.api import Reading, convert_checkpoint, inspect_checkpoint
from draftkit.convert.unified import write_draft
from draftkit.doctor.patient import changed
from draftkit.evaluate.evaluate import evaluate_draft
from draftkit.finding import Finding
from draftkit.layout.facts import with_facts
from draftkit.layout.families.dflash import DFlashSpec
from draftkit.layout.folder import Draft, read_draft
from draftkit.layout.target import read_target_facts
from draftkit.loading import open_draft
from draftkit.models.dflash import load_dflash
from draftkit.results.record import Result
from draftkit.results.settings import Settings
from draftkit.targets.chat import load_tokenizer
from draftkit.targets.tokens import TargetEmbeddings, load_embeddings

JETSPEC = dflash.dflash_config({"causal": True})


def dflash_draft(folder: Path, config: dict[str, Any]) -> Draft:
    return pico_draft(folder, config, dflash.dflash_tensors(torch.float32))


@pytest.fixture
def evaluated(tmp_path: Path) -> Callable[..., Result]:
    """Measure a pico draft, whose block of five rows drafts four tokens."""

    def measure(k: int, config: dict[str, Any] | None = None) -> Result:
        write_draft(tmp_path / "draft", dflash_draft(tmp_path, config or dflash.dflash_config()))
        settings = Settings(num_speculative_tokens=k, limit=1, max_new_tokens=4)
        return evaluate_draft(str(tmp_path / "target"), [str(tmp_path / "draft")], settings)

    return measure


@pytest.mark.slow
def test_fewer_drafts_than_the_block_has_are_warned_of(evaluated: Callable[..., Result]) -> None:
    (warning,) = (w for w in evaluated(3).warnings if w.name == "shortened-blocks")
    assert "K=3" in warning.message
    assert "trained for K=4" in warning.message


@pytest.mark.slow
@pytest.mark.parametrize(("k", "config"), [(4, None), (3, JETSPEC)])
def test_whole_blocks_and_rows_that_see_no_later_ones_are_not(
    k: int, config: dict[str, Any] | None, evaluated: Callable[..., Result]
) -> None:
    assert "shortened-blocks" not in {warning.name for warning in evaluated(k, config).warnings}


@pytest.mark.slow
@pytest.mark.parametrize(("config", "seen"), [(None, True), (JETSPEC, False)])
def test_more_drafts_than_the_block_has_are_warned_of(
    config: dict[str, Any] | None, seen: bool, evaluated: Callable[..., Result]
) -> None:
    (warning,) = (w for w in evaluated(6, config).warnings if w.name == "lengthened-blocks")
    assert "K=6: the draft's block was trained for K=4" in warning.message
    assert ("the rows before them see" in warning.message) is seen


@pytest.mark.parametrize(("by", "numbering"), [(-1, "as outputs"), (1, "as states, counted from one too many")])
def test_the_layers_of_the_reference_moved_by_one(tmp_path: Path, by: int, numbering: str) -> None:
    """z-lab's drafts of three layers read the outputs of layers 1, 3 and 5 of a target of 8."""
    pico.save_target_config(tmp_path / "target")
    target = read_target_facts(tmp_path / "target", "target", None)
    draft = dflash_draft(tmp_path, dflash.dflash_config())
    spec: Any = draft.spec.architecture
    decoder = replace(spec.decoder, num_hidden_layers=3)

    def named(ids: tuple[int, ...]) -> list[str]:
        moved = replace(draft.spec, architecture=replace(spec, decoder=decoder, aux_layer_ids=ids))
        evidence = Evidence(spec=moved, target=target)
        return [found.message for found in findings(evidence, "pair") if found.name == "layer-ids"]

    usual = (2, 4, 6)
    (message,) = named(tuple(i + by for i in usual))
    assert f"[2, 4, 6], numbered {numbering}" in message
    assert not named(usual)


# --- what vLLM makes of a published file


def found_in(config: dict[str, Any], tensors: dict[str, torch.Tensor], folder: Path) -> dict[str, Finding]:
    source = pico.write_checkpoint(folder / "source", config, tensors, safetensors=True)
    reading = inspect_checkpoint(str(source), target=str(pico.save_target_config(folder / "target")))
    assert isinstance(reading, Reading)
    return {finding.name: finding for finding in findings_of_reading(reading)}


FULL, MIXED = dflash_speculators.FULL, dflash_speculators.MIXED


@pytest.mark.parametrize(
    ("method", "layers", "said", "differs"),
    [
        ("dflash", FULL, False, "layers [0, 1] in vLLM, and none in training"),
        ("dflash", FULL, True, ""),
        ("dflash", FULL, None, ""),
        ("dflash", MIXED, False, "layers [0, 1] in vLLM, and [0] in training"),
        ("dflash", MIXED, None, "layers none in vLLM, and [0] in training"),
        ("dflash", MIXED, True, ""),
        ("dflash", MIXED | {"is_causal": False}, False, ""),
        ("dflash", dflash_speculators.WINDOWS, False, ""),
        ("dflash2", FULL, False, "layers [0, 1] in vLLM, and none in training"),
        ("dflash2", MIXED, True, ""),
        ("dspark", MIXED, False, ""),
        ("dspark", MIXED, True, "layers [0] in vLLM, and none in training"),
    ],
)  # fmt: skip
def test_causality_as_the_library_writes_it_and_as_vllm_reads_it(
    method: str, layers: dict[str, Any], said: bool | None, differs: str, tmp_path: Path
) -> None:
    config = dflash_speculators.config(method, layers, sliding_window_non_causal=said)
    make = {"dflash": dflash.dflash_tensors, "dflash2": dflash.dflash2_tensors, "dspark": dflash_speculators.dspark}
    found = found_in(config, make[method](torch.float32), tmp_path)
    assert ("causality-in-vllm" in found) == bool(differs)
    if differs:
        assert differs in found["causality-in-vllm"].message
        assert ("or write sliding_window_non_causal true" in found["causality-in-vllm"].fix) is (layers is FULL)
    out = convert_checkpoint(str(tmp_path / "source"), tmp_path / "out", target=str(tmp_path / "target"))
    assert "causality-in-vllm" not in {finding.name for finding in findings_of_draft(read_draft(out))}


@pytest.mark.parametrize(("window", "named"), [(4, True), (5, False)])
def test_a_window_that_ends_within_the_block_of_five(window: int, named: bool, tmp_path: Path) -> None:
    zlab = dflash.dflash_config(**dflash.SLIDING | {"sliding_window": window})
    library = dflash_speculators.config("dflash", MIXED | {"sliding_window": window})
    for config, trained in ((zlab, "see their whole block"), (library, "the window of the first")):
        found = found_in(config, dflash.dflash_tensors(torch.float32), tmp_path / trained)
        assert ("narrow-window" in found) is named
        if named:
            assert f"a window of {window} tokens ends within the block of 5 rows" in found["narrow-window"].message
            assert trained in found["narrow-window"].message
            assert "2,048" in found["narrow-window"].cost


# --- what the weights tell of the rows, with no more of the target than its embedding and its head


@pytest.fixture(scope="module")
def embeddings() -> TargetEmbeddings:
    return load_embeddings(zoo.path("target"), device="cpu", dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(zoo.path("target"), "target")


def reduced(draft: Draft, embeddings: TargetEmbeddings) -> Draft:
    """A draft of every other token."""
    spec: Any = draft.spec.architecture
    kept = torch.arange(0, spec.vocab_size, 2)
    own = replace(spec, draft_vocab_size=len(kept), lm_head="draft")
    tensors = {
        "lm_head.weight": embeddings.get_output_embeddings().weight[kept],
        "markov_head.markov_w2.weight": draft.tensors["markov_head.markov_w2.weight"].load()[kept],
        "d2t": kept - torch.arange(len(kept)),
    }
    return changed(draft, own, tensors)


def convention_of(draft: Draft, embeddings: TargetEmbeddings, tokenizer: Any) -> list[Finding]:
    return findings(Evidence.of_draft(draft, model=embeddings, tokenizer=tokenizer), *checks_of_family(draft.spec))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "slots"), [("dflash", "fill-in"), ("dspark", "anchor-first")])
def test_rows_tell_what_they_predict(name: str, slots: str, embeddings: TargetEmbeddings, tokenizer: Any) -> None:
    with open_draft(f"zoo:{name}", "zoo:target") as draft:
        assert draft.spec.architecture.expect(DFlashSpec).slots == slots
        assert not convention_of(draft, embeddings, tokenizer)
        other = "anchor-first" if slots == "fill-in" else "fill-in"
        (found,) = convention_of(
            changed(draft, with_facts(draft.spec.architecture, slots=other)), embeddings, tokenizer
        )
    assert (found.name, found.fix) == ("slots", f"--set slots={slots}")


def test_rows_of_a_draft_with_fewer_tokens_tell_too(embeddings: TargetEmbeddings, tokenizer: Any) -> None:
    with open_draft("zoo:dspark", "zoo:target") as draft:
        wrong = reduced(changed(draft, with_facts(draft.spec.architecture, slots="fill-in")), embeddings)
        (found,) = convention_of(wrong, embeddings, tokenizer)
    assert found.fix == "--set slots=anchor-first"


@pytest.mark.parametrize(
    ("window", "blind"), [(1, [True, True, True]), (3, [False, False, True]), (None, [False, False, False])]
)
def test_rows_see_no_more_of_the_block_than_their_window(window: int | None, blind: list[bool], tmp_path: Path) -> None:
    """In one layer, by whether the rows after the anchor change with it."""
    draft = dflash_draft(tmp_path, dflash.dflash_config({"causal": False}))
    spec: Any = draft.spec.architecture
    narrow = replace(spec, decoder=replace(spec.decoder, sliding_window=window))
    model = load_dflash(changed(draft, narrow), pico_patient(tmp_path, draft).model, attention="eager")
    model.layers = model.layers[:1]
    one, other = _first_rows(model, torch.tensor([5, 9]))
    assert [torch.equal(*pair) for pair in zip(one[1:], other[1:], strict=True)] == blind


def test_rows_that_were_never_trained_tell_nothing(tmp_path: Path) -> None:
    patient = pico_patient(tmp_path, dflash_draft(tmp_path, dflash.dflash_config()))
    for slots in ("fill-in", "anchor-first"):
        draft = changed(patient.draft, with_facts(patient.architecture, slots=slots))
        evidence = Evidence.of_draft(draft, model=patient.model, tokenizer=patient.tokenizer)
        assert not findings(evidence, *checks_of_family(draft.spec))
