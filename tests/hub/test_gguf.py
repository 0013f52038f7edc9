"""Targets in GGUF files: loaded with plain weights, with the file's tokenizer and chat template."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from conftest import Command
from fixtures.checkpoints.gguf_files import write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftkit import zoo
from draftkit.data.sample_files import write_samples
from draftkit.data.samples import Sample, SamplesOrigin
from draftkit.data.states.online import load_target_embeddings, load_training_target
from draftkit.data.tokenizer import load_tokenizer
from draftkit.errors import DraftkitError
from draftkit.hub.locate import locate
from draftkit.layout.digest import target_sha256, weights_sha256
from draftkit.loading import load_model
from draftkit.runtime.engine import Engine
from draftkit.targets.target import Target

PROMPTS = ([4088, 5, 6, 7], [450, 284, 7, 87, 1905], [1633, 75])
NEW = 12


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The embedded target in each kind, each alone in its folder."""
    folder = tmp_path_factory.mktemp("gguf")
    written = {}
    for kind in ("F32", "F16", "Q8_0"):
        (folder / kind).mkdir()
        written[kind] = write_gguf(zoo.path("target"), folder / kind / f"zoo-{kind}.gguf", kind)
    return written


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
def test_greedy_output_is_that_of_transformers(kind: str, files: dict[str, Path]) -> None:
    file = files[kind]
    model, tokenizer = load_model(str(file), device="cpu", dtype=torch.float32)
    target = Target(model)
    engine = Engine(target, None, num_speculative_tokens=0, num_slots=2)
    found = [generation.tokens for generation in engine.generate(PROMPTS, max_new_tokens=NEW)]
    reference = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        ids = torch.tensor([prompt])
        output = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW,
            eos_token_id=sorted(target.eos_token_ids),
        )
        assert tokens == output[0, len(prompt) :].tolist()
    own = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    messages = [{"role": "user", "content": "def f(x):\n    return 'ä'"}]
    assert tokenizer.apply_chat_template(messages) == own.apply_chat_template(messages)
    assert target.eos_token_ids == {own.eos_token_id}


@pytest.mark.slow
def test_the_weights_of_a_file_in_float32_are_the_models(files: dict[str, Path]) -> None:
    expected = load_training_target("zoo:target", device="cpu", dtype=torch.float32).state_dict()
    found = load_training_target(str(files["F32"].parent), device="cpu", dtype=torch.float32).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.long
def test_ends_tokenizer_and_digests(files: dict[str, Path]) -> None:
    embeddings = load_target_embeddings(str(files["F16"]), device="cpu", dtype=torch.float32)
    whole = load_training_target(str(files["F16"]), device="cpu", dtype=torch.float32)
    assert torch.equal(embeddings.get_output_embeddings().weight, whole.get_output_embeddings().weight)
    assert embeddings.num_parameters() == whole.num_parameters()
    assert load_tokenizer(str(files["F16"])).end_ids == load_tokenizer("zoo:target").end_ids
    folders = [locate(str(file)).path for file in files.values()]
    assert len({target_sha256(folder) for folder in folders}) == len({weights_sha256(f) for f in folders}) == 3


@pytest.mark.slow
@pytest.mark.parametrize(("splits", "apart"), [("smollm", True), ("default", False)])
def test_digits_are_split_as_the_file_says(splits: str, apart: bool, tmp_path: Path) -> None:
    """Where llama.cpp sets every digit apart, white space before one is no part of another word."""
    file = write_gguf(zoo.path("target"), tmp_path / "zoo.gguf", extra={"tokenizer.ggml.pre": splits})
    split = load_tokenizer(str(file)).tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str
    words = [word for word, _ in split("a\n\n12 b")]
    assert words == (["a", "ĊĊ", "1", "2", "Ġb"] if apart else ["a", "Ċ", "Ċ", "12", "Ġb"])


