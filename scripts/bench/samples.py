"""What training takes before its first step, by the number of samples: CPU seconds, private and shared memory.

    python -m scripts.bench.samples --samples 1000 10000 100000 --formats jsonl arrow --processes 1 2

Each row is a run on random samples that ends where its first step would begin, without imports. Memory is what the
process has gained there: `own` is private, and `PSS` adds its share of pages in common with others, such as those of
mapped files. With several processes, the means of all.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np

from draftkit.data.sample_files import write_samples
from draftkit.data.samples import Sample, SamplesOrigin
from scripts._bench import arguments, show, stamp

VOCABULARY = 512  # of random tokens; the embedded target has more
COLUMNS = ("format", "samples", "tokens each", "processes", "CPU s", "own MB", "PSS MB")


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
    import torch
    from transformers import TrainerCallback

    import draftkit.train.recipes.eagle_eagle3  # noqa: F401  # what a run imports on the way
    from draftkit.train.config import read_config
    from draftkit.train.run import train_draft

    class Stop(TrainerCallback):
        def on_step_begin(self, *_: object, **__: object) -> None:
            taken = time.process_time() - began
            several = int(os.environ.get("WORLD_SIZE", "1")) > 1
            if several:
                torch.distributed.barrier()  # all of them have mapped their files
            now = memory()
            print(json.dumps({"cpu": taken, **{name: now[name] - before[name] for name in now}}), flush=True)
            if several:
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
    parser = arguments(__doc__)
    parser.add_argument("--samples", type=int, nargs="+", default=[1_000, 10_000])
    parser.add_argument("--tokens", type=int, default=1_000)
    parser.add_argument("--formats", nargs="+", default=["jsonl", "arrow"])
    parser.add_argument("--processes", type=int, nargs="+", default=[1])
    parser.add_argument("--begin", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.begin:
        begin_training(Path(options.begin[0]), int(options.begin[1]))
        return
    rows = []
    with tempfile.TemporaryDirectory() as work:
        for number, kind in product(options.samples, options.formats):
            data = Path(work, f"{number}.{kind}")
            write_samples(data, random_samples(number, options.tokens), SamplesOrigin("zoo:target", "0" * 64))
            for processes in options.processes:
                found = measured(data, 2 * options.tokens, processes)
                own, pss = found["own"] / 1e6, found["pss"] / 1e6
                sizes = (f"{number:,}", f"{options.tokens:,}", processes)
                rows.append([kind, *sizes, f"{found['cpu']:.1f}", f"{own:.0f}", f"{pss:.0f}"])
    show(stamp(), COLUMNS, rows)


if __name__ == "__main__":
    main()
