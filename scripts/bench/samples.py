"""What training takes before its first step, by the number of samples: CPU seconds, private and shared memory.

    python -m scripts.bench.samples --samples 1000 10000 100000 --formats jsonl arrow --processes 1 2

Imports are left out. Each line is a run of its own on random samples, which ends where its first step would begin;
memory is what `/proc` tells of the process there, over what it had before: `own`, which nothing but its end gives back,
and `PSS`, with its share of pages that it has in common with others, as those of a mapped file. With several processes,
the means of all.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from draftkit.data.sample_files import write_samples
from draftkit.data.samples import Sample, SamplesOrigin

VOCABULARY = 512  # of random tokens; the embedded target has more
HEADER = "| format | samples | tokens each | processes | CPU s | own MB | PSS MB |"


def random_samples(number: int, tokens: int) -> Iterator[Sample]:
    """Samples of half to one and a half times `tokens`, of which the second half is the target's."""
    rng = np.random.default_rng(0)
    for index in range(number):
        size = int(rng.integers(tokens // 2, tokens + tokens // 2))
        yield Sample.of(f"row-{index}", rng.integers(0, VOCABULARY, size, dtype=np.int32), [(size // 2, size)])


def memory() -> dict[str, int]:
    """The memory of this process alone, which is in no file, and its proportional set size, bytes."""
    found = dict.fromkeys(("Private_Dirty", "Pss"), 0)
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines():
        name, _, rest = line.partition(":")
        if name in found:
            found[name] = int(rest.split()[0]) * 1024
    return {"own": found["Private_Dirty"], "pss": found["Pss"]}


def begin_training(data: Path, longest: int) -> None:
    """Start a run on `data`, print what it took, and end where its first step would begin."""
    from transformers import TrainerCallback

    import draftkit.train.recipes.eagle_eagle3  # noqa: F401  # what a run imports on the way
    from draftkit.train.config import read_config
    from draftkit.train.run import train_draft

    class Stop(TrainerCallback):
        def on_step_begin(self, *_: object, **__: object) -> None:
            taken = time.process_time() - began
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                import torch

                torch.distributed.barrier()  # all of them have mapped their files
            now = memory()
            print(json.dumps({"cpu": taken, **{name: now[name] - before[name] for name in now}}), flush=True)
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                torch.distributed.barrier()
            os._exit(0)

    with tempfile.TemporaryDirectory() as out:
        given = {"recipe": "eagle3", "target": "zoo:target", "data": str(data), "out": f"{out}/run", "device": "cpu"}
        run = read_config(None, [f"tokens_per_row={longest}"], given)
        before, began = memory(), time.process_time()
        train_draft(run, callbacks=(Stop(),))


def measured(data: Path, longest: int, processes: int) -> dict[str, float]:
    """What the start of a run on `data` takes, the mean of its processes."""
    launch = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)) if processes > 1 else ()
    command = [sys.executable, *(("-m", *launch) if launch else ()), "-m", "scripts.bench.samples"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(
        [*command, "--begin", str(data), str(longest)], env=environment, check=True, capture_output=True, text=True
    )
    found = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith('{"cpu"')]
    return {name: sum(each[name] for each in found) / len(found) for name in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, nargs="+", default=[1_000, 10_000])
    parser.add_argument("--tokens", type=int, default=1_000)
    parser.add_argument("--formats", nargs="+", default=["jsonl", "arrow"])
    parser.add_argument("--processes", type=int, nargs="+", default=[1])
    parser.add_argument("--work", type=Path, help="a folder for the samples, which are kept there")
    parser.add_argument("--begin", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.begin:
        begin_training(Path(options.begin[0]), int(options.begin[1]))
        return
    work = options.work or Path(tempfile.mkdtemp())
    work.mkdir(exist_ok=True)
    print(HEADER, "|---|---|---|---|---|---|---|", sep="\n", flush=True)
    for number in options.samples:
        for kind in options.formats:
            data = work / f"{number}x{options.tokens}.{kind}"
            if not data.exists():
                write_samples(data, random_samples(number, options.tokens), SamplesOrigin("zoo:target", "0" * 64))
            for processes in options.processes:
                found = measured(data, 2 * options.tokens, processes)
                own, pss = found["own"] / 1e6, found["pss"] / 1e6
                row = f"{kind} | {number:,} | {options.tokens:,} | {processes} | {found['cpu']:.1f}"
                print(f"| {row} | {own:.0f} | {pss:.0f} |", flush=True)
    if options.work is None:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
