"""Block drafters: what their files contradict, what has to be asked, and what engines make of the folders."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Command
from fixtures.checkpoints import pico
from fixtures.checkpoints.published import all_published
from fixtures.checkpoints.published import dflash as published
from fixtures.checkpoints.published.dflash_speculators import MIXED, config, dspark
from fixtures.checkpoints.published.layers import H

from draftkit.convert.api import convert_checkpoint, plan_conversion
from draftkit.convert.destinations import Layout
from draftkit.engines.vllm.accepts import refusal_by_vllm
from draftkit.errors import FormatError, LayoutError, UnsafeFileError
from draftkit.layout.block import MASK_FILE
from draftkit.layout.families.dflash import DFlashSpec
from draftkit.layout.folder import Draft, read_draft
from draftkit.layout.target import read_target_facts

ALL = all_published()
SLIDING = ["sliding_attention", "full_attention"]


def write(folder: Path, values: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None) -> str:
    made = published.dflash_tensors(torch.float16) if tensors is None else tensors
    return str(pico.write_checkpoint(folder, values, made, safetensors=True))


def facts(source: str, **options: Any) -> DFlashSpec:
    return plan_conversion(source, **options).require_draft().spec.architecture.expect(DFlashSpec)


# --- what contradicts itself

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "descending layers": (published.dflash_config({"target_layer_ids": [6, 1, 4]}), r"in the order \[7, 2, 5\]"),
    "a layer twice": (published.dflash_config({"target_layer_ids": [1, 4, 4]}), r"in the order \[2, 5, 5\]"),
    "fewer layers than fc reads": (published.dflash_config({"target_layer_ids": [1, 4]}), "fc.weight has 192 columns"),
    "a window that is not used": (
        published.dflash_config(layer_types=SLIDING, sliding_window=8), "use_sliding_window is false, and layer_types",
    ),
    "a window of unknown layers": (
        published.dflash_config(layer_types=None, sliding_window=8, use_sliding_window=True),
        "use_sliding_window is true, and layer_types",
    ),
    "a window of no width": (published.dflash_config({"use_swa": True}), "swa_window_size and sliding_window are mis"),
    "causal and not": (published.dflash_config({"causal": False}, is_causal=True), "is_causal is True and"),
    "pairs of neighbors": (published.dflash_config(is_neox_style=False), "is_neox_style false"),
    "no fc": (published.dflash_config(use_aux_hidden_state=False), "use_aux_hidden_state is false"),
    "no Markov head": (published.dflash_config({"markov_rank": 8}), "has a Markov head of rank 8, and"),
    "another Markov head": (published.deepspec_config(markov_head_type="rnn"), "markov_head_type is rnn, and"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_contradicts_itself_is_refused(case: str, target: Path, tmp_path: Path) -> None:
    values, message = WRONG[case]
    tensors = published.dspark_tensors(torch.float16) if "another" in case else None
    with pytest.raises(FormatError, match=message):
        plan_conversion(write(tmp_path, values, tensors), target=str(target))


def test_automodels_jetspec_is_causal(target: Path, tmp_path: Path) -> None:
    """Its file says is_causal false as well, which vLLM follows; the unified folder says what it was trained for."""
    source = ALL["automodel-jetspec"].write(tmp_path / "source")
    out = convert_checkpoint(str(source), tmp_path / "out", target=str(target))
    said = json.loads((out / "config.json").read_text())
    assert "is_causal" not in said
    assert said["dflash_config"]["causal"] is True


# --- what has to be asked


@pytest.mark.parametrize("kind", ["speculators", "unknown trainer"])
def test_a_file_that_does_not_tell_its_slots_is_asked_about(kind: str, target: Path, tmp_path: Path) -> None:
    """The field's best-known failure: a DSpark file without its layout flag, which engines read either way."""
    tensors = dspark(torch.float16)
    values = config("dspark", sample_from_anchor=None) if kind == "speculators" else published.dflash_config()
    source = write(tmp_path, values, tensors)
    conversion = plan_conversion(source, target=str(target))
    assert conversion.reading is not None
    assert [name for name, _ in conversion.reading.plan.missing] == ["slots"]
    with pytest.raises(LayoutError, match=r"does not state slots(.|\n)*--set slots=fill-in(.|\n)*draftkit doctor"):
        conversion.require_draft()
    for slots in ("fill-in", "anchor-first"):
        assert facts(source, target=str(target), overrides={"slots": slots}).slots == slots
    with pytest.raises(LayoutError, match="slots"):
        facts(source, target=str(target), overrides={"slots": "left"})


