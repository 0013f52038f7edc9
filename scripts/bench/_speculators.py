"""Training with the speculators library: its samples, the target's states, a vocabulary, and its command."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, PretrainedConfig

from draftkit.data.samples import Sample
from draftkit.data.states.offline import OfflineStates
from draftkit.data.vocabulary import choose_vocabulary, token_counts
from draftkit.loading import open_target
from draftkit.targets.states import AuxLayers

CPU = {"draft-attn-impl": "sdpa", "loss-implementation": "eager", "hidden-states-dtype": "float32"}


def stored_states(folder: Path, samples: Path, target: str, layers: Sequence[int]) -> OfflineStates:
    """The states that both trainers read, written if missing: float32, after `layers` and around the final norm.

    Returned are those that speculators reads, in its order.
    """
    opened = open_target(target).folder
    read = (*layers, AutoConfig.from_pretrained(opened).num_hidden_layers)
    if not folder.exists():
        command = ("data", "states", samples, folder, "--target", target, "--encoding", "float32")
        asked = ("--layers", ",".join(map(str, read)))
        subprocess.run([sys.executable, "-m", "draftkit", *map(str, (*command, *asked))], check=True)
    return OfflineStates(folder, data=samples, target=opened, aux_layers=AuxLayers(read), dtype=torch.float32)


def write_data(
    folder: Path, samples: Sequence[Sample], numbers: Sequence[int], counted: Sequence[int], states: OfflineStates,
    vocabulary: tuple[int, int],
) -> None:  # fmt: skip
    """Write `samples.jsonl` of the samples with these numbers, `data/hidden_states` and a vocabulary.

    `vocabulary`: how many of the target's tokens are kept, the most frequent ones of the samples `counted`.
    """
    kept, size = vocabulary
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
            mask = sample.loss_mask.tolist()
            row = {"input_ids": sample.tokens.tolist(), "loss_mask": mask, "seq_len": len(sample)}
            file.write(json.dumps(row) + "\n")
    ids = choose_vocabulary(token_counts(samples, counted, size), kept).numpy()
    np.save(folder / "d2t.npy", ids - np.arange(len(ids)))
    np.save(folder / "t2d.npy", np.isin(np.arange(size), ids))


def decoder_config(target: PretrainedConfig, layer_types: Sequence[str], **others: object) -> dict[str, object]:
    """The configuration of a block drafter's layers, which are like the target's but for `others`."""
    copied = (
        "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
        "rms_norm_eps", "max_position_embeddings", "rope_parameters",
    )  # fmt: skip
    return {name: getattr(target, name) for name in copied} | {
        "model_type": "qwen3",
        "num_hidden_layers": len(layer_types),
        "layer_types": list(layer_types),
        "tie_word_embeddings": False,
        **others,
    }


def run_speculators(
    python: str, data: Path, layers: Sequence[int], arguments: Mapping[str, object], result: Path,
    *, threads: int, device: str,
) -> None:  # fmt: skip
    """Run `speculators train` on what `write_data` wrote to `data`. An argument of None is a switch."""
    words = chain.from_iterable([f"--{k}"] if v is None else [f"--{k}", str(v)] for k, v in arguments.items())
    job = {
        "samples": str(data / "samples.jsonl"),
        "data": str(data / "data"),
        "arguments": [*words, "--target-layer-ids", *map(str, layers)],
        "threads": threads,
        "device": device,
    }
    run_worker(python, "scripts.bench._speculators_train", job, result)


def run_worker(python: str, worker: str, job: Mapping[str, object], result: Path) -> None:
    """Run the module `worker` of these scripts, which writes the result; what it says goes to a file beside that."""
    with result.with_suffix(".log").open("w") as log:
        text = json.dumps({**job, "result": str(result)})
        subprocess.run([python, "-m", worker], input=text, text=True, stdout=log, stderr=log, check=True)
