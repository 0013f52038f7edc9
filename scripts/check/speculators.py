"""Do the speculators library and draftkit mean the same by a file?

`python -m scripts.check.speculators --speculators ENV/bin/python`, of an environment with speculators 0.9

1. The library saves drafts. draftkit reads them, and its own module gives the library's logits.
2. draftkit writes them and the embedded EAGLE-3 draft. The library's class finds no tensor missing or unexpected, and
   gives the same logits.
3. The library converts checkpoints of other layouts. draftkit reads the result as the same draft as the original, or
   names what the library dropped.

Exits with 1 when anything is otherwise.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from draftkit import zoo
from draftkit.convert.api import convert_checkpoint, plan_conversion
from draftkit.errors import DraftkitError
from draftkit.layout.families.eagle import EagleSpec
from draftkit.layout.folder import Draft, read_draft
from draftkit.layout.spec import DraftSpec
from draftkit.models.eagle import load_eagle
from draftkit.targets.target import load_target
from scripts._bench import arguments, show
from scripts.check.parts.speculators_cases import DRAFTS, REFUSED, ROWS, SAME, SOURCES, Made

TARGET = str(zoo.path("target"))
EMBEDDED = "zoo:eagle3"
TOLERANCE = 2e-5  # of logits around 1, in float32

Jobs = list[dict[str, Any]]


def run_library(python: str, jobs: Jobs, scratch: Path) -> Jobs:
    """What each job found, in the library's own process."""
    result = scratch / "result.json"
    result.unlink(missing_ok=True)
    asked = json.dumps({"jobs": jobs, "result": str(result)})
    command, quiet = [python, "-m", "scripts.check.parts.speculators_worker"], {"PYTHONWARNINGS": "ignore"}
    ran = subprocess.run(command, input=asked, capture_output=True, text=True, check=False, env=os.environ | quiet)
    if not result.is_file():
        sys.exit(f"speculators failed:\n{ran.stderr[-3000:]}")
    found: Jobs = json.loads(result.read_text())
    return found


def check_drafts(python: str, scratch: Path) -> int:
    """Steps 1 and 2: how many drafts are not the same on both sides."""
    folders = {name: scratch / str(number) for number, name in enumerate([*DRAFTS, EMBEDDED])}
    paths = {}
    for name, folder in folders.items():
        folder.mkdir()
        save_file(DRAFTS.get(name, Made({})).inputs(), folder / "inputs")
        paths[name] = {"folder": f"{folder}/made", "inputs": f"{folder}/inputs", "logits": f"{folder}/made.logits"}
    for made in run_library(python, [DRAFTS[name].job(TARGET) | paths[name] for name in DRAFTS], scratch):
        if "error" in made:
            sys.exit(f"the library could not make a draft: {made['error']}")
    jobs = []
    for name, folder in folders.items():
        source = EMBEDDED if name == EMBEDDED else str(folder / "made")
        unified = convert_checkpoint(source, folder / "unified", target=TARGET)
        convert_checkpoint(str(unified), folder / "written", to="speculators", target=TARGET)
        own = {"folder": str(folder / "written"), "logits": str(folder / "written.logits")}
        jobs.append({"do": "load"} | paths[name] | own)
    target = load_target(Path(TARGET), device="cpu", dtype=torch.float32, attention="eager")
    found = run_library(python, jobs, scratch)
    rows = [[name, *compare(folder, one, target)] for (name, folder), one in zip(folders.items(), found, strict=True)]
    show("drafts", ("draft", "draftkit − library", "missing, unexpected", "written − library", "verdict"), rows)
    return sum(row[-1] != "same" for row in rows)


def compare(folder: Path, found: dict[str, Any], target: PreTrainedModel) -> list[str]:
    """Cells of the table; the last one says whether both sides have the same draft."""
    if "error" in found:
        return ["", "", found["error"][:60], "DIFFERENT"]
    written = load_file(folder / "written.logits")["logits"]
    made = folder / "made.logits"
    library = load_file(made)["logits"] if made.is_file() else written
    ours = our_logits(read_draft(folder / "unified"), target, load_file(folder / "inputs"))
    reading, writing = (float((logits - library).abs().max()) for logits in (ours, written))
    lost = found["missing"] + found["unexpected"]
    same = reading < TOLERANCE and writing == 0 and not lost
    return [f"{reading:.1e}", ", ".join(lost) or "none", f"{writing:.1e}", "same" if same else "DIFFERENT"]


