"""Do quantized drafts mean the same to vLLM as to draftkit? Written by `convert --quantize`, the same prompts in both.

`python -m scripts.check.quantized --vllm-python ENV/bin/python [--prompts 4] [--k 3] [--only FORMAT] [--dtype DTYPE]`

Each format is written of an embedded draft and given to both engines with the embedded target, greedily on the CPU, in
float32 or in `--dtype`, which vLLM's kernel of integers needs to be of 16 bits. Where it has a kernel here, the counts
of accepted tokens must be close: rounding is another. Where it has none, it says so, and the folder is read back by
draftkit alone.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from draftkit import convert_checkpoint, evaluate_draft
from draftkit.convert.quantize import FORMATS
from draftkit.engines.vllm.serve import speculative_config
from draftkit.evaluate.prompts import encode_prompt, load_prompts
from draftkit.hub.locate import locate
from draftkit.layout.folder import read_draft
from draftkit.loading import open_target
from draftkit.results.settings import Settings
from scripts._bench import arguments
from scripts.check.vllm import run_vllm

NEW_TOKENS = 48


def main() -> None:
    parser = arguments(__doc__, vllm=True)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--draft", default="zoo:eagle3")
    parser.add_argument("--only", action="append", choices=FORMATS)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    asked = parser.parse_args()
    settings = Settings(
        num_speculative_tokens=asked.k, max_new_tokens=NEW_TOKENS, limit=asked.prompts, repeats=0, ignore_eos=True,
        dtype=asked.dtype,
    )  # fmt: skip
    target = open_target("zoo:target")
    prompts = [encode_prompt(prompt, target.tokenizer) for prompt in load_prompts("zoo", asked.prompts)]
    with tempfile.TemporaryDirectory() as scratch:
        for name in (None, *(asked.only or FORMATS)):
            out = convert_checkpoint(asked.draft, Path(scratch) / str(name), target="zoo:target", quantize=name)
            (cell,) = evaluate_draft(target, str(out), settings).cells
            job: dict[str, object] = {
                "target": str(locate("zoo:target").path),
                "speculative": speculative_config(read_draft(out).spec, out, asked.k),
                "prompts": [{"tokens": prompt} for prompt in prompts],
                "max_new_tokens": NEW_TOKENS,
                "eos_token_ids": [],
                "dtype": asked.dtype,
            }
            ours = f"draftkit {cell.num_accepted_tokens_per_pos} of {cell.num_drafts}"
            print(f"{name or 'plain'}: {ours}, {by_vllm(asked.vllm_python, job)}", flush=True)


def by_vllm(python: str, job: dict[str, object]) -> str:
    """What vLLM counts, or the last that it says where it does not load the draft."""
    try:
        found = run_vllm(python, job)
    except SystemExit as failed:
        said = [line for line in str(failed.code).splitlines() if "Error" in line]
        return f"vLLM: {said[-1].strip() if said else 'it stopped'}"
    if found is None:
        return "vLLM refuses it"
    return f"vLLM {found['counters']['num_accepted_tokens_per_pos']} of {found['counters']['num_drafts']}"


if __name__ == "__main__":
    main()
