"""Do the speculators library and draftkit mean the same by a file?

`python scripts/check_speculators.py --speculators ENV/bin/python` with the Python of an environment with speculators 0.9

1. The library makes drafts and saves them; draftkit reads them, and its own module gives the library's logits.
2. draftkit writes them back; the library's class finds no tensor missing or unexpected, and gives the same logits.
   So does the embedded EAGLE-3 draft, whose embedding is copied from the target.
3. The library converts checkpoints of other layouts; draftkit reads the result as the same draft as the original, or
   says by name what the library dropped (`EXPECTED`).

Exits with 1 when anything is otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from draftkit import zoo
from draftkit.convert.api import convert_checkpoint, plan_conversion
from draftkit.errors import DraftkitError
from draftkit.layout.folder import Draft, read_draft
from draftkit.layout.spec import DraftSpec, EagleSpec
from draftkit.models.loading import load_eagle
from draftkit.models.target import load_target

TARGET = str(zoo.path("target"))
ROWS, DEPTHS = 24, 3
TOLERANCE = 2e-5  # of logits of size 1 to 10, in float32

LLAMA = {
    "model_type": "llama", "vocab_size": 4096, "hidden_size": 192, "intermediate_size": 256, "num_hidden_layers": 1,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}  # fmt: skip
QWEN3 = LLAMA | {"model_type": "qwen3"}
SLIDING = {"layer_types": ["sliding_attention"], "sliding_window": 6, "use_sliding_window": True}
LINEAR = {"rope_parameters": {"rope_type": "linear", "rope_theta": 500000.0, "factor": 4.0}}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip

# Name → type, layers, options of the library's config.
DRAFTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "eagle3": ("eagle3", LLAMA, {}),
    "full vocabulary": ("eagle3", LLAMA, {"draft_vocab_size": 4096}),
    "norm_before_residual": ("eagle3", LLAMA, {"norm_before_residual": True}),
    "norm_before_fc, norm_output": ("eagle3", LLAMA, {"norm_before_fc": True, "norm_output": True}),
    "fc_norm, 4 captured layers": ("eagle3", LLAMA, {"fc_norm": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 5, 10]}),
    "qwen3": ("eagle3", QWEN3, {}),
    "2 layers, biases": ("eagle3", LLAMA | {"num_hidden_layers": 2, "attention_bias": True}, {}),
    "sliding window": ("eagle3", LLAMA | SLIDING, {}),
    "qwen3, sliding window": ("eagle3", QWEN3 | SLIDING, {"norm_output": True}),
    "linear rope": ("eagle3", LLAMA | LINEAR, {}),
    "llama3 rope": ("eagle3", LLAMA | {"rope_parameters": LLAMA3}, {}),
    "peagle, 2 layers": ("peagle", LLAMA | {"num_hidden_layers": 2}, {"mask_token_id": 7}),
    "peagle, qwen3, fc_norm": ("peagle", QWEN3 | SLIDING, {"mask_token_id": 7, "fc_norm": True}),
}

# Sources for Eagle3Converter, made from the embedded EAGLE-3 draft → what must come of them.
SAME, REFUSED = "the same draft", "the library refuses it"
EXPECTED = {
    "SafeAILab": SAME,
    "with embed_tokens": SAME,
    "ModelOpt: d2t, no t2d": "no d2t says which",
    "fc_norm": "fc_norm.0.weight is missing",
    "2 layers": "config.json has 2 layers, and the weights have 1",
    "4 captured layers": REFUSED,
    "q_norm and k_norm": "noted: Eagle3Converter drops q_norm, k_norm",
    "ids in eagle_config": "noted: Eagle3Converter drops q_norm, k_norm and the ids in eagle_config",
}


class Library:
    """The speculators library in its own process."""

    def __init__(self, python: str, scratch: Path):
        self.python, self.scratch = python, scratch

    def run(self, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """What each job found."""
        result = self.scratch / "result.json"
        result.unlink(missing_ok=True)
        worker = Path(__file__).with_name("speculators_worker.py")
        order = json.dumps({"jobs": jobs, "result": str(result)})
        environment = os.environ | {"PYTHONWARNINGS": "ignore"}
        ran = subprocess.run(
            [self.python, str(worker)], input=order, capture_output=True, text=True, check=False, env=environment
        )
        if not result.is_file():
            sys.exit(f"speculators failed:\n{ran.stderr[-3000:]}")
        found: list[dict[str, Any]] = json.loads(result.read_text())
        return found


def make_inputs(path: Path, captured: int, parallel: bool) -> Path:
    """Random tokens and features; for P-EAGLE the rows of one pass: three depths on every anchor that has room."""
    generator = torch.Generator().manual_seed(1)
    inputs = {
        "tokens": torch.randint(0, 4096, (1, ROWS), generator=generator),
        "features": torch.randn(1, ROWS, captured * 192, generator=generator),
    }
    if parallel:
        rows = [(anchor, depth) for depth in range(DEPTHS) for anchor in range(ROWS - depth)]
        inputs |= {"anchors": torch.tensor([a for a, _ in rows]), "depths": torch.tensor([d for _, d in rows])}
    save_file(inputs, path)
    return path


@torch.no_grad()
def our_logits(draft: Draft, target: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The logits that the library computes, by draftkit's module."""
    spec = draft.spec.architecture
    assert isinstance(spec, EagleSpec)
    window = spec.decoder.sliding_window or ROWS
    tokens, features = inputs["tokens"], inputs["features"]
    weights = {name: tensor for name, tensor in draft.tensors.items() if name != "mask_hidden"}
    autoregressive = replace(draft.spec, architecture=replace(spec, parallel=None))
    model = load_eagle(replace(draft, spec=autoregressive, tensors=weights), target, attention="eager")
    if spec.parallel is not None:
        mask_hidden = draft.tensors["mask_hidden"].load()
        anchors, depths = inputs["anchors"], inputs["depths"]
        positions = anchors + depths
        real = (depths == 0)[None]
        ids = torch.where(real, tokens[:, positions], spec.parallel.mask_token_id)
        hidden = torch.where(real[..., None], features[:, positions], mask_hidden)
        earlier = (anchors[:, None] >= anchors) & (anchors > positions[:, None] - window) & (depths == 0)
        visible = earlier | ((anchors[:, None] == anchors) & (depths[:, None] >= depths))
        out = model(ids, model.fuse(hidden), positions[None], attention_mask=additive(visible))
        return model.logits(out.head_input)
    index = torch.arange(ROWS)
    causal = (index <= index[:, None]) & (index > index[:, None] - window)
    positions = 1 + index[None]  # the library counts from 1
    hidden = model.fuse(features)
    first = model(tokens, hidden, positions, attention_mask=additive(causal))
    # The second step sees the first one's rows and its own, and gets the true next tokens.
    both = torch.cat(
        [torch.cat([causal, torch.zeros_like(causal)], 1), torch.cat([causal, torch.eye(ROWS, dtype=torch.bool)], 1)]
    )
    shifted = torch.cat([tokens[:, 1:], torch.zeros_like(tokens[:, :1])], 1)
    second = model(
        torch.cat([tokens, shifted], 1),
        torch.cat([hidden, first.feedback], 1),
        torch.cat([positions, positions + 1], 1),
        attention_mask=additive(both),
    )
    return model.logits(second.head_input)