@pytest.mark.long
def test_commands_take_one(draftkit: Command, files: dict[str, Path], tmp_path: Path) -> None:
    file, data = files["F32"], tmp_path / "data.jsonl"
    command = (
        "eval",
        "--target",
        file,
        "--draft",
        "zoo:eagle3",
        "--dataset",
        "zoo",
        "--limit",
        2,
        "--max-new-tokens",
        16,
        "--json",
    )
    assert json.loads(draftkit(*command).out)["cells"][0]["acceptance_length"]["mean"] > 1.3
    tokenizer = load_tokenizer(str(file))
    origin = SamplesOrigin(str(file), tokenizer.sha256, tokenizer.template_sha256)
    write_samples(data, [Sample.of(f"s{n}", list(range(4, 40)), [(4, 36)]) for n in range(8)], origin)
    assert json.loads(draftkit("data", "check", data, "--target", file, "--json").out)["findings"]
    assert draftkit("data", "states", data, tmp_path / "states", "--target", file).code == 0
    training = ("train", "--recipe", "eagle3", "--target", file, "--data", data, "--out", tmp_path / "out")
    assert draftkit(*training, "--dry-run").code == 0
    steps = ("--states", tmp_path / "states", "--set", "optimization.max_steps=1", "--set", "validation.share=0.2")
    assert draftkit(*training, *steps).code == 0


def test_a_folder_with_other_weights_is_read_from_these(files: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(zoo.path("target"), tmp_path / "both")
    shutil.copy(files["Q8_0"], tmp_path / "both")
    assert locate(str(tmp_path / "both")).path == tmp_path / "both"


def test_several_files_are_refused(draftkit: Command, files: dict[str, Path], tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(files["F16"], tmp_path / name)
    outcome = draftkit("eval", "--target", tmp_path, "--draft", "zoo:eagle3", "--dataset", "zoo")
    assert outcome.code == 1
    assert "several GGUF files: a.gguf, b.gguf" in outcome.err
    assert "next: pass the file itself" in outcome.err


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.5, 0.999])
def test_a_truncated_file_is_one_message(
    share: float, draftkit: Command, files: dict[str, Path], tmp_path: Path
) -> None:
    content = files["Q8_0"].read_bytes()
    (tmp_path / "cut.gguf").write_bytes(content[: int(len(content) * share)])
    outcome = draftkit("data", "check", "none.jsonl", "--target", tmp_path / "cut.gguf")
    assert outcome.code == 1
    outcome = draftkit("eval", "--target", tmp_path / "cut.gguf", "--draft", "zoo:eagle3", "--dataset", "zoo")
    assert outcome.code == 1
    assert "cut.gguf is no GGUF file, or is damaged or cut short" in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "eagle3"}, "a model of type eagle3"),
        ({"extra": {"llama.rope.scaling.type": "yarn"}}, "scales its rope"),
    ],
)
def test_what_transformers_does_not_read_is_refused(changes: dict, message: str, tmp_path: Path) -> None:
    file = write_gguf(zoo.path("target"), tmp_path / "odd.gguf", "F16", **changes)
    with pytest.raises(DraftkitError, match=message) as raised:
        locate(str(file))
    assert "model that the file was made from" in str(raised.value)


@pytest.mark.slow
def test_an_unknown_way_to_split_text_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    locate(str(write_gguf(zoo.path("target"), tmp_path / "odd.gguf", "F16", extra={"tokenizer.ggml.pre": "odd-bpe"})))
    assert "does not know how odd-bpe splits text" in caplog.text


def test_the_package_is_named_where_it_is_missing(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(files["F16"], tmp_path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(DraftkitError, match=r"pip install 'draftkit-spec\[gguf\]'"):
        locate(str(tmp_path))


@pytest.mark.long
def test_vllm_refuses_one(draftkit: Command, files: dict[str, Path], tmp_path: Path) -> None:
    command = ("eval", "--target", files["F16"], "--draft", "zoo:eagle3", "--dataset", "zoo", "--engine", "vllm")
    outcome = draftkit(*command, "--vllm-python", sys.executable)
    assert outcome.code == 1
    assert "vLLM does not load GGUF files" in outcome.err
    converted = draftkit("convert", "zoo:eagle3", tmp_path / "draft", "--target", files["F16"])
    assert "vllm serve TARGET" in converted.err + converted.out
