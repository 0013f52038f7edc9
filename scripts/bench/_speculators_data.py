"""What the speculators library trains from: samples as its dataset, the target's states beside them, a vocabulary."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from draftkit.data.samples import Sample
from draftkit.data.states.offline import OfflineStates
from draftkit.loading import open_target
from draftkit.targets.states import AuxLayers


def stored_states(folder: Path, samples: Path, target: str, layers: Sequence[int]) -> OfflineStates:
    """The target's states that both trainers read, written where they are not there yet: after `layers`, and before and
    after the final norm, float32. Those that speculators reads are returned, in its order."""
    opened = open_target(target).folder
    read = (*layers, AutoConfig.from_pretrained(opened).num_hidden_layers)
    if not folder.exists():
        command = ("data", "states", samples, folder, "--target", target, "--encoding", "float32")
        asked = ("--layers", ",".join(map(str, read)))
        subprocess.run([sys.executable, "-m", "draftkit", *map(str, (*command, *asked))], check=True)
    return OfflineStates(folder, data=samples, target=opened, aux_layers=AuxLayers(read), dtype=torch.float32)


def write_speculators_data(
    folder: Path, samples: Sequence[Sample], numbers: Iterable[int], states: OfflineStates
) -> None:
    """`samples.jsonl` of the samples with these numbers, and under `data/hidden_states` their states."""
    hidden = folder / "data" / "hidden_states"
    hidden.mkdir(parents=True, exist_ok=True)
    with (folder / "samples.jsonl").open("w") as file:
        for index, number in enumerate(numbers):
            sample = samples[number]
            features, last = states.states_of([number], len(sample))
            assert features is not None
            rows = {
                "token_ids": torch.from_numpy(sample.tokens).long(),
                "hidden_states": features.view(len(sample), -1, last.shape[-1]),
            }
            save_file(rows, hidden / f"hs_{index}.safetensors")
            file.write(json.dumps(speculators_row(sample)) + "\n")


def speculators_row(sample: Sample) -> dict[str, object]:
    return {
        "input_ids": sample.tokens.tolist(),
        "loss_mask": sample.loss_mask.tolist(),
        "seq_len": len(sample),
    }


def write_speculators_vocabulary(folder: Path, ids: torch.Tensor, size: int) -> None:
    """`d2t.npy` and `t2d.npy` of the ascending ids that are kept of `size`."""
    kept = ids.numpy()
    np.save(folder / "d2t.npy", kept - np.arange(len(kept)))
    np.save(folder / "t2d.npy", np.isin(np.arange(size), kept))


def run_worker(python: str, worker: str, job: Mapping[str, object], result: Path) -> None:
    """Run the module `worker` of these scripts, which writes the result; what it says goes to a file beside that."""
    with result.with_suffix(".log").open("w") as log:
        command = [python, "-m", worker]
        text = json.dumps({**job, "result": str(result)})
        subprocess.run(command, input=text, text=True, stdout=log, stderr=log, check=True)