def test_the_vocabulary_of_an_assistant_is_its_targets(target: Path, tmp_path: Path) -> None:
    source = str(ALL["muse"].write(tmp_path / "source"))
    conversion = plan_conversion(source)
    assert conversion.reading is not None
    assert [name for name, _ in conversion.reading.plan.missing] == ["vocab_size"]
    assert facts(source, target=str(target)).vocab_size == pico.VOCABULARY


# --- the embedding of the mask


def mimo(folder: Path, side: object) -> str:
    source = write(folder, published.dflash_config(), published.mimo_tensors(torch.float16))
    torch.save(side, folder / MASK_FILE)
    return source


@pytest.mark.parametrize(
    "side",
    [torch.ones(1, 1, H), {"embedding": torch.ones(H), "mask_token_id": published.MASK}],
    ids=["alone", "with its token"],
)
def test_the_embedding_of_a_mask_lies_apart(side: object, target: Path, tmp_path: Path) -> None:
    out = convert_checkpoint(mimo(tmp_path / "source", side), tmp_path / "out", target=str(target))
    assert torch.equal(read_draft(out).tensors["mask_embedding"].load(), torch.ones(H))
    assert torch.equal(torch.load(out / MASK_FILE, weights_only=True)["embedding"], torch.ones(H))  # where vLLM looks
    back = convert_checkpoint(str(out), tmp_path / "back", to="dflash", target=str(target))
    assert torch.equal(torch.load(back / MASK_FILE, weights_only=True)["embedding"], torch.ones(H))


