"""What faults in a draft's GGUF file, and quantized weights, cost with llama.cpp: acceptance, and what `inspect` says.

`python -m scripts.study.llama_cpp_faults --llama-server BUILD/bin/llama-server [--prompts 8] [--k 4] [--faults]
[--types] [--only NAME …] [--llama-quantize BUILD/bin/llama-quantize] [--wide]`

`--faults`: each fault is put into the sound file of `zoo:eagle3` (or another draft), with which the zoo's target is
then run, greedily, one request at a time unless the fault is of several. `SLIDING` is a DFlash draft with a window,
made here, that knows the answers to the first prompts by heart; `OTHER` a random one with another tokenizer. `--types`:
the matrices of draft and target in several types, each draft with the target in float32, and each target with the draft
in float32; intervals are by bootstrap over prompts. With llama.cpp's own program, k-quants too: rows that are no
multiple of 256 numbers, as 192 are, it stores in Q5_0 or Q8_0; `--wide` measures a tiny random target all of whose rows
are such, and which is its own draft: all that is lost is lost by rounding. Both are built as
`scripts/check/llama_cpp/` says.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from fixtures.checkpoints.memorized import SIZES, answers, memorized, save
from fixtures.checkpoints.pico import save_llama, save_tokenizer
from rich.console import Console
from rich.table import Table

from draftkit.checks.checkpoint import findings_of_reading
from draftkit.convert.api import Reading, convert_checkpoint, describe_checkpoint
from draftkit.engines.llama_cpp.process import EXACT, llama_server
from draftkit.engines.records import DraftCounts
from draftkit.engines.servers.kinds.llama_cpp import LlamaCppServer
from draftkit.engines.servers.server import server_of
from draftkit.errors import DraftkitError
from draftkit.evaluate.prompts import encode_prompt, load_prompts
from draftkit.io.gguf_file import GgufTensor, Typed, read_gguf, read_typed, write_gguf
from draftkit.io.handles import TensorHandle, memory_handle
from draftkit.loading import open_target
from draftkit.requests import Request
from draftkit.train.recipes.dflash import DFlash, DFlashOptions
from scripts.check.llama_cpp.blocks import save_target
from scripts.check.llama_cpp.heads import requests

Tensors = dict[str, TensorHandle]
Change = Callable[[Tensors], Mapping[str, TensorHandle]]
TYPES = ("f32", "f16", "q8_0", "q4_0")
K_QUANTS = ("q6_k", "q4_k_m")
ZOO = (("zoo:eagle3", "draft-eagle3"), ("zoo:draft-model", "draft-simple"))
RESAMPLES = 2000


@dataclass(frozen=True)
class Fault:
    """What is changed in a sound file: keys (None: left out), tensors, and how the server is told to draft."""

    name: str
    keys: Mapping[str, object] = field(default_factory=dict)
    change: Change = dict
    source: str = "zoo:eagle3"
    kind: str = "draft-eagle3"
    k: int | None = None
    slots: int = 1
    arguments: tuple[str, ...] = ()


def altered(name: str, make: Callable[[np.ndarray], np.ndarray]) -> Change:
    """A change of one tensor's numbers."""
    import torch

    def change(tensors: Tensors) -> Mapping[str, TensorHandle]:
        handle = tensors[name]
        numbers = torch.from_numpy(np.ascontiguousarray(make(handle.load().numpy())))
        return tensors | {name: memory_handle(name, numbers, handle.origin)}

    return change


def together(*changes: Change) -> Change:
    def change(tensors: Tensors) -> Mapping[str, TensorHandle]:
        for one in changes:
            tensors = dict(one(tensors))
        return tensors

    return change


def without(*names: str) -> Change:
    return lambda tensors: {name: handle for name, handle in tensors.items() if name not in names}


def swapped(one: str, other: str) -> Change:
    return lambda tensors: tensors | {
        one: replace(tensors[other], name=one), other: replace(tensors[one], name=other)
    }  # fmt: skip


