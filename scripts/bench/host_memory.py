"""The most memory that a measurement on the CPU holds: `draftkit eval`, transformers' `generate` and vLLM.

`python -m scripts.bench.host_memory --target T --draft D [--k 2] [--vllm-python ENV/bin/python] [--only vLLM]`

Every tool does the same in whole processes: a few prompts of the zoo, one at a time, with the target alone and, but for
`generate`, with a draft; once with the given target and once with the zoo's and its draft, whose weights are next to
nothing. What the first takes more than the second is set against the bytes of the weights. "private" is the peak of
anonymous memory, "resident" has the pages of the checkpoint's file too, which the kernel takes back when it needs them.
Both are of the process and its children together, at the moment when they hold most. Weights: the files of the target
and of the draft.

`draftkit eval --draft ngram` is plain decoding: the draft has no weights. What is compiled is run twice, and the second
run counts, which takes what is kept of the first. vLLM's room for keys and values is 1 GiB, the smallest that it takes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from draftkit.engines.vllm.serve import speculative_config
from draftkit.hub.locate import locate
from draftkit.loading import open_draft
from scripts.bench.convert import DRAFTKIT, Cost, run

TOKENS, PROMPTS = 32, 2
GENERATE = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=getattr(torch, sys.argv[2]))
for _ in range(2):
    ids = torch.arange(1, 60)[None]
    model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=32, pad_token_id=0)
"""


class Subject(NamedTuple):
    """What is measured: a target, a draft for it, and the folder in which that is unified."""

    target: str
    draft: str
    folder: Path

    @property
    def bytes(self) -> tuple[int, int]:
        """Of the weights: the target's, and the draft's."""
        return weights(locate(self.target).path), weights(self.folder)


def weights(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def lanes(options: argparse.Namespace) -> Iterator[tuple[str, bool, Callable[[Subject], Cost]]]:
    """Name, whether with the draft, and the run."""
    environment = os.environ | {"OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
    yield "generate", False, partial(generate, options, environment)
    for drafted in (False, True):
        for name in ("draftkit eval", "draftkit eval --compile"):
            yield name, drafted, partial(evaluate, options, environment, drafted, "--compile" in name)
        if options.vllm_python is not None:
            yield "vLLM", drafted, partial(vllm, options, environment, drafted)


def generate(options: argparse.Namespace, environment: Mapping[str, str], of: Subject) -> Cost:
    return run((sys.executable, "-c", GENERATE, locate(of.target).path, options.dtype), environment)


def evaluate(
    options: argparse.Namespace, environment: Mapping[str, str], drafted: bool, compiled: bool, of: Subject
) -> Cost:
    command = [
        *DRAFTKIT,
        "eval",
        "--target",
        of.target,
        "--draft",
        of.draft if drafted else "ngram",
        "--k",
        str(options.k),
    ]
    command += ["--dtype", options.dtype, "--dataset", "zoo", "--limit", str(PROMPTS), "--max-new-tokens", str(TOKENS)]
    if compiled:
        command.append("--compile")
        run(command, environment)
    return run(command, environment)


def vllm(options: argparse.Namespace, environment: Mapping[str, str], drafted: bool, of: Subject) -> Cost:
    with open_draft(of.draft, of.target) as draft:
        job = {
            "target": str(locate(of.target).path),
            "speculative": speculative_config(draft.spec, draft.path, options.k) if drafted else None,
            "dtype": options.dtype,
            "eager": False,
            "clock": "perf_counter",
            "num_slots": 1,
            "prompts": [list(range(1, 60))] * PROMPTS,
            "max_new_tokens": TOKENS,
            "eos_token_ids": [0],
        }
        command = (options.vllm_python, "-m", "scripts.bench._vllm_time")
        given = json.dumps(job) + "\n1\n"
        run(command, environment, given)
        return run(command, environment, given)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--k", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--vllm-python", help="Python of an environment with vLLM")
    parser.add_argument("--only", default="", help="a regular expression for what is measured, as 'compile, EAGLE-3'")
    options = parser.parse_args()
    table = Table("tool", "draft", "private MB", "resident MB", "with the zoo's", "", "more", "", "of the weights", "")
    with ExitStack() as stack:
        subjects = []
        for target, draft in ((options.target, options.draft), ("zoo:target", "zoo:eagle3")):
            subjects.append(Subject(target, draft, stack.enter_context(open_draft(draft, target)).path))
        for name, drafted, lane in lanes(options):
            method = "EAGLE-3" if drafted else "plain"
            if re.search(options.only, f"{name}, {method}"):
                large, small = (lane(subject) for subject in subjects)
                table.add_row(name, method, *cells(large, small, subjects, drafted))
                Console(width=160, file=sys.stderr).print(table)
    Console(width=160).print(table)


def cells(large: Cost, small: Cost, subjects: list[Subject], drafted: bool) -> Iterator[str]:
    """Private and resident by turns: of the target, of the zoo's, the difference, and that over the weights'."""
    held = [sum(subject.bytes[: 1 + drafted]) for subject in subjects]
    pairs = [(cost.private, cost.resident) for cost in (large, small)]
    for pair in (*pairs, tuple(a - b for a, b in zip(*pairs, strict=True))):
        yield from (f"{value / 1e6:.0f}" for value in pair)
    yield from (f"{(a - b) / (held[0] - held[1]):.2f}" for a, b in zip(*pairs, strict=True))


if __name__ == "__main__":
    main()
