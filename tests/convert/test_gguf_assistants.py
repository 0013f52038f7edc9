"""Gemma-4's assistant in GGUF: what is written, what comes back, and what llama.cpp has no place for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from conftest import Command
from fixtures.checkpoints import pico
from fixtures.checkpoints.gemma4_assistants import SUPPRESSED, Pair, save_pair
from safetensors.torch import load_file

from draftkit.checks.checkpoint import findings_of_reading
from draftkit.convert.api import Reading, convert_checkpoint, describe_checkpoint
from draftkit.convert.formats.gguf.layers import ROPE_FACTORS
from draftkit.errors import FormatError, LayoutError
from draftkit.io.gguf_file import read_gguf
from draftkit.layout.folder import read_draft

PREFIX = "gemma4-assistant."


def saved(folder: Path, **keys: Any) -> Pair:
    pair = save_pair(folder, **keys)
    pico.save_tokenizer(pair.folder, ("a", "b"))
    return pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return saved(tmp_path_factory.mktemp("pair"), use_ordered_embeddings=False)


@pytest.fixture(scope="module")
def file(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("gguf") / "assistant.gguf"
    return convert_checkpoint(str(pair.assistant), out, to="gguf", target=str(pair.folder))


def test_what_comes_back_is_what_went_out(pair: Pair, file: Path, tmp_path: Path) -> None:
    before = convert_checkpoint(str(pair.assistant), tmp_path / "unified", target=str(pair.folder))
    after = convert_checkpoint(str(file), tmp_path / "back", target=str(pair.folder))
    one, two = (load_file(folder / "model.safetensors") for folder in (before, after))
    assert one.keys() == two.keys()
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())
    assert read_draft(before).spec == read_draft(after).spec
    generation = json.loads((after / "generation_config.json").read_text())
    assert generation["suppress_tokens"] == list(SUPPRESSED)  # where vLLM looks for them


def test_every_key_is_stated(file: Path) -> None:
    """Heads of full layers are 24 wide, of which a quarter of the pairs turns; those of sliding ones 16."""
    metadata = {name.removeprefix(PREFIX): value for name, value in read_gguf(file).metadata.items()}
    assert metadata["attention.key_length"] == metadata["rope.dimension_count"] == 24
    assert metadata["attention.key_length_swa"] == metadata["rope.dimension_count_swa"] == 16
    assert metadata["attention.sliding_window_pattern"] == [True, True, False]
    assert metadata["nextn_predict_layers"] == metadata["block_count"] == 3
    assert metadata["embedding_length_out"] == pico.HIDDEN
    assert metadata["tokenizer.ggml.suppress_tokens"] == list(SUPPRESSED)
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(file).tensors}
    assert tensors[ROPE_FACTORS].tolist()[:4] == [1.0, 1.0, 1.0, pytest.approx(1e30)]


def test_the_command_and_where_it_drafts_otherwise_are_named(
    draftkit: Command, pair: Pair, file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "assistant.gguf"
    said = draftkit("convert", pair.assistant, out, "--to", "gguf", "--target", pair.folder)
    assert f"-md {out} --spec-type draft-mtp --spec-draft-n-max" in said.out, said.err
    found = describe_checkpoint(str(file), target=str(pair.folder))
    assert isinstance(found, Reading)
    assert {finding.name for finding in findings_of_reading(found)} == {"gguf-assistant-states"}


def test_the_ordered_embedding_is_lost(tmp_path: Path) -> None:
    ordered = saved(tmp_path, use_ordered_embeddings=True)
    out, arguments = tmp_path / "assistant.gguf", {"to": "gguf", "target": str(ordered.folder)}
    with pytest.raises(LayoutError, match="num_centroids is 16"):
        convert_checkpoint(str(ordered.assistant), out, **arguments)  # type: ignore[arg-type]
    assert not out.exists()
    convert_checkpoint(str(ordered.assistant), out, allow_lossy=True, **arguments)  # type: ignore[arg-type]
    back = read_draft(convert_checkpoint(str(out), tmp_path / "back", target=str(ordered.folder)))
    assert back.spec.facts()["num_centroids"] == 0


def with_text(pair: Pair, folder: Path, **keys: object) -> str:
    """A copy of the assistant with other keys in its text_config."""
    folder.mkdir()
    for path in pair.assistant.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    text = {k: v for k, v in (pair.config["text_config"] | keys).items() if v is not None}
    (folder / "config.json").write_text(json.dumps(pair.config | {"text_config": text}))
    return str(folder)


def test_what_llama_cpp_does_not_run_is_refused(pair: Pair, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    for name, keys, message in (
        ("gelu", {"hidden_activation": "gelu"}, "hidden_activation is gelu"),
        ("rope", {"rope_parameters": None}, "does not state rope_parameters"),
    ):
        with pytest.raises(LayoutError, match=message):
            convert_checkpoint(with_text(pair, tmp_path / name, **keys), out, to="gguf", target=str(pair.folder))
    other = pico.save_target_config(tmp_path / "llama", vocab_size=pico.VOCABULARY)
    with pytest.raises(LayoutError, match="does not end with a sliding layer and a full one"):
        convert_checkpoint(str(pair.assistant), out, to="gguf", target=str(other))
    assert not out.exists()
    foreign = tmp_path / "foreign.gguf"  # a key of the same length that nobody knows
    foreign.write_bytes(file.read_bytes().replace(b"draftkit.config", b"strangers.confi"))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(file.read_bytes().replace(b'"layer_types"', b'"layer_typos"'))
    for unread in (foreign, broken):
        with pytest.raises(FormatError, match="does not hold the assistant's configuration"):
            convert_checkpoint(str(unread), tmp_path / "back", target=str(pair.folder))
