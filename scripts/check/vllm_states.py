"""Compare the hidden states that vLLM and transformers give for a target, as draftkit stores them.

`python -m scripts.check.vllm_states --vllm-python ENV/bin/python [--target zoo:target] [--dtype bfloat16]
[--tiny qwen3_next nemotron_h deepseek_v2] [--seeing qwen2_5_vl qwen3_vl]`

Both engines write shards of the same samples. For each state are printed its root mean square, the largest difference
between the engines, and relative differences: of vLLM to transformers, and of each to transformers in float32. Exits
with 1 if the engines differ by more than twice what rounding to the dtype makes of transformers' own states. `--tiny`:
random targets of `parts/vllm_targets.py`. `--seeing`: random ones that read images, for which vLLM's environment needs
torchvision.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from fixtures.checkpoints.processors import save_visual_target
from fixtures.checkpoints.visual import VISUAL
from fixtures.training.image_samples import write_image_samples
from torch import Tensor

from draftkit.data.sample_files import open_samples, write_samples
from draftkit.data.samples import Sample, SamplesOrigin
from draftkit.data.states import vllm as extraction
from draftkit.data.states.offline import OfflineStates
from draftkit.data.states.vllm import extracting_arguments
from draftkit.data.states.write import StatesSettings, open_states_job
from draftkit.evaluate.prompts import encode_prompt, load_prompts
from draftkit.hub.locate import locate
from draftkit.layout.target import read_target_facts
from draftkit.targets.chat import load_tokenizer
from draftkit.targets.states import FINAL, AuxLayers
from scripts._bench import arguments, show
from scripts.check.parts.vllm_targets import TARGETS, prompts, save_tiny_target

FEW = 4  # layers, of which all states are compared
ROUNDING = 3e-5  # of float32, which sums in another order
COLUMNS = ("state", "root mean square", "largest difference", "relative", "transformers to float32", "vLLM to float32")


@dataclass(frozen=True)
class Compared:
    """A target with its samples.

    `plain_ops`: vLLM without its own operations. `data`: the file of the samples, if they have images.
    """

    name: str
    folder: Path
    samples: list[Sample]
    plain_ops: bool = False
    data: Path | None = None


def main() -> None:
    parser = arguments(__doc__, vllm=True)
    parser.add_argument("--target", default="zoo:target")
    parser.add_argument("--tiny", nargs="+", choices=sorted({tiny.kind for tiny in TARGETS}), default=[])
    parser.add_argument("--seeing", nargs="+", choices=sorted(VISUAL), default=[])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--samples", type=int, default=16)
    options = parser.parse_args()
    torch.set_num_threads(1)
    fine = True
    with tempfile.TemporaryDirectory() as scratch:
        chosen = [tiny_target(kind, Path(scratch, kind)) for kind in options.tiny]
        chosen += [seeing_target(kind, Path(scratch, kind)) for kind in options.seeing]
        for number, compared in enumerate(chosen or [named_target(options.target, options.samples)]):
            fine &= compare(compared, options, Path(scratch, f"states {number}"))
    sys.exit(0 if fine else 1)


def named_target(name: str, count: int) -> Compared:
    folder = locate(name).path
    tokenizer = load_tokenizer(folder, "target")
    encoded = [encode_prompt(prompt, tokenizer) for prompt in load_prompts("zoo", count)]
    return Compared(name, folder, [Sample.of(str(i), prompt, [(1, len(prompt))]) for i, prompt in enumerate(encoded)])


def tiny_target(kind: str, folder: Path) -> Compared:
    tiny = next(tiny for tiny in TARGETS if tiny.kind == kind)
    save_tiny_target(tiny, folder)
    samples = [Sample.of(request.id, request.prompt, [(1, len(request.prompt))]) for request in prompts(1)]
    return Compared(tiny.title, folder, samples, tiny.plain_ops)


def seeing_target(kind: str, folder: Path) -> Compared:
    target = save_visual_target(folder / "target", kind)
    data = write_image_samples(target, folder / "samples.jsonl")
    return Compared(f"{kind} with images", target, list(open_samples(data)), data=data)


def plain_arguments(*given: Any, **named: Any) -> dict[str, object]:
    return extracting_arguments(*given, **named) | {"compilation_config": {"custom_ops": ["none"]}}


def compare(compared: Compared, options: argparse.Namespace, scratch: Path) -> bool:
    """Print the differences; whether they are within the limit."""
    samples = compared.samples
    scratch.mkdir()
    data = compared.data or scratch / "samples.jsonl"
    if compared.data is None:
        write_samples(data, samples, SamplesOrigin(compared.name, "prompts"))
    facts = read_target_facts(compared.folder, compared.name, None)
    layers = facts.default_aux_layer_ids() if facts.num_hidden_layers > FEW else range(facts.num_hidden_layers)

    def states(name: str, target: Path, dtype: str, vllm_python: str | None) -> Tensor:
        """[T, S, H] of all samples, written and read again."""
        settings = StatesSettings(
            target=str(target), vllm_python=vllm_python, dtype=dtype, encoding="float32", layers=tuple(layers)
        )
        with open_states_job(data, scratch / name, settings) as job:
            job.write()
        aux_layers = AuxLayers((*layers, FINAL))
        source = OfflineStates(scratch / name, data=data, target=target, aux_layers=aux_layers, dtype=torch.float32)
        features = source.states_of(range(len(samples)), sum(map(len, samples))).features
        assert features is not None
        return features[0].unflatten(1, (len(aux_layers.states), -1))

    exact = states("exact", compared.folder, "float32", None)
    ours = states("transformers", compared.folder, options.dtype, None)
    with patch.object(extraction, "extracting_arguments", plain_arguments) if compared.plain_ops else nullcontext():
        theirs = states("vllm", compared.folder, options.dtype, options.vllm_python)
    rows, fine = [], True
    for column, name in enumerate((*(f"after {layer} layers" for layer in layers), "last")):
        e, o, t = exact[:, column], ours[:, column], theirs[:, column]
        difference, rounding = relative(o, t), relative(e, o)
        sizes = [f"{e.square().mean().sqrt():.3g}", f"{(o - t).abs().max():.2e}"]
        rows.append([name, *sizes, *(f"{share:.2e}" for share in (difference, rounding, relative(e, t)))])
        fine &= difference <= 2 * rounding + ROUNDING
    show(f"{compared.name}, {options.dtype}, {len(samples)} samples, {len(exact)} tokens", COLUMNS, rows)
    return fine


def relative(states: Tensor, others: Tensor) -> float:
    """The norm of the difference, of that of `states`."""
    return float((states - others).norm() / states.norm())


if __name__ == "__main__":
    main()