@torch.no_grad()
def our_logits(draft: Draft, target: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The logits that the library computes, by draftkit's module."""
    spec = draft.spec.architecture
    assert isinstance(spec, EagleSpec)
    weights = {name: tensor for name, tensor in draft.tensors.items() if name != "mask_hidden"}
    layers = replace(draft, spec=replace(draft.spec, architecture=replace(spec, parallel=None)), tensors=weights)
    model = load_eagle(layers, target, attention="eager")
    window = spec.decoder.sliding_window or ROWS
    tokens, features = inputs["tokens"], inputs["features"]
    if spec.parallel is not None:
        anchors, depths = inputs["anchors"], inputs["depths"]
        positions, real = anchors + depths, depths == 0
        ids = torch.where(real, tokens[:, positions], spec.parallel.mask_token_id)
        mask_hidden = draft.tensors["mask_hidden"].load()
        hidden = model.fuse(torch.where(real[:, None], features[:, positions], mask_hidden))
        context = real & (anchors <= anchors[:, None]) & (anchors > positions[:, None] - window)
        rollout = (anchors == anchors[:, None]) & (depths <= depths[:, None])
        return model.logits(model(ids, hidden, positions[None], attention_mask=additive(context | rollout)).head_input)
    rows = torch.arange(ROWS)
    causal = (rows <= rows[:, None]) & (rows > rows[:, None] - window)
    hidden, positions = model.fuse(features), 1 + rows[None]  # the library counts from 1
    first = model(tokens, hidden, positions, attention_mask=additive(causal))
    # In its second step a row sees those rows of the first, and itself, and gets the true next token.
    own = torch.eye(ROWS, dtype=torch.bool)
    visible = torch.cat([torch.cat([causal, torch.zeros_like(own)], 1), torch.cat([causal, own], 1)])
    following = torch.cat([tokens[:, 1:], torch.zeros_like(tokens[:, :1])], 1)
    both = model(
        torch.cat([tokens, following], 1),
        torch.cat([hidden, first.feedback], 1),
        torch.cat([positions, positions + 1], 1),
        attention_mask=additive(visible),
    )
    return model.logits(both.head_input)


def additive(visible: torch.Tensor) -> torch.Tensor:
    return torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))[None, None]


def check_converter(python: str, scratch: Path) -> int:
    """Step 3: how many outcomes are not the expected ones."""
    jobs = []
    for number, source in enumerate(SOURCES.values()):
        written, out = source.write(scratch / f"source{number}"), scratch / f"converted{number}"
        jobs.append({"do": "convert", "source": str(written), "folder": str(out), "target": TARGET})
    rows = []
    for (name, source), job, found in zip(SOURCES.items(), jobs, run_library(python, jobs, scratch), strict=True):
        outcome = f"{REFUSED}: {found['error']}" if "error" in found else read_converted(job["folder"], job["source"])
        verdict = "as expected" if outcome.startswith(source.outcome) else "UNEXPECTED"
        rows.append([name, outcome.splitlines()[0], verdict])
    show("speculators convert", ("source", "what draftkit says of the result", "verdict"), rows)
    return sum(row[-1] != "as expected" for row in rows)


def read_converted(converted: str, source: str) -> str:
    """What draftkit makes of a converted checkpoint, beside what it makes of the original."""
    try:
        draft = plan_conversion(converted, target=TARGET).require_draft()
    except DraftkitError as error:
        return str(error)
    original = plan_conversion(source, target=TARGET).require_draft()
    if comparable(draft.spec) == comparable(original.spec) and same_tensors(draft, original):
        return SAME
    notes = [f"{fact.value} {fact.note}" for fact in draft.provenance.facts if fact.name == "converter"]
    return f"another draft, noted: {notes[0]}" if notes else "another draft, and nothing says so"


def comparable(spec: DraftSpec) -> DraftSpec:
    """A config without the keys that the converter restates: the position limit, which is the target's, and the base
    10000."""
    eagle = spec.architecture
    assert isinstance(eagle, EagleSpec)
    rope = replace(eagle.decoder.rope, declared_base=None, max_position_embeddings=0)
    return replace(spec, architecture=replace(eagle, decoder=replace(eagle.decoder, rope=rope)))


def same_tensors(one: Draft, other: Draft) -> bool:
    names = one.tensors.keys() | other.tensors.keys()
    return names == one.tensors.keys() == other.tensors.keys() and all(
        torch.equal(one.tensors[name].load(), other.tensors[name].load()) for name in names
    )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--speculators", required=True, help="the Python of an environment with speculators 0.9")
    python = parser.parse_args().speculators
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        failures = sum(check(python, Path(scratch)) for check in (check_drafts, check_converter))
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
