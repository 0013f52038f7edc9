"""Every published layout: recognized, accounted for, converted byte for byte, and written back where possible."""

from __future__ import annotations

import contextlib
import json
import re
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints import pico
from fixtures.checkpoints.published import all_published
from fixtures.checkpoints.published.checkpoint import Published, write_weights
from safetensors.torch import load_file

from draftkit import convert
from draftkit.convert.api import Conversion, convert_checkpoint, plan_conversion
from draftkit.convert.destinations import destination_of, destinations
from draftkit.convert.detect import all_formats, detect
from draftkit.convert.unified import PROVENANCE_FILE
from draftkit.errors import DraftkitError
from draftkit.layout.folder import read_draft
from draftkit.layout.spec import DraftSpec

ALL = all_published()
FORMATS = {module.NAME: module for module in all_formats()}
each = pytest.mark.parametrize("published", [pytest.param(p, id=name) for name, p in ALL.items()])
IN_A_FILE = {name for name in FORMATS if name.startswith("gguf-")}  # no folders: test_gguf_drafts.py
BACK = [p for p in ALL.values() if p.back and destination_of(FORMATS[p.format]) is not None]
# Keys that a layout may write differently, or not at all, without another meaning.
EQUIVALENT = {"architectures", "dtype", "rope_parameters", "rope_scaling", "torch_dtype", "transformers_version"}


def source_of(published: Published, folder: Path, **options: Any) -> dict[str, Any]:
    """A written checkpoint as arguments of `plan_conversion`."""
    target = None
    if published.target is not None:
        target = str(pico.save_target_config(folder / "target", **published.target))
    source = published.write(folder / "source", **options)
    return {"source": str(source), "target": target, "overrides": published.overrides}


def planned(published: Published, folder: Path, **options: Any) -> Conversion:
    return plan_conversion(**source_of(published, folder, **options))


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a written checkpoint, by other means than draftkit's."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix == ".safetensors":
            tensors |= load_file(path)
        elif path.suffix in (".bin", ".pt"):
            tensors |= torch.load(path, weights_only=True)
    return tensors


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    raw = [tensor.contiguous().flatten().view(torch.uint8) for tensor in (one, other)]
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(*raw)


def value_at(spec: dict[str, Any], path: str) -> Any:
    return reduce(lambda holder, key: holder[key], path.split("."), spec["architecture"])


def effective(spec: DraftSpec) -> dict[str, Any]:
    """A spec without what a config once said and nobody followed."""
    data: dict[str, Any] = spec.to_dict()
    data["architecture"].get("decoder", {}).get("rope", {}).pop("declared_base", None)
    return data


