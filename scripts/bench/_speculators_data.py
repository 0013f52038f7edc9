"""What the speculators library trains from: samples as its dataset, the target's states beside them, a vocabulary."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from draftkit.data.packing import row_tensors
from draftkit.data.samples import Sample
from draftkit.data.states.online import OnlineStates, load_training_target
from draftkit.targets.states import AuxLayers


def write_speculators_data(folder: Path, samples: Iterable[Sample], target: str, layers: Sequence[int]) -> None:
    """`samples.jsonl`, and under `data/hidden_states` the states of the layers and before the final norm, float32."""
    states = folder / "data" / "hidden_states"
    states.mkdir(parents=True, exist_ok=True)
    model = load_training_target(target, device="cpu", dtype=torch.float32)
    config = model.config
    online = OnlineStates(model, AuxLayers((*layers, config.num_hidden_layers)))
    with (folder / "samples.jsonl").open("w") as file:
        for index, sample in enumerate(samples):
            row = row_tensors([sample], len(sample))
            features, _ = online.states(*(row[name][None] for name in ("tokens", "positions", "sample_ids")))
            assert features is not None
            hidden = features.view(len(sample), len(layers) + 1, config.hidden_size)
            save_file({"token_ids": row["tokens"], "hidden_states": hidden}, states / f"hs_{index}.safetensors")
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
