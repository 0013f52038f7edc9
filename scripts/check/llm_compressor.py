"""Does draftkit read what llm-compressor writes? `python -m scripts.check.llm_compressor --python ENV/bin/python`

A tiny Llama is quantized there in each scheme, and converted here. The weights that draftkit computes with must be, bit
for bit, the numbers that compressed-tensors' own quantization makes of the plain ones with the stored scales, in the
arithmetic of the model (bfloat16; NVFP4 in float32), each times its scale in float32. Exits with 1 when any differs.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import quantize
from safetensors.torch import load_file

from draftkit import convert_checkpoint
from draftkit.layout.folder import read_draft
from draftkit.layout.stored_weights import stored_weights
from draftkit.models.weights import load_stored
from scripts._bench import arguments

SCHEMES = ("FP8_DYNAMIC", "W4A16", "NVFP4A16")


def differing(folder: Path, scheme: str) -> tuple[int, int]:
    """How many weights there are, and how many of their numbers differ."""
    draft = read_draft(convert_checkpoint(str(folder / scheme), folder / f"read-{scheme}"))
    plain, read = load_file(folder / f"plain-{scheme}/model.safetensors"), load_stored(draft, "cpu")
    args = preset_name_to_scheme(scheme, ["Linear"]).weights
    weights = stored_weights({n: (h.dtype, h.shape) for n, h in draft.tensors.items()}, draft.spec.quantization)
    count = 0
    for weight in weights.values():
        parts = {part: draft.tensors[name].load() for part, name in weight.parts.items()}
        scale, whole = parts["weight_scale"], parts.get("weight_global_scale")
        original = plain[weight.name] if whole is None else plain[weight.name].float()
        numbers = quantize(original, scale.to(original.dtype), None, args, None, whole).float()
        steps = scale.float() / (1 if whole is None else whole)
        expected = numbers * steps.repeat_interleave(numbers.shape[1] // steps.shape[1], 1)
        count += int(torch.count_nonzero(expected != read[weight.name]))
    return len(weights), count


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--python", required=True)
    asked = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as scratch:
        writer = Path(__file__).with_name("parts") / "llm_compressor_write.py"
        subprocess.run([asked.python, str(writer), scratch, *SCHEMES], check=True, capture_output=True)
        for scheme in SCHEMES:
            weights, count = differing(Path(scratch), scheme)
            print(f"{scheme}: {weights} weights, {count} numbers differ")
            wrong += count + (not weights)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