def additive(visible: torch.Tensor) -> torch.Tensor:
    return torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))[None, None]


def check_drafts(library: Library, target: PreTrainedModel, scratch: Path) -> tuple[Table, int]:
    """Steps 1 and 2."""
    making, loading, rows = [], [], []
    for number, (name, (kind, layer, options)) in enumerate(DRAFTS.items()):
        captured = len(options.get("eagle_aux_hidden_state_layer_ids", (0, 0, 0)))
        inputs = make_inputs(scratch / f"inputs_{number}.safetensors", captured, kind == "peagle")
        options = {"draft_vocab_size": 512} | options
        paths = {"folder": scratch / f"made_{number}", "inputs": inputs, "logits": scratch / f"made_{number}.logits"}
        job = {"do": "make", "kind": kind, "layer": layer, "options": options, "target": TARGET}
        making.append(job | {key: str(path) for key, path in paths.items()})
        rows.append((name, number))
    for (_, number), made in zip(rows, library.run(making), strict=True):
        if "error" in made:
            sys.exit(f"the library could not make draft {number}: {made['error']}")
        unified = convert_checkpoint(making[number]["folder"], scratch / f"unified_{number}", target=TARGET)
        back = convert_checkpoint(str(unified), scratch / f"back_{number}", to="speculators", target=TARGET)
        loading.append(making[number] | {"do": "load", "folder": str(back), "logits": str(scratch / f"back_{number}.logits")})
    rows.append(("zoo:eagle3", len(rows)))
    loading.append(add_embedded(scratch))

    table = Table("draft", "draftkit − library", "missing, unexpected", "written − library", "verdict", title="drafts")
    failures = 0
    for (name, number), found, job in zip(rows, library.run(loading), loading, strict=True):
        if "error" in found:
            failures += 1
            table.add_row(name, "", "", found["error"][:60], "FAILS")
            continue
        ours = our_logits(read_draft(scratch / f"unified_{number}"), target, load_file(job["inputs"]))
        written = load_file(job["logits"])["logits"]
        made = scratch / f"made_{number}.logits"
        theirs = load_file(made)["logits"] if made.is_file() else written
        differences = [float((one - theirs).abs().max()) for one in (ours, written)]
        lost = found["missing"] + found["unexpected"]
        same = not lost and differences[0] < TOLERANCE and differences[1] == 0
        failures += not same
        table.add_row(
            name, f"{differences[0]:.1e}", ", ".join(lost) or "none", f"{differences[1]:.1e}", "same" if same else "DIFFERS"
        )
    return table, failures