@pytest.mark.parametrize(
    ("side", "error", "message"),
    [
        ({"embedding": torch.ones(H), "mask_token_id": 5}, FormatError, "is for token 5, and config.json has"),
        ({"embedding": torch.ones(H), "other": torch.ones(H)}, FormatError, "holds embedding, other"),
        ({"embedding": [1.0]}, FormatError, "'embedding' is list"),
        ([torch.ones(H)], FormatError, "'embedding' is list"),
        (torch.ones(H + 1), LayoutError, r"wrong shape: mask_embedding is \[65\]"),
        ({"embedding": Path("x")}, UnsafeFileError, "would run code"),
    ],
)
def test_another_file_in_its_place_is_refused(
    side: object, error: type[Exception], message: str, target: Path, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        plan_conversion(mimo(tmp_path / "source", side), target=str(target))


# --- what engines make of the folders


def draft_of(name: str, target: Path, tmp_path: Path) -> Draft:
    source = ALL[name].write(tmp_path / "source")
    return plan_conversion(str(source), target=str(target), overrides=ALL[name].overrides).require_draft()


REFUSED = {
    "deepspec-gated": "gated or recurrent",
    "deepspec-rnn": "gated or recurrent",
    "speculators-dspark-gated": "gated or recurrent",
    "modelopt-dspark": "gated or recurrent",
}


@pytest.mark.parametrize("name", [name for name, p in ALL.items() if p.method in ("dflash", "dspark", "dflash2")])
def test_vllm_runs_what_is_published(name: str, target: Path, tmp_path: Path) -> None:
    reason = refusal_by_vllm(draft_of(name, target, tmp_path).spec)
    assert (reason is None) == (name not in REFUSED)
    assert REFUSED.get(name, "") in (reason or "")


def test_dsparks_slots_are_at_the_top_only(target: Path, tmp_path: Path) -> None:
    """VLLM stops at the key within `dflash_config`."""
    source = ALL["specforge-dspark"].write(tmp_path / "source")
    out = convert_checkpoint(str(source), tmp_path / "out", target=str(target))
    said = json.loads((out / "config.json").read_text())
    assert said["sample_from_anchor"] is True
    assert "sample_from_anchor" not in said["dflash_config"]
    assert said["architectures"] == ["Qwen3DSparkModel"]
    assert (said["markov_rank"], said["block_size"]) == (published.RANK, 4)  # nested in the source


SERVED: dict[str, dict[str, Any]] = {
    "dflash": {"method": "dflash", "num_speculative_tokens": 4},
    "dflash2": {"method": "dflash", "num_speculative_tokens": 4},
    "deepspec": {"method": "dspark", "num_speculative_tokens": 4},
    "deepspec-baseline": {"method": "dspark", "num_speculative_tokens": 4},
    "dflash-sliding": {"method": "dflash", "num_speculative_tokens": 4},
}


@pytest.mark.parametrize("name", SERVED)
def test_the_line_that_serves_it_names_method_and_length(
    name: str, target: Path, tmp_path: Path, draftkit: Command
) -> None:
    ran = draftkit("convert", ALL[name].write(tmp_path / "source"), tmp_path / "out", "--target", target)
    line = next(line for line in ran.out.splitlines() if line.startswith("vLLM: "))
    settings = json.loads(line.partition("--speculative-config ")[2].strip("'"))
    assert settings == {"model": str(tmp_path / "out")} | SERVED[name]
    assert ("second model runner" in ran.out) == (name != "dflash")


@pytest.mark.parametrize(
    "name", ["speculators-dflash-mixed", "speculators-dflash2-causal", "speculators-dspark-fill-in"]
)
def test_vllm_does_not_serve_what_its_adapter_reads_wrongly(
    name: str, target: Path, tmp_path: Path, draftkit: Command
) -> None:
    """Windows that are causal beside layers that are not: right in the unified folder, and of DSpark in either."""
    source = ALL[name].write(tmp_path / "source")
    for to in ("unified", "speculators"):
        ran = draftkit("convert", source, tmp_path / to, "--target", target, "--to", to)
        assert ran.code == 0, ran.err
        wrong = to == "speculators" and "dspark" not in name
        assert ("vllm serve" in ran.out) != wrong
        assert ("Do not serve this folder with vLLM" in ran.out) == wrong


@pytest.mark.parametrize(
    ("layer", "causal", "said"),
    [
        ({}, (), (True, None)),
        ({}, (0, 1), (True, True)),  # JetSpec: the library has no such thing
        ({"sliding_window": 8}, (0, 1), (False, None)),
        ({"sliding_window": 8}, (), (True, None)),
        ({"sliding_window": 8, "full_attention_layers": (1,)}, (0,), (False, None)),
    ],
)
def test_what_vllm_reads_of_causality_in_the_librarys_files(
    layer: dict[str, Any], causal: tuple[int, ...], said: tuple[bool, bool | None], target: Path, tmp_path: Path
) -> None:
    """`sliding_window_non_causal` is one value for all layers there, which `is_causal` within the layers overrides."""
    draft = draft_of("dflash", target, tmp_path)
    before = draft.spec.architecture.expect(DFlashSpec)
    after = replace(before, decoder=replace(before.decoder, **layer), causal_layers=causal)
    draft = replace(draft, spec=replace(draft.spec, architecture=after))
    written = Layout("speculators").export(draft, read_target_facts(target, str(target), None)).config
    within = written["transformer_layer_config"]
    assert isinstance(within, dict)
    assert (written["sliding_window_non_causal"], within.get("is_causal")) == said


def test_deepspec_has_neither_fewer_tokens_nor_other_slots(target: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "source", config("dspark", MIXED, sample_from_anchor=False), dspark(torch.float16))
    with pytest.raises(LayoutError, match=r"each row predicts the token after it(.|\n)*--to speculators"):
        plan_conversion(source, to="deepspec", target=str(target))
