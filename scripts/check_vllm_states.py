"""Compare the hidden states that vLLM and transformers give for a target, as draftkit stores them.

python scripts/check_vllm_states.py --vllm-python ENV/bin/python [--target zoo:target] [--dtype bfloat16]

Both engines write shards of the same samples. For each stored state are printed: its root mean square, the largest
difference between the engines, and relative differences (norm of the difference, of the states'): of vLLM to
transformers, and of each to transformers in float32. Exits with 1 when the engines differ by more than twice what the
rounding of the dtype makes of transformers' own states.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from draftkit.data.samples import Sample, SamplesOrigin, write_samples
from draftkit.data.states.offline import OfflineStates
from draftkit.data.states.write import StatesSettings, open_states_job
from draftkit.evaluate.prompts import encode_prompt, load_prompts
from draftkit.hub.locate import locate
from draftkit.layout.target import read_target_facts
from draftkit.models.chat import load_tokenizer
from draftkit.models.states import FINAL, AuxLayers

ROUNDING = 1e-5  # of float32, which sums in another order


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", required=True, help="the Python of an environment with vLLM")
    parser.add_argument("--target", default="zoo:target")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--samples", type=int, default=16)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        sys.exit(0 if compare(options, Path(scratch)) else 1)


def compare(options: argparse.Namespace, scratch: Path) -> bool:
    """Print the differences; whether they are within the limit."""
    folder = locate(options.target).path
    tokenizer = load_tokenizer(folder, "target")
    prompts = [encode_prompt(prompt, tokenizer) for prompt in load_prompts("zoo", options.samples)]
    samples = [Sample.of(str(i), prompt, [(1, len(prompt))]) for i, prompt in enumerate(prompts)]
    data = scratch / "samples.jsonl"
    write_samples(data, samples, SamplesOrigin(options.target, "prompts"))
    layers = read_target_facts(folder, options.target, None).default_aux_layer_ids()

    def states(name: str, dtype: str, vllm_python: str | None) -> Tensor:
        """[T, S, H] of all samples, written and read again."""
        settings = StatesSettings(target=options.target, vllm_python=vllm_python, dtype=dtype, encoding="float32")
        with open_states_job(data, scratch / name, settings) as job:
            job.write()
        aux_layers = AuxLayers((*layers, FINAL))
        source = OfflineStates(scratch / name, data=data, target=folder, aux_layers=aux_layers, dtype=torch.float32)
        features = source.states_of(range(len(samples)), sum(map(len, samples))).features
        assert features is not None
        return features[0].unflatten(1, (len(aux_layers.states), -1))

    exact = states("exact", "float32", None)
    ours = states("transformers", options.dtype, None)
    theirs = states("vllm", options.dtype, options.vllm_python)
    table = Table(
        "state", "root mean square", "largest difference", "relative", "transformers to float32", "vLLM to float32"
    )
    fine = True
    for column, name in enumerate((*(f"after {layer} layers" for layer in layers), "last")):
        e, o, t = exact[:, column], ours[:, column], theirs[:, column]
        difference, rounding = relative(o, t), relative(e, o)
        fine &= difference <= 2 * rounding + ROUNDING
        table.add_row(
            name,
            f"{e.square().mean().sqrt():.3g}",
            f"{(o - t).abs().max():.2e}",
            f"{difference:.2e}",
            f"{rounding:.2e}",
            f"{relative(e, t):.2e}",
        )
    print(f"{options.target}, {options.dtype}, {len(samples)} samples, {len(exact)} tokens")
    Console(width=120).print(table)
    return fine


def relative(states: Tensor, others: Tensor) -> float:
    """The norm of the difference, of that of `states`."""
    return float((states - others).norm() / states.norm())


if __name__ == "__main__":
    main()