def add_embedded(scratch: Path) -> dict[str, Any]:
    """The embedded EAGLE-3 draft, in both layouts; the job that loads it."""
    number = len(DRAFTS)
    unified = convert_checkpoint("zoo:eagle3", scratch / f"unified_{number}", target=TARGET)
    written = convert_checkpoint(str(unified), scratch / f"back_{number}", to="speculators", target=TARGET)
    inputs = make_inputs(scratch / f"inputs_{number}.safetensors", 3, parallel=False)
    logits = scratch / f"back_{number}.logits"
    return {"do": "load", "folder": str(written), "inputs": str(inputs), "logits": str(logits)}


def converter_sources(scratch: Path) -> dict[str, Path]:
    """Name → a checkpoint in another layout."""
    folder = zoo.path("eagle3")
    tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
    config = json.loads((folder / "config.json").read_text())
    norm, table = tensors["norm.weight"], torch.zeros(4096, 192, dtype=torch.float16)
    layer = {
        name.replace("midlayer.", "layers.1."): tensor[:, :192] if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj") else tensor
        for name, tensor in tensors.items()
        if name.startswith("midlayer.") and "hidden_norm" not in name
    }
    ids = {"eagle_aux_hidden_state_layer_ids": [0, 2, 4], "use_aux_hidden_state": True}
    heads = {f"midlayer.self_attn.{name}_norm.weight": norm[:32] for name in "qk"}
    changes: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "SafeAILab": ({}, {}),
        "with embed_tokens": ({"embed_tokens.weight": table}, {}),
        "ModelOpt: d2t, no t2d": ({"t2d": None}, {}),
        "fc_norm": ({f"fc_norm.{i}.weight": norm for i in range(3)}, {"fc_norm": True}),
        "2 layers": (layer, {"num_hidden_layers": 2}),
        "4 captured layers": ({"fc.weight": torch.cat([tensors["fc.weight"], tensors["fc.weight"][:, :192]], 1)}, {}),
        "q_norm and k_norm": (heads, {}),
        "ids in eagle_config": ({}, {"eagle_config": ids}),
    }
    sources = {}
    for number, (name, (other_tensors, other_config)) in enumerate(changes.items()):
        sources[name] = scratch / f"source_{number}"
        sources[name].mkdir()
        changed = {key: value.contiguous() for key, value in (tensors | other_tensors).items() if value is not None}
        torch.save(changed, sources[name] / "pytorch_model.bin")
        (sources[name] / "config.json").write_text(json.dumps(config | other_config))
    return sources


def check_converter(library: Library, scratch: Path) -> tuple[Table, int]:
    """Step 3."""
    sources = converter_sources(scratch)
    outs = {name: scratch / f"converted_{number}" for number, name in enumerate(sources)}
    jobs = [
        {"do": "convert", "source": str(sources[name]), "folder": str(outs[name]), "target": TARGET, "options": {}}
        for name in sources
    ]
    table = Table("source of Eagle3Converter", "what draftkit says of the result", "verdict", title="speculators convert")
    failures = 0
    for name, found in zip(sources, library.run(jobs), strict=True):
        outcome = f"{REFUSED}: {found['error']}" if "error" in found else read_converted(outs[name], sources[name])
        as_expected = EXPECTED[name] in outcome
        failures += not as_expected
        table.add_row(name, outcome.splitlines()[0][:110], "as expected" if as_expected else "UNEXPECTED")
    return table, failures


def read_converted(converted: Path, source: Path) -> str:
    """What draftkit makes of a converted checkpoint, beside what it makes of the original."""
    try:
        draft = plan_conversion(str(converted), target=TARGET).require_draft()
    except DraftkitError as error:
        return str(error)
    try:
        original = plan_conversion(str(source), target=TARGET).require_draft()
        if comparable(draft.spec) == comparable(original.spec) and same_tensors(draft, original):
            return SAME
    except DraftkitError:
        pass  # no original to compare with
    notes = [f"{fact.value} {fact.note}" for fact in draft.provenance.facts if fact.name == "converter"]
    return "another draft; noted: " + " ".join(notes) if notes else "ANOTHER DRAFT, and nothing says so"


def comparable(spec: DraftSpec) -> DraftSpec:
    """Without what the converter restates: the position limit is the target's, and base 10000 is written out."""
    eagle = spec.architecture
    assert isinstance(eagle, EagleSpec)
    rope = replace(eagle.decoder.rope, declared_base=None, max_position_embeddings=0)
    return replace(spec, architecture=replace(eagle, decoder=replace(eagle.decoder, rope=rope)))


def same_tensors(one: Draft, other: Draft) -> bool:
    return one.tensors.keys() == other.tensors.keys() and all(
        torch.equal(one.tensors[name].load(), other.tensors[name].load()) for name in one.tensors
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speculators", required=True, help="the Python of an environment with speculators 0.9")
    options = parser.parse_args()
    torch.set_num_threads(1)
    target = load_target(Path(TARGET), device="cpu", dtype=torch.float32, attention="eager")
    with tempfile.TemporaryDirectory() as scratch:
        library = Library(options.speculators, Path(scratch))
        results = [check_drafts(library, target, Path(scratch)), check_converter(library, Path(scratch))]
    for table, _ in results:
        Console(width=150).print(table)
    sys.exit(1 if any(failures for _, failures in results) else 0)


if __name__ == "__main__":
    main()
