"""Tokens per second on the CPU: draftkit's runtime, transformers and vLLM, on the embedded models or any target.

`python -m scripts.bench.runtime [--vllm-python ENV/bin/python] [--prompts 16] [--max-new-tokens 128] [--threads 1]`
`python -m scripts.bench.runtime --target T --drafts D … [--k 2 4] [--dtype bfloat16] [--compile]`

All tools generate greedily from the same token ids, in the same dtype, with the same number of threads. The time of the
prompts is included. `generate` is transformers' own; "assisted" is its assisted generation with a standalone draft, the
same K and no confidence stop, at batch 1. vLLM gets the same draft and K, compiled as by default and, without
`--compiled-only`, eager too; the faster one counts. What is compared takes turns after a warm-up, and the median of the
repeats counts. Batches stay full in draftkit and vLLM while requests wait; `generate` pads them on the left.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftkit.engines.vllm.serve import speculative_config
from draftkit.evaluate.prompts import encode_prompt, load_prompts
from draftkit.hub.locate import locate
from draftkit.layout.folder import Draft
from draftkit.loading import load_drafter, load_model, open_draft
from draftkit.requests import Request
from draftkit.runtime.engine import Engine
from draftkit.targets.target import Target
from scripts import _bench
from scripts._bench import show, stamp

DRAFTS = ("eagle", "eagle3", "p-eagle", "pard", "draft-model", "dflash")
BATCHES = (1, 8)
COLUMNS = ("batch", "draft", "K", "generate", "assisted", "vLLM eager", "vLLM", "draftkit plain", "draftkit")
RATIOS = ("× assisted", "× vLLM", "× plain", "AL")  # the last is the acceptance length, which × plain cannot exceed


class Timing(NamedTuple):
    """`length`: the acceptance length, of draftkit alone."""

    tokens: int
    seconds: float
    length: float = 1.0


Run = Callable[[], Timing]


def speeds(runs: Mapping[str, Run], repeats: int) -> dict[str, float]:
    """The median of each run's tokens per second, taken in turns; a first turn, which warms up, does not count. `AL`:
    the acceptance length of draftkit with a draft."""
    seen: dict[str, list[float]] = {name: [] for name in runs}
    length = {}
    for _ in range(repeats + 1):
        for name, run in runs.items():
            timing = run()
            seen[name].append(timing.tokens / timing.seconds)
            if name == "draftkit":
                length = {"AL": timing.length}
    return {name: median(each[1:]) for name, each in seen.items()} | length


class Bench:
    """The target and what it is asked, in draftkit, in transformers, and for vLLM."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.clock: Callable[[], float] = getattr(time, options.clock)
        self.dtype: torch.dtype = getattr(torch, options.dtype)
        self.model, tokenizer = load_model(options.target, device="cpu", dtype=self.dtype)
        prompts = load_prompts(options.dataset, max(options.prompts, *(2 * batch for batch in options.batches)))
        self.requests = [Request(p.id, encode_prompt(p, tokenizer), options.max_new_tokens) for p in prompts]
        self.eos = sorted(Target(self.model).eos_token_ids)
        self.peer = _of_transformers(options.target, self.dtype)
        self.assistant = None if options.assistant is None else _of_transformers(options.assistant, self.dtype)
        if self.assistant is not None:
            self.assistant.generation_config.num_assistant_tokens_schedule = "constant"
            self.assistant.generation_config.assistant_confidence_threshold = 0.0

    def rows(self, name: str | None, k: int, batches: Sequence[int]) -> Iterator[list[str]]:
        """The table's rows for a draft and K; None and 0 for plain decoding."""
        with ExitStack() as stack:
            draft = None
            if name is not None:
                draft = stack.enter_context(open_draft(_source(name), self.options.target))
            vllm = {}
            if self.options.vllm_python:
                for kind in ("vLLM",) if self.options.compiled_only else ("vLLM eager", "vLLM"):
                    vllm[kind] = stack.enter_context(self.vllm(draft, k, eager=kind == "vLLM eager"))
            for batch in batches:
                runs: dict[str, Run] = {kind: partial(ask, batch) for kind, ask in vllm.items()}
                runs["draftkit plain"] = self.draftkit(None, 0, batch)
                if draft is None:
                    runs["generate"] = partial(self.generate, batch)
                else:
                    runs["draftkit"] = self.draftkit(draft, k, batch)
                if draft is not None and batch == 1 and self.assistant is not None:
                    runs["assisted"] = partial(self.assisted, k)
                yield [str(batch), name or "–", str(k or "–"), *_cells(speeds(runs, self.options.repeats))]

    def draftkit(self, draft: Draft | None, k: int, batch: int) -> Run:
        drafter = None if draft is None else load_drafter(draft, self.model)
        target = Target(self.model, None if drafter is None else drafter.aux_layers)
        compiled = self.options.compile
        engine = Engine(target, drafter, num_speculative_tokens=k, num_slots=batch, compile=compiled)

        def run() -> Timing:
            began = self.clock()
            generations = engine.generate(self.asked(batch))
            taken = self.clock() - began
            accepted = [r.accepted for g in generations for r in g.rounds]
            return Timing(sum(len(g.tokens) for g in generations), taken, 1 + mean(accepted))

        return run

    def asked(self, batch: int) -> list[Request]:
        """What is generated at a batch size: at least twice as many, so that places are taken again."""
        return self.requests[: max(self.options.prompts, 2 * batch)]

    def assisted(self, k: int) -> Timing:
        """transformers' assisted generation, one prompt after the other."""
        assert self.assistant is not None
        self.assistant.generation_config.num_assistant_tokens = k
        return self.generate(1, assistant_model=self.assistant)

    def generate(self, batch: int, **options: object) -> Timing:
        """transformers' generation, `batch` prompts at a time."""
        began, tokens, asked = self.clock(), 0, self.asked(batch)
        for first in range(0, len(asked), batch):
            prompts = [request.prompt for request in asked[first : first + batch]]
            longest = max(map(len, prompts))
            ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
            mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
            most = self.options.max_new_tokens
            out = self.peer.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=most, pad_token_id=0, **options
            )
            tokens += sum(self._until_end(row) for row in out[:, longest:].tolist())
        return Timing(tokens, self.clock() - began)

    def _until_end(self, tokens: list[int]) -> int:
        return min((tokens.index(end) + 1 for end in self.eos if end in tokens), default=len(tokens))

    @contextmanager
    def vllm(self, draft: Draft | None, k: int, *, eager: bool) -> Iterator[Callable[[int], Timing]]:
        """A process with vLLM's engine, and what runs it at a batch size."""
        job = {
            "target": str(locate(self.options.target).path),
            "speculative": None if draft is None else speculative_config(draft.spec, draft.path, k),
            "dtype": self.options.dtype,
            "eager": eager,
            "clock": self.options.clock,
            "num_slots": max(self.options.batches),
            "prompts": [request.prompt for request in self.requests],
            "max_new_tokens": self.options.max_new_tokens,
            "eos_token_ids": self.eos,
        }
        with (
            TemporaryDirectory() as folder,
            (Path(folder) / "log").open("w+") as log,
            subprocess.Popen(
                [self.options.vllm_python, "-m", "scripts.bench._vllm_time"],
                env=os.environ | {"OMP_NUM_THREADS": str(self.options.threads)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            ) as worker,
        ):
            asked, answers = worker.stdin, worker.stdout
            assert asked is not None
            assert answers is not None

            def ask(line: str) -> None:
                asked.write(line + "\n")
                asked.flush()

            def run(batch: int) -> Timing:
                ask(f"{batch} {len(self.asked(batch))}")
                answer = answers.readline()
                if not answer:
                    log.seek(0)
                    sys.exit(f"vLLM failed:\n{log.read()[-3000:]}")
                return Timing(**json.loads(answer))

            ask(json.dumps(job))
            yield run
            asked.close()


def _source(name: str) -> str:
    return f"zoo:{name}" if name in DRAFTS else name


def _of_transformers(source: str, dtype: torch.dtype) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(locate(source).path, dtype=dtype)


def _cells(speed: Mapping[str, float]) -> list[str]:
    """A row of speeds in tokens/s, then draftkit's against the others."""
    ours = speed.get("draftkit", speed["draftkit plain"])
    theirs = {
        "× assisted": speed.get("assisted"),
        "× vLLM": max(speed.get("vLLM eager", 0), speed.get("vLLM", 0)) or None,
        "× plain": speed["draftkit plain"] if "draftkit" in speed else None,
    }
    cells = [f"{speed[column]:.0f}" if column in speed else "" for column in COLUMNS[3:]]
    cells += [f"{ours / other:.2f}" if other else "" for other in theirs.values()]
    return [*cells, f"{speed['AL']:.2f}" if "AL" in speed else ""]


def arguments() -> argparse.Namespace:
    parser = _bench.arguments(__doc__)
    parser.add_argument("--vllm-python", help="the Python of an environment with vLLM; without it vLLM is left out")
    parser.add_argument("--target", default="zoo:target", help="as `draftkit eval` takes it, but no GGUF file")
    drafts = f"as `draftkit eval` takes them, or of the zoo: {', '.join(DRAFTS)}"
    parser.add_argument("--drafts", nargs="*", help=drafts)
    parser.add_argument("--assistant", help="a standalone draft for transformers' assisted generation")
    parser.add_argument("--dataset", default="zoo", help="the prompts, as `draftkit eval` takes them")
    parser.add_argument("--prompts", type=int, default=16, help="at least; twice the batch where that is more")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads, the same for every tool")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--k", type=int, nargs="+", default=(4,), help="draft tokens a round, each in rows of its own")
    parser.add_argument("--compile", action="store_true", help="draftkit's rounds as compiled programs")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--compiled-only", action="store_true", help="vLLM as it comes, and not eager too")
    clocks, help = ("perf_counter", "process_time"), "process_time: of all threads, for machines with other work"
    parser.add_argument("--clock", choices=clocks, default=clocks[0], help=help)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    options = parser.parse_args()
    if options.target == "zoo:target":
        options.assistant = options.assistant or "zoo:draft-model"
        options.drafts = DRAFTS if options.drafts is None else options.drafts
    return options


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    bench = Bench(options)
    rows = []
    for name, k in [(None, 0), *((name, k) for name in options.drafts or () for k in options.k)]:
        for row in bench.rows(name, k, options.batches):
            print(*row, sep="\t", file=sys.stderr, flush=True)
            rows.append(row)
    sizes = (
        f"{options.prompts} prompts, {options.max_new_tokens} new tokens, {options.dtype}, {options.threads} threads"
    )
    title = f"tokens/s, {stamp()}\n{sizes}, median of {options.repeats} by {options.clock}"
    show(title, (*COLUMNS, *RATIOS), rows)


if __name__ == "__main__":
    main()