def restated(stated: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """What a config says where another, `stated`, says something; objects within it key by key."""
    said = {key: value for key, value in stated.items() if key not in EQUIVALENT and value is not None}
    return {
        key: restated(value, config.get(key) or {}) if isinstance(value, dict) else config.get(key)
        for key, value in said.items()
    }


@pytest.mark.slow
@each
def test_recognized_by_exactly_one_format(published: Published, tmp_path: Path) -> None:
    conversion = planned(published, tmp_path)
    assert conversion.reading is not None
    assert published.format == detect(conversion.reading.checkpoint).NAME
    assert len(conversion.reading.checkpoint.tensors) == published.count == len(published.all_tensors())


@pytest.mark.slow
@each
def test_every_key_and_tensor_is_accounted_for(published: Published, tmp_path: Path) -> None:
    conversion = planned(published, tmp_path)
    assert conversion.reading is not None
    plan = conversion.reading.plan
    assert {name for move in plan.moves for name in move.sources} >= set(published.all_tensors())
    assert {m.sources[0] for m in plan.moves if m.operation == "drop"} == set(published.dropped)
    assert all(move.reason for move in plan.moves if move.operation == "drop")
    assert bool(plan.losses) == published.lossy


@pytest.mark.slow
@each
def test_the_spec_states_the_facts(published: Published, tmp_path: Path) -> None:
    draft = planned(published, tmp_path).require_draft()
    assert draft.spec.method == published.method
    spec: dict[str, Any] = draft.spec.to_dict()
    assert {path: value_at(spec, path) for path in published.facts} == published.facts


@pytest.mark.slow
@each
def test_every_fact_says_where_it_comes_from(published: Published, tmp_path: Path) -> None:
    """Each fact of the spec once, with its value; objects by the kind that they name."""
    draft = planned(published, tmp_path).require_draft()
    found = [fact for fact in draft.provenance.facts if fact.origin != "overridden"]
    values = {fact.name: fact.value for fact in draft.provenance.facts}
    assert len(values) == len(draft.provenance.facts)
    facts = draft.spec.facts()
    assert facts.keys() <= values.keys()
    named = {"config", "parts", "rope_scaling", "quantization", "weights"}
    assert {f.name: f.value for f in found if f.name in facts.keys() - named} == {
        f.name: str(facts[f.name]) for f in found if f.name in facts.keys() - named
    }
    assert not {fact.name for fact in found} & published.overrides.keys()


@pytest.mark.slow
@pytest.mark.few(25)
@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_copied_tensors_keep_their_bytes(published: Published, tmp_path: Path, dtype: torch.dtype) -> None:
    arguments = source_of(published, tmp_path, dtype=dtype)
    out = convert_checkpoint(**arguments, out=tmp_path / "out", allow_lossy=published.lossy)
    written, source = read_tensors(out), published.all_tensors(dtype)
    reading = plan_conversion(**arguments).reading
    assert reading is not None
    copied = {m.destination: m.sources[0] for m in reading.plan.moves if m.operation == "copy"}
    assert copied
    assert all(same(written[str(new)], source[old]) for new, old in copied.items())
    assert read_draft(out).spec == reading.plan.spec  # the folder is valid and says the same


@pytest.mark.slow
@pytest.mark.few(13)
@pytest.mark.parametrize("published", [pytest.param(p, id=p.name) for p in BACK])
def test_round_trip_gives_the_same_tensors_and_an_equivalent_config(published: Published, tmp_path: Path) -> None:
    arguments = source_of(published, tmp_path)
    unified = convert_checkpoint(**arguments, out=tmp_path / "unified")
    destination = destination_of(FORMATS[published.format])
    assert destination is not None
    back = convert_checkpoint(str(unified), tmp_path / "back", to=destination, target=arguments["target"])
    source, written = published.all_tensors(), read_tensors(back)
    assert written.keys() == source.keys()
    assert [name for name in source if not same(source[name], written[name])] == []
    config = json.loads((back / "config.json").read_text())
    assert restated(published.config, config) == restated(published.config, published.config)
    again = plan_conversion(str(back), target=arguments["target"], overrides=published.overrides).require_draft()
    assert effective(again.spec) == effective(read_draft(unified).spec)
    assert (back / PROVENANCE_FILE).is_file()


@pytest.mark.slow
@pytest.mark.few(16)
@each
def test_a_missing_tensor_is_named(published: Published, tmp_path: Path) -> None:
    """Whichever tensor is gone: an error that names it or the fact it decides, never another draft without a word."""
    arguments = source_of(published, tmp_path)
    whole = plan_conversion(**arguments).require_draft()
    optional = {"t2d", "embed_tokens.weight", "fc.bias", "lm_head.weight"} | set(published.dropped)
    for path in Path(arguments["source"]).iterdir():
        tensors, content = read_tensors_of(path), path.read_bytes()
        for name in tensors:
            path.unlink()  # what a plan has mapped stays as it is
            write_weights(path, {other: tensor for other, tensor in tensors.items() if other != name})
            with contextlib.suppress(DraftkitError):
                assert plan_conversion(**arguments).require_draft().spec != whole.spec or name in optional, name
        path.unlink()
        path.write_bytes(content)


def read_tensors_of(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        return load_file(path)
    return torch.load(path, weights_only=True) if path.suffix in (".bin", ".pt") else {}


def test_the_guide_lists_every_format_and_where_its_drafts_go() -> None:
    """Each row: the formats, and the destinations that write a draft of their methods."""
    text = (Path(__file__).parents[2] / "docs/guides/formats.md").read_text().partition("## From one")[0]
    rows = [line.split("|")[2:4] for line in text.splitlines() if line.startswith("| ")][1:]
    named = [[set(re.findall("`([^`]+)`", cell)) for cell in row] for row in rows]
    assert sorted(name for formats, _ in named for name in formats) == sorted(FORMATS)
    methods = {name: {p.method for p in ALL.values() if p.format == name} for name in FORMATS} | {
        "lora": {"draft-model"}
    }
    methods |= {name: set(FORMATS[name].METHODS) for name in IN_A_FILE}  # type: ignore[attr-defined]
    exporters = [module for module in FORMATS.values() if destination_of(module) is not None]
    for formats, written in named:
        of_row = set().union(*(methods[name] for name in formats))
        assert written == {destination_of(e) for e in exporters if of_row & set(e.METHODS)}, formats  # type: ignore[attr-defined]
    assert {"unified", "vllm"} == set(destinations()) - set().union(*(written for _, written in named))


def test_every_format_has_a_published_checkpoint() -> None:
    adapters = {"lora"}  # of two folders: test_lora.py
    assert {published.format for published in ALL.values()} == set(FORMATS) - adapters - IN_A_FILE


def test_a_module_that_recognizes_checkpoints_has_a_name() -> None:
    """Without one it would be taken for what formats share, and never be asked."""
    for path in Path(convert.__path__[0], "formats").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert ("\ndef recognize(" in text) == ("\nNAME = " in text), path
