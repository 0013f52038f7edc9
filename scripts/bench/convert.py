"""What a conversion costs beside a plain copy: `draftkit convert`, `cp` and `speculators convert` on one checkpoint.

`python -m scripts.bench.convert [--speculators ENV/bin/speculators] [--folder DIR] [--repeats 5] [--threads 1]`

The checkpoint is an EAGLE-3 draft of the 8B class: 0.85 GB of seeded random numbers, as `pytorch_model.bin` and as
`model.safetensors`. Every run is a whole process with its input in the page cache. Runs take turns, and the table shows
medians; the first turn compiles byte code and does not count. "private" is the sampled peak of anonymous memory.

Limits: 1.5 × (`cp` + starting Python, with torch for `.bin`), 400 MB private, 0.3 s of CPU for `--help` and `inspect`.
`cp` leaves its copy in memory and draftkit waits for the disk: the second ratio is to `cp` followed by `sync`.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from safetensors.torch import save_file

from scripts._bench import arguments, show, stamp

HIDDEN, INTERMEDIATE, KEY_VALUE, VOCABULARY, DRAFT_VOCABULARY = 4096, 14336, 1024, 128256, 32000
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE, "max_position_embeddings": 2048, "num_attention_heads": 32,
    "num_hidden_layers": 1, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "tie_word_embeddings": False,
    "torch_dtype": "float16", "vocab_size": VOCABULARY,
}  # fmt: skip
SHAPES = {
    "fc": (HIDDEN, 3 * HIDDEN), "midlayer.hidden_norm": (HIDDEN,), "midlayer.input_layernorm": (HIDDEN,),
    "midlayer.self_attn.q_proj": (HIDDEN, 2 * HIDDEN), "midlayer.self_attn.k_proj": (KEY_VALUE, 2 * HIDDEN),
    "midlayer.self_attn.v_proj": (KEY_VALUE, 2 * HIDDEN), "midlayer.self_attn.o_proj": (HIDDEN, HIDDEN),
    "midlayer.post_attention_layernorm": (HIDDEN,), "midlayer.mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "midlayer.mlp.up_proj": (INTERMEDIATE, HIDDEN), "midlayer.mlp.down_proj": (HIDDEN, INTERMEDIATE),
    "norm": (HIDDEN,), "lm_head": (DRAFT_VOCABULARY, HIDDEN),
}  # fmt: skip
WEIGHTS = {".bin": "pytorch_model.bin", "safetensors": "model.safetensors"}
DRAFTKIT = (sys.executable, "-c", "from draftkit.cli import main; main()")
START = {".bin": "python, import torch", "safetensors": "python"}
COPIES = ("cp", "cp and sync")
SAMPLING_SECONDS = 0.005
COLUMNS = ("run", "wall s", "CPU s", "private MB", "× (cp + python)", "× (cp and sync + python)")


class Cost(NamedTuple):
    """The cost of one process: wall seconds, processor seconds, and the peak bytes of its own."""

    wall: float
    cpu: float
    private: int


def make_checkpoints(folder: Path) -> None:
    """A folder for each kind of weights, and `target` with the config of a Llama-3.1-8B."""
    generator = torch.Generator().manual_seed(0)
    kept = torch.randperm(VOCABULARY, generator=generator)[:DRAFT_VOCABULARY].sort().values
    tensors = {f"{name}.weight": torch.rand(size, generator=generator).half() for name, size in SHAPES.items()}
    tensors["d2t"] = kept - torch.arange(DRAFT_VOCABULARY)
    tensors["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, kept, value=True)
    for name in (*WEIGHTS, "target"):
        (folder / name).mkdir()
    torch.save(tensors, folder / ".bin" / WEIGHTS[".bin"])
    save_file(tensors, folder / "safetensors" / WEIGHTS["safetensors"], metadata={"format": "pt"})
    for kind in WEIGHTS:
        draft = CONFIG | {"draft_vocab_size": DRAFT_VOCABULARY}
        (folder / kind / "config.json").write_text(json.dumps(draft))
    target = CONFIG | {"num_hidden_layers": 32, "max_position_embeddings": 131072, "rope_theta": 500000.0}
    (folder / "target" / "config.json").write_text(json.dumps(target))


def commands(folder: Path, speculators: Path | None) -> dict[str, Sequence[str | Path]]:
    """What is run, by name; everything that is written goes to `out`."""
    out, target = folder / "out", folder / "target"
    runs: dict[str, Sequence[str | Path]] = {
        START["safetensors"]: (sys.executable, "-c", "pass"),
        START[".bin"]: (sys.executable, "-c", "import torch"),
        "draftkit --help": (*DRAFTKIT, "--help"),
        "draftkit inspect, safetensors": (*DRAFTKIT, "inspect", folder / "safetensors", "--target", target),
    }
    for kind in WEIGHTS:
        source = folder / kind
        runs[f"cp, {kind}"] = ("cp", "-r", source, out)
        runs[f"cp and sync, {kind}"] = ("sh", "-c", 'cp -r "$0" "$1" && sync -f "$1"', source, out)
        runs[f"draftkit convert, {kind}"] = (*DRAFTKIT, "convert", source, out, "--target", target)
        if speculators:
            convert = (speculators, "convert", source, "--algorithm", "eagle3")
            runs[f"speculators convert, {kind}"] = (*convert, "--verifier", target, "--output-path", out)
    return runs


def run(command: Sequence[str | Path], environment: Mapping[str, str]) -> Cost:
    """What a command costs."""
    with tempfile.TemporaryFile() as errors:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, env=environment)
        peaks: list[int] = []
        watcher = threading.Thread(target=watch, args=(process.pid, peaks))
        watcher.start()
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - began
        watcher.join()
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            errors.seek(0)
            sys.exit(f"{command} failed:\n{errors.read().decode()[-3000:]}")
    return Cost(wall, usage.ru_utime + usage.ru_stime, max(peaks, default=0))


def watch(pid: int, sizes: list[int]) -> None:
    """Note the anonymous memory of a process, in bytes, until it ends."""
    with suppress(OSError):
        while found := re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text()):
            sizes.append(int(found[1]) << 10)
            time.sleep(SAMPLING_SECONDS)


def warm_up(folder: Path) -> None:
    """Inputs in the page cache, and as much free memory again that the host of a virtual machine has handed over."""
    size = 0
    for kind, weights in WEIGHTS.items():
        with (folder / kind / weights).open("rb") as file:
            while chunk := file.read(1 << 20):
                size += len(chunk)
    with mmap.mmap(-1, size) as memory:
        memory[:: mmap.PAGESIZE] = bytes(-(-size // mmap.PAGESIZE))


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Cost]:
    """The median cost of every command."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"} | {
        "PYTHONPYCACHEPREFIX": str(folder / "byte-code"),
        "OMP_NUM_THREADS": str(options.threads),
        "HF_HUB_OFFLINE": "1",
    }
    runs = commands(folder, options.speculators)
    costs: dict[str, list[Cost]] = {name: [] for name in runs}
    for _ in range(1 + options.repeats):
        for name, command in runs.items():
            warm_up(folder)
            shutil.rmtree(folder / "out", ignore_errors=True)
            costs[name].append(run(command, environment))
            print(f"{name}: {costs[name][-1].wall:.2f} s", file=sys.stderr)
    return {name: Cost(*map(median, zip(*measured[1:], strict=True))) for name, measured in costs.items()}


def rows(costs: dict[str, Cost]) -> Iterator[list[str]]:
    for name, cost in costs.items():
        ratios = [f"{ratio(costs, name, copy):.2f}" for copy in COPIES] if " convert" in name else ["", ""]
        yield [name, f"{cost.wall:.2f}", f"{cost.cpu:.2f}", f"{cost.private / 1e6:.0f}", *ratios]


def ratio(costs: dict[str, Cost], name: str, copy: str) -> float:
    """A conversion's time over that of a copy of its input and of starting Python."""
    kind = name.partition(", ")[2]
    return costs[name].wall / (costs[f"{copy}, {kind}"].wall + costs[START[kind]].wall)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--speculators", type=Path, help="the command of an environment with speculators")
    parser.add_argument("--folder", type=Path, help="where to work, on the disk to measure; default: the temporary one")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="OMP_NUM_THREADS of every process")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        make_checkpoints(Path(name))
        costs = measure(Path(name), options)
    sizes = f"0.85 GB, {options.threads} threads, medians of {options.repeats}, load {os.getloadavg()[2]:.1f}"
    show(f"{stamp()}\n{sizes}", COLUMNS, rows(costs))


if __name__ == "__main__":
    main()
