"""Compare the hidden states that vLLM and transformers give for a target, as draftkit stores them.

python -m scripts.check.vllm_states --vllm-python ENV/bin/python [--target zoo:target] [--dtype bfloat16] [--int4]
    [--tiny qwen3_next nemotron_h deepseek_v2] [--seeing qwen2_5_vl qwen3_vl]

Both engines write shards of the same samples. For each stored state are printed: its root mean square, the largest
difference between the engines, and relative differences (norm of the difference, of the states'): of vLLM to
transformers, and of each to transformers in float32. Exits with 1 when the engines differ by more than twice what the
rounding of the dtype makes of transformers' own states. `--tiny`: random targets of `parts/vllm_targets.py` instead;
`--seeing`: random ones that read images, with samples that have one, for which vLLM's environment needs torchvision.
`--int4`: vLLM runs the target with projections in 4 bits (compressed-tensors), transformers the same values as floats.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
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
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
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
from scripts.check.parts.vllm_targets import TARGETS, TinyTarget, prompts, save_tiny_target

FEW = 4  # layers, of which all states are compared
ROUNDING = 3e-5  # of float32, which sums in another order
GROUP = 32  # numbers of a row that share a scale in 4 bits
PROJECTION = re.compile(r".*\.(q|k|v|o|gate|up|down)_proj\.weight")


@dataclass(frozen=True)
class Compared:
    """A target with its samples. `served`: the folder that vLLM runs, `folder` that of transformers; `plain_ops`: vLLM
    without its own operations; `data`: the file of the samples, where they lie in one with their images."""

    name: str
    folder: Path
    served: Path
    samples: list[Sample]
    plain_ops: bool = False
    data: Path | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", required=True, help="the Python of an environment with vLLM")
    parser.add_argument("--target", default="zoo:target")
    parser.add_argument("--tiny", nargs="+", choices=sorted({tiny.kind for tiny in TARGETS}), default=[])
    parser.add_argument("--seeing", nargs="+", choices=sorted(VISUAL), default=[])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--int4", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    fine = True
    with tempfile.TemporaryDirectory() as scratch:
        for kind in options.tiny:
            tiny = next(tiny for tiny in TARGETS if tiny.kind == kind)
            fine &= compare(tiny_target(tiny, Path(scratch, kind)), options, Path(scratch, f"{kind} states"))
        for kind in options.seeing:
            fine &= compare(seeing_target(kind, Path(scratch, kind)), options, Path(scratch, f"{kind} states"))
        if not options.tiny and not options.seeing:
            fine = compare(named_target(options, Path(scratch)), options, Path(scratch, "states"))
    sys.exit(0 if fine else 1)


def named_target(options: argparse.Namespace, scratch: Path) -> Compared:
    folder = locate(options.target).path
    tokenizer = load_tokenizer(folder, "target")
    encoded = [encode_prompt(prompt, tokenizer) for prompt in load_prompts("zoo", options.samples)]
    samples = [Sample.of(str(i), prompt, [(1, len(prompt))]) for i, prompt in enumerate(encoded)]
    if not options.int4:
        return Compared(options.target, folder, folder, samples)
    return Compared(f"{options.target} in 4 bits", *in_four_bits(folder, scratch), samples)


def tiny_target(tiny: TinyTarget, folder: Path) -> Compared:
    save_tiny_target(tiny, folder)
    samples = [Sample.of(request.id, request.prompt, [(1, len(request.prompt))]) for request in prompts(1)]
    return Compared(tiny.title, folder, folder, samples, tiny.plain_ops)


def seeing_target(kind: str, folder: Path) -> Compared:
    target = save_visual_target(folder / "target", kind)
    data = write_image_samples(target, folder / "samples.jsonl")
    return Compared(f"{kind} with images", target, target, list(open_samples(data)), data=data)


def in_four_bits(folder: Path, scratch: Path) -> tuple[Path, Path]:
    """The target with rounded projections: as floats, and packed for vLLM as compressed-tensors does."""
    dense, packed = scratch / "dense", scratch / "packed"
    for out in (dense, packed):
        shutil.copytree(folder, out)
    floats = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    stored = dict(floats)
    for name in filter(PROJECTION.fullmatch, floats):
        groups = floats[name].unflatten(1, (-1, GROUP))
        scales = (groups.abs().amax(2) / 7).bfloat16().float()
        numbers = (groups / scales[..., None]).round().clamp(-8, 7)
        floats[name] = (numbers * scales[..., None]).flatten(1)
        nibbles = (numbers.flatten(1).to(torch.int64) + 8).unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)
        words = nibbles.sum(2)
        base = name.removesuffix("weight")
        del stored[name]
        stored |= {
            f"{base}weight_packed": torch.where(words < 2**31, words, words - 2**32).to(torch.int32),
            f"{base}weight_scale": scales,
            f"{base}weight_shape": torch.tensor(floats[name].shape),
        }
    config = json.loads((folder / "config.json").read_text())
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    save_file(floats, dense / "model.safetensors", {"format": "pt"})
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    (packed / "config.json").write_text(json.dumps(config))
    return dense, packed


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
        theirs = states("vllm", compared.served, options.dtype, options.vllm_python)
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
    print(f"{compared.name}, {options.dtype}, {len(samples)} samples, {len(exact)} tokens")
    Console(width=120).print(table)
    return fine


def relative(states: Tensor, others: Tensor) -> float:
    """The norm of the difference, of that of `states`."""
    return float((states - others).norm() / states.norm())


if __name__ == "__main__":
    main()
