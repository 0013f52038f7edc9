"""Drafts measured as if parts of them were quantized, and written so: the same tokens are accepted."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Command

from draftkit import convert_checkpoint, evaluate_draft
from draftkit.errors import LayoutError, SettingError
from draftkit.results.settings import Settings

SETTINGS = {"num_speculative_tokens": 3, "max_new_tokens": 24, "limit": 6, "repeats": 0}
FORMATS = "qkv:nvfp4,mlp:fp8-dynamic"


@pytest.mark.slow
def test_each_part_alone_and_all_together_beside_the_plain_draft(tmp_path: Path) -> None:
    result = evaluate_draft("zoo:target", "zoo:eagle3", Settings(**SETTINGS, fake_quant=FORMATS))
    names = ["", "[qkv:nvfp4]", "[mlp:fp8-dynamic]", f"[{FORMATS}]"]
    assert [cell.draft for cell in result.cells] == [f"zoo:eagle3{name}" for name in names]
    plain, *quantized = result.cells
    assert plain.longer_by is None
    assert plain.tokens_per_second
    assert len({cell.output_tokens for cell in result.cells}) == 1, "none changes what comes out"
    for cell in quantized:
        assert cell.longer_by is not None
        assert cell.acceptance_length is not None
        assert cell.compared_with == "zoo:eagle3"
        assert cell.longer_by.mean == pytest.approx(cell.acceptance_length.mean - plain.acceptance_length.mean)
        assert cell.tokens_per_second is None, "the speed is not that of an engine that multiplies quantized weights"
    saved = [plain.draft_bytes - cell.draft_bytes for cell in quantized]
    assert saved[2] == saved[0] + saved[1] > 0
    out = convert_checkpoint("zoo:eagle3", tmp_path / "out", target="zoo:target", quantize=FORMATS)
    (written,) = evaluate_draft("zoo:target", str(out), Settings(**SETTINGS)).cells
    assert written.num_accepted_tokens_per_pos == quantized[2].num_accepted_tokens_per_pos
    assert written.num_drafts == quantized[2].num_drafts


@pytest.mark.slow
@pytest.mark.parametrize("formats", ["qkv:fp8,mlp:nvfp4", "qkv:modelopt-fp8,mlp:modelopt-fp8"])
def test_a_causal_language_model_rounds_its_inputs_too(formats: str, tmp_path: Path) -> None:
    asked = Settings(**SETTINGS, fake_quant=formats)
    *_, both = evaluate_draft("zoo:target", "zoo:draft-model", asked).cells
    out = convert_checkpoint("zoo:draft-model", tmp_path / "out", target="zoo:target", quantize=formats)
    (written,) = evaluate_draft("zoo:target", str(out), Settings(**SETTINGS)).cells
    assert written.num_accepted_tokens_per_pos == both.num_accepted_tokens_per_pos


def test_parts_and_formats_that_there_are_not() -> None:
    for text, error, words in (
        ("lm_head:fp8-dynamic", LayoutError, "of this draft: fc, qkv, o, mlp, all"),  # dflash has the target's head
        ("qkv:int4", SettingError, "one of fp8-dynamic, fp8, nvfp4"),
    ):
        with pytest.raises(error, match=words):
            evaluate_draft("zoo:target", "zoo:dflash", Settings(**SETTINGS, fake_quant=text))


def test_an_engine_has_its_exclusions(tmp_path: Path, draftkit: Command) -> None:
    """Those that a user does not name are kept plain; one that is named is refused."""
    out = draftkit("convert", "zoo:eagle3", tmp_path / "out", "--to", "sglang", "--target", "zoo:target",
                   "--quantize", "fp8-dynamic")  # fmt: skip
    assert out.code == 0
    config = (tmp_path / "out/config.json").read_text()
    assert "re:.*\\\\bfc$" in config
    refused = draftkit("convert", "zoo:eagle3", tmp_path / "no", "--to", "sglang", "--target", "zoo:target",
                       "--quantize", "fc:fp8-dynamic")  # fmt: skip
    assert refused.code == 1
    assert "reads no quantized fc" in refused.err
    assert not (tmp_path / "no").exists()
