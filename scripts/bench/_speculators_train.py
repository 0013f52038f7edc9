"""Training by speculators' own command, in its environment; run by `_speculators.py`.

Reads a JSON job from standard input: `samples`, a JSONL file of input_ids, loss_mask and seq_len; `data`, the folder
that gets them as the library's dataset and has the hidden states already; `arguments` of `speculators train`;
`threads`; `device`, cpu or cuda; `result`, the file that gets the loss, tokens and time of every step, and the peak
memory.

The library's trainer wants an accelerator in three places, which `on_a_cpu` replaces. Its Muon, which is torch's,
iterates in bfloat16. A CPU without instructions for that takes twenty times as long and gets float32.
"""

import json
import logging
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # the setting above must be in the environment first
import torch.optim._muon as muon
from datasets import Dataset
from speculators.train import checkpointer, cli, trainer
from speculators.train.config import TrainConfig

from scripts.bench._peak import peak_bytes


class Steps(logging.Handler):
    """Keeps what the trainer logs of every training step: its own clock's time, from fetching to the optimiser."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[dict[str, float]] = []
        self._cpu = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        entry = record.msg
        if not isinstance(entry, dict) or "train" not in entry:
            return
        seconds = entry["profile"]["step_ms"] / 1000
        cpu = time.process_time()
        tokens = entry["profile"]["tokens_per_s"] * seconds
        step = {"loss": entry["train"]["loss"], "tokens": tokens, "seconds": seconds, "cpu_seconds": cpu - self._cpu}
        self.found.append(step)
        self._cpu = cpu


class Unrounded(torch.Tensor):
    """A tensor that stays as it is where it should become bfloat16."""

    def bfloat16(self, *_: object) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()


def iterate_in_float32() -> None:
    orthogonal = muon._zeropower_via_newtonschulz
    muon._zeropower_via_newtonschulz = lambda update, *how: orthogonal(update.as_subclass(Unrounded), *how)


def on_a_cpu() -> None:
    trainer.get_local_rank = lambda: "cpu"
    checkpointer.get_current_device = lambda: "cpu"
    torch.accelerator.synchronize = lambda device=None: None
    if not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()):
        iterate_in_float32()


def write_dataset(samples: str, folder: str) -> None:
    """Write samples as the speculators library prepares them, an Arrow dataset that gives tensors; where there is one,
    other runs may be reading it."""
    if (Path(folder) / "dataset_info.json").exists():
        return
    dataset = Dataset.from_list([json.loads(line) for line in Path(samples).read_text().splitlines()])
    dataset.set_format(type="torch")
    dataset.save_to_disk(folder)


def main() -> None:
    job = json.load(sys.stdin)
    torch.set_num_threads(job["threads"])
    write_dataset(job["samples"], job["data"])
    if job["device"] == "cpu":
        on_a_cpu()
    steps = Steps()
    logging.getLogger().addHandler(steps)
    cli.main(TrainConfig.resolve(job["arguments"]))
    Path(job["result"]).write_text(json.dumps({"steps": steps.found, "peak_bytes": peak_bytes()}))


if __name__ == "__main__":
    main()