def halves(matrix: np.ndarray) -> np.ndarray:
    """Columns in the order [hidden ; embedding]."""
    return np.roll(matrix, matrix.shape[1] // 2, axis=1)


def apart(rows: int) -> Callable[[np.ndarray], np.ndarray]:
    """Rows of heads as they are in the layout, not permuted for llama.cpp."""
    return lambda m: m.reshape(-1, rows // 2, 2, m.shape[1]).swapaxes(1, 2).reshape(m.shape)


def added(name: str, size: int) -> Change:
    """A vector of ones under this name, added to a file."""
    import torch

    return lambda tensors: tensors | {name: memory_handle(name, torch.ones(size), next(iter(tensors.values())).origin)}


SLIDING, OTHER = "a draft with a window", "a draft of another vocabulary"
WINDOW = ("sliding_window", "sliding_window_pattern")
IDS = "eagle3.target_layers"
ATTENTION = ("blk.0.attn_q.weight", "blk.0.attn_k.weight", "blk.0.attn_v.weight")
FAULTS = (
    Fault("none"),
    Fault("d2t holds offsets", change=altered("d2t", lambda ids: ids - np.arange(len(ids)))),
    Fault(
        "columns of q, k, v as [hidden ; embedding]", change=together(*(altered(name, halves) for name in ATTENTION))
    ),
    Fault("norm_before_residual wrong", {"eagle3.norm_before_residual": True}),
    Fault("layer ids reversed", {IDS: [7, 5, 2]}),
    Fault("the state after the last layer read", {IDS: [2, 5, 10]}),
    Fault("head and d2t left out", change=without("output.weight", "d2t")),
    Fault("q and k not permuted", change=together(*(altered(name, apart(32)) for name in ATTENTION[:2]))),
    Fault("layer ids one too low", {IDS: [1, 4, 6]}),
    Fault("layer ids one too high", {IDS: [3, 6, 8]}),
    Fault("rope base 500000", {"eagle3.rope.freq_base": 500000.0}),
    Fault("rope base not stated", {"eagle3.rope.freq_base": None}),
    Fault("two norms swapped", change=swapped("blk.0.attn_norm.weight", "blk.0.attn_norm_2.weight")),
    Fault("EAGLE-3 under draft-simple", kind="draft-simple"),
    Fault("target_layers under their old name", {IDS: None, "eagle3.extract_layers": [2, 5, 7]}),
    Fault("dspark: none", source="zoo:dspark", kind="draft-dspark"),
    Fault("dspark: under draft-dflash", source="zoo:dspark", kind="draft-dflash"),
    Fault("dspark: sample_from_anchor wrong", {"dflash.sample_from_anchor": False}, dict, "zoo:dspark", "draft-dspark"),
    Fault("dspark: another mask token", {"tokenizer.ggml.mask_token_id": 5}, dict, "zoo:dspark", "draft-dspark"),
    Fault("dspark: causal", {"dflash.attention.causal": True}, dict, "zoo:dspark", "draft-dspark"),
    Fault("norm_before_fc wrong, of ones", {"eagle3.norm_before_fc": True}, added("enc.output_norm.weight", 576)),
    Fault("none, 4 in parallel", slots=4, arguments=("--no-spec-draft-backend-sampling",)),
    Fault("4 in parallel, sampling in the backend", slots=4),
    Fault("dflash: none", source="zoo:dflash", kind="draft-dflash"),
    Fault("dflash: under draft-simple", source="zoo:dflash", kind="draft-simple"),
    Fault("dflash: under draft-dspark", source="zoo:dflash", kind="draft-dspark"),
    Fault("dflash: K = 7, its block", source="zoo:dflash", kind="draft-dflash", k=7),
    Fault("dflash: K = 12, above its block", source="zoo:dflash", kind="draft-dflash", k=12),
    Fault("sliding: none", source=SLIDING, kind="draft-dflash"),
    Fault("sliding: no window", {f"dflash.attention.{key}": None for key in WINDOW}, dict, SLIDING, "draft-dflash"),
    Fault("sliding: pattern alone", {f"dflash.attention.{WINDOW[0]}": None}, dict, SLIDING, "draft-dflash"),
    Fault("sliding: window alone", {f"dflash.attention.{WINDOW[1]}": None}, dict, SLIDING, "draft-dflash"),
    Fault("a draft of another vocabulary", source=OTHER, kind="draft-simple"),
)


class Measuring:
    """A target as files, what it is asked, and the server."""

    def __init__(self, options: argparse.Namespace, scratch: Path, source: str, asked: Sequence[Request]):
        self.options, self.scratch = options, scratch
        self.source, self.requests = source, asked
        self.target = self.written(source, "f32")

    @classmethod
    def of_zoo(cls, options: argparse.Namespace, scratch: Path) -> Measuring:
        tokenizer = open_target("zoo:target").tokenizer
        prompts = [encode_prompt(prompt, tokenizer) for prompt in load_prompts("zoo", options.prompts)]
        asked = [Request(str(i), prompt, options.max_new_tokens) for i, prompt in enumerate(prompts)]
        return cls(options, scratch, "zoo:target", asked)

    def written(self, source: str, stored: str) -> Path:
        """A file of a model, made once."""
        out = self.scratch / f"{Path(source.removeprefix('zoo:')).name}-{stored}.gguf"
        if out.exists():
            return out
        if stored in K_QUANTS:
            command = (self.options.llama_quantize, self.written(source, "f32"), out, stored, "1")
            subprocess.run(command, check=True, capture_output=True)
            return out
        if source == OTHER:
            draft = save_llama(self.scratch / "other")
            save_tokenizer(draft, ("a", "b"))
            return convert_checkpoint(str(draft), out, to="gguf", target=str(draft), stored=stored)
        if source == SLIDING:
            options = DFlashOptions(**SIZES, sliding_window=8)
            source = save(memorized(DFlash, options, answers()), self.scratch / "sliding")
        return convert_checkpoint(source, out, to="gguf", target=self.source, stored=stored)

    def counts(self, target: Path, draft: Path, fault: Fault) -> tuple[list[DraftCounts], float]:
        """What each request drafted, and the mean length over the verifying steps that had a draft."""
        arguments = ["-m", str(target), "-md", str(draft), "--spec-type", fault.kind, "--spec-draft-n-max"]
        arguments += [str(fault.k or self.options.k), *EXACT, "-t", "1", "-np", str(fault.slots), "-c"]
        arguments += [str(2048 * fault.slots), *fault.arguments]
        with (
            llama_server(self.options.llama_server, arguments, self.scratch / "server.log") as url,
            ThreadPoolExecutor(fault.slots) as pool,
        ):
            server = server_of(LlamaCppServer, url)
            server.require(speculates=True)
            found = [answer.drafts for answer in pool.map(lambda asked: server.complete(asked, None), self.requests)]
            total = server.counters().drafts
        assert total is not None
        return [counts for counts in found if counts is not None], total.acceptance_length

    def fault(self, fault: Fault) -> tuple[str, str]:
        """The mean length with a fault, and what `inspect` names in the file."""
        sound, broken = self.written(fault.source, "f32"), self.scratch / "broken.gguf"
        file = read_gguf(sound)
        tensors = fault.change({handle.name: handle for handle in file.tensors})
        keys: dict[str, object] = dict(read_typed(sound, ""))
        for name, value in fault.keys.items():
            before = keys.pop(name, None)
            if value is not None:
                keys[name] = Typed(value, before.type, before.items) if isinstance(before, Typed) else value
        architecture = keys["general.architecture"]
        assert isinstance(architecture, Typed)
        keys["general.architecture"] = architecture.value
        write_gguf(broken, keys, [GgufTensor(handle, handle.dtype) for handle in tensors.values()])
        try:
            length = f"{self.counts(self.target, broken, fault)[1]:.3f}"
        except DraftkitError as error:
            length = "nothing is drafted" if "speculative" in str(error) else "the server ends"
        return length, self.named(broken)

    def named(self, file: Path) -> str:
        try:
            found = describe_checkpoint(str(file), target="zoo:target")
            assert isinstance(found, Reading)
            if found.plan.refusal is not None:
                return "refused: " + str(found.plan.refusal).split("\n", 1)[0]
            return ", ".join(finding.name for finding in findings_of_reading(found)) or "–"
        except DraftkitError as error:
            return "refused: " + str(error).split("\n", 1)[0]

    def row(self, target: str, source: str, kind: str, stored: str) -> list[str]:
        files = self.written(self.source, target), self.written(source, stored)
        found, length = self.counts(*files, Fault("none", kind=kind))
        low, high = interval(found)
        sizes = [f"{file.stat().st_size / 1e6:.2f}" for file in files]
        return [Path(source).name, stored, sizes[1], target, sizes[0], f"{length:.3f}", f"{low:.2f}–{high:.2f}"]


def wide(options: argparse.Namespace, scratch: Path) -> Measuring:
    """A tiny target whose rows are multiples of 256 numbers."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
    return Measuring(options, scratch, str(save_target("qwen3", scratch / "wide", **sizes)), requests(options.prompts))


def interval(found: Sequence[DraftCounts]) -> tuple[float, float]:
    """95 % of the mean lengths of resampled requests."""
    accepted = np.array([counts.num_accepted_tokens for counts in found])
    steps = np.array([counts.num_drafts for counts in found])
    drawn = np.random.default_rng(0).integers(len(found), size=(RESAMPLES, len(found)))
    low, high = np.quantile(1 + accepted[drawn].sum(1) / steps[drawn].sum(1), (0.025, 0.975))
    return float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-server", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--types", action="store_true")
    parser.add_argument("--wide", action="store_true", help="with --types: of a target with rows of 256 numbers")
    parser.add_argument("--llama-quantize", type=Path, help="with --types: k-quants alone, by this program")
    parser.add_argument("--only", nargs="+", default=[""], help="the faults whose name contains one of these")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        measuring = (Measuring.of_zoo if not options.wide else wide)(options, Path(scratch))
        if options.faults:
            table = Table("fault", "mean length", "inspect")
            for fault in (fault for fault in FAULTS if any(name in fault.name for name in options.only)):
                row = (fault.name, *measuring.fault(fault))
                print(*row, sep=" | ", flush=True)
                table.add_row(*row)
            Console(width=160).print(table)
        if options.types:
            table = Table("draft", "type", "MB", "target", "MB", "mean length", "95 %")
            drafts = ZOO if not options.wide else ((measuring.source, "draft-simple"),)
            for source, kind in drafts:
                types = TYPES if options.llama_quantize is None else ("f32", *K_QUANTS)
                cells = [("f32", stored) for stored in types] + [(stored, "f32") for stored in types[1:]]
                for target, stored in cells:
                    found = measuring.row(target, source, kind, stored)
                    print(*found, sep=" | ", flush=True)
                    table.add_row(*found)
            Console(width=160).print(table)


if __name__ == "__main__":
    main()
