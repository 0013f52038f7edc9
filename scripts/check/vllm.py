"""Does a converted draft mean the same to vLLM as to draftkit? Same prompts through both, drafts compared step by step.

`python -m scripts.check.vllm --vllm-python ENV/bin/python [--prompts 16] [--k 4] [--only NAME] [--drafts FOLDER]`

Each draft of the zoo, and variants that set one fact differently, are converted and given to both engines with the
embedded target, greedily in float32 on the CPU; so are n-grams. Output tokens, every proposal, the number of drafts and
the accepted tokens at each position must be equal, and one request at least must have 25 rounds. vLLM must refuse a
draft that it cannot express. Exits with 1 when anything differs.

Then come tiny random targets of today's architectures (`parts/vllm_targets.py`) with n-grams, drafts trained on their
answers, their own heads (put back and taken out) and Gemma-4's assistants. Targets that read images need Pillow and
torchvision in vLLM's environment. V2 in a name is vLLM's V2 runner; `parts/vllm_on_cpu.py` says what is repaired.

`--drafts`: the folder of `scripts.zoo.speculators_blocks`, with those of its drafts that are not embedded.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from fixtures.checkpoints.processors import save_visual_target
from fixtures.training.image_samples import write_image_samples
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from draftkit import zoo
from draftkit.convert.api import convert_checkpoint, put_heads_back
from draftkit.data.sample_files import open_samples
from draftkit.data.sample_media import SampleMedia
from draftkit.engines.vllm.accepts import refusal_by_vllm
from draftkit.engines.vllm.images import image_prompt
from draftkit.engines.vllm.serve import speculative_config
from draftkit.engines.vllm.worker import PromptTokens
from draftkit.evaluate.prompts import encode_prompt, load_prompts
from draftkit.hub.locate import locate
from draftkit.layout.folder import Draft, read_draft
from draftkit.loading import load_drafter, load_model, open_draft, open_target
from draftkit.requests import Like, Request
from draftkit.results.statistics import accepted_per_position
from draftkit.runtime.attention import NAME as ATTENTION
from draftkit.runtime.drafters.protocol import Committed, Drafter, Draw, Proposal
from draftkit.runtime.engine import Engine
from draftkit.runtime.records import Generation
from draftkit.targets.media import of_length
from draftkit.targets.target import Target, load_target
from scripts._bench import arguments, show
from scripts.check.parts.vllm_targets import (
    ASSISTANT,
    NGRAM,
    ORDERED_ASSISTANT,
    OWN_HEAD,
    TARGETS,
    TinyTarget,
    prompts,
    save_assistant,
    save_tiny_target,
    train,
    train_on,
)

Edit = Callable[[dict[str, object], dict[str, Tensor]], None]
IN_A_ROW = 25  # steps of one request that are compared at least
COLUMNS = ("draft", "drafts", "accepted at 1…K", "acceptance length", "vLLM: outputs", "proposals", "counts")


@dataclass(frozen=True)
class Case:
    """A draft of the zoo or of `--drafts`, facts that are set, and the layout that vLLM gets, or its files as they are.

    `edit` changes config and tensors of the draft in the layout `edited`, before it is converted. `k`: drafts a round
    instead of `--k`. `v2`: in vLLM's V2 runner.
    """

    name: str
    source: str
    to: str = "unified"
    overrides: dict[str, str] = field(default_factory=dict)
    edit: Edit | None = None
    edited: str = "speculators"
    k: int | None = None
    v2: bool = False


def flag(name: str) -> Edit:
    def edit(config: dict[str, object], tensors: dict[str, Tensor]) -> None:
        assert config[name] is False
        config[name] = True

    return edit


def fusion_bias(config: dict[str, object], tensors: dict[str, Tensor]) -> None:
    """A bias of EAGLE-1's fc, small beside its output."""
    config["bias"] = True
    fc = tensors["fc.weight"]
    tensors["fc.bias"] = (0.1 * torch.randn(len(fc), generator=torch.Generator().manual_seed(1))).to(fc.dtype)


def norm_before_fc(config: dict[str, object], tensors: dict[str, Tensor]) -> None:
    """One norm over all captured states."""
    config["norm_before_fc"] = True
    tensors["input_norm.weight"] = _norm_weight(tensors["fc.weight"].shape[1])


def fc_norm(config: dict[str, object], tensors: dict[str, Tensor]) -> None:
    """One norm for each captured state."""
    config["fc_norm"] = True
    hidden, width = tensors["fc.weight"].shape
    for index, weight in enumerate(_norm_weight(width).split(hidden)):
        tensors[f"fc_norm.{index}.weight"] = weight.clone()


def _norm_weight(size: int) -> Tensor:
    return (1 + 0.2 * torch.randn(size, generator=torch.Generator().manual_seed(1))).to(torch.float16)


def full_vocabulary(config: dict[str, object], tensors: dict[str, Tensor]) -> None:
    """The head's rows at the target's ids; tokens that the draft lacked get a logit of zero."""
    offsets, kept, head = tensors.pop("d2t"), tensors.pop("t2d"), tensors["lm_head.weight"]
    config["draft_vocab_size"] = len(kept)
    tensors["lm_head.weight"] = head.new_zeros(len(kept), head.shape[1])
    tensors["lm_head.weight"][torch.arange(len(offsets)) + offsets] = head


AS_IT_IS = "as it is"
# Of a target of 10 layers: the embedding's output, and what the final norm reads.
ENDS = {"aux_layer_ids": "0,5,10", "last_state": "before_norm"}
WINDOW, SHORT = {"sliding_window": "24"}, {"max_position_embeddings": "200"}
BOTH_SIDES, FULL_SECOND = {"sliding_window": "3", "causal_layers": "[]"}, {"full_attention_layers": "1"}


def no_markov_head(config: dict[str, object], tensors: dict[str, Tensor]) -> None:
    """The draft without Markov head and confidence head, like DeepSpec's baseline."""
    config |= {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}
    for name in [name for name in tensors if name.startswith(("markov_head.", "confidence_head."))]:
        del tensors[name]


EDITS: dict[str, Edit] = {  # of EAGLE-3 and P-EAGLE
    "whole vocabulary": full_vocabulary,
    "norm before residual": flag("norm_before_residual"),
    "norm before fc": norm_before_fc,
    "fc norms": fc_norm,
    "normed feedback": flag("norm_output"),
}
CASES = (
    Case("EAGLE-1", "eagle"),
    Case("EAGLE-1 with fc.bias", "eagle", edit=fusion_bias, edited="eagle"),
    Case("EAGLE-1 with fc.bias, folded", "eagle", edit=fusion_bias, edited="eagle", to="vllm"),
    Case("EAGLE-1, rope base 10000", "eagle", overrides={"rope_theta": "10000"}),
    Case("EAGLE-3", "eagle3"),
    *(Case(f"EAGLE-3, {name}", "eagle3", edit=edit) for name, edit in EDITS.items()),
    Case("EAGLE-3, rope base 500000", "eagle3", overrides={"rope_theta": "500000"}),
    Case("EAGLE-3, other layers", "eagle3", overrides={"aux_layer_ids": "1,4,6"}),
    Case("EAGLE-3, 200 positions", "eagle3", overrides=SHORT),
    Case("EAGLE-3, a window", "eagle3", overrides=WINDOW),
    Case("EAGLE-3, V2, a window", "eagle3", overrides=WINDOW, v2=True),
    Case("EAGLE-3, speculators layout", "eagle3", to="speculators"),
    Case("EAGLE-3, SafeAILab layout", "eagle3", to="eagle"),
    Case("P-EAGLE", "p-eagle"),
    *(Case(f"P-EAGLE, {name}", "p-eagle", edit=edit) for name, edit in EDITS.items()),
    Case("P-EAGLE, 200 positions", "p-eagle", overrides=SHORT),
    Case("P-EAGLE, a window", "p-eagle", overrides=WINDOW),
    Case("P-EAGLE, speculators layout", "p-eagle", to="speculators"),
    Case("PARD", "pard"),
    Case("PARD, a window", "pard", overrides=WINDOW),
    Case("MLP speculator", "mlp-speculator"),
    Case("standalone", "draft-model"),
    Case("standalone, a window", "draft-model", overrides=WINDOW),
    Case("DFlash, V1", "dflash"),
    Case("DFlash, V1, 200 positions", "dflash", overrides=SHORT),
    Case("DFlash, V1, 12 of 7", "dflash", k=12),
    Case("DFlash, V2", "dflash", k=7, v2=True),
    Case("DFlash, V2, 4 of 7", "dflash", k=4, v2=True),
    Case("DFlash, V2, 12 of 7", "dflash", k=12, v2=True),
    Case("DFlash, V2, speculators layout", "dflash", to="speculators", k=7, v2=True),
    Case("DFlash, V2, first and last states", "dflash", overrides=ENDS, k=7, v2=True),
    Case("DFlash, V2, causal", "dflash", overrides={"causal_layers": "0,1"}, k=7, v2=True),
    Case("DFlash, V2, a sliding layer", "dflash-sliding", k=7, v2=True),
    Case("DFlash, V1, windows to both sides", "dflash", overrides=BOTH_SIDES, k=7),
    Case("DFlash, V2, a window to both sides", "dflash", overrides=BOTH_SIDES | FULL_SECOND, k=7, v2=True),
    Case("DSpark, V2", "dspark", k=7, v2=True),
    Case("DSpark, V2, 4 of 7", "dspark", k=4, v2=True),
    Case("DSpark, V2, 12 of 7", "dspark", k=12, v2=True),
    Case("DSpark, V2, as speculators saved it", "dspark", to=AS_IT_IS, k=7, v2=True),
    Case("DSpark, V2, no Markov head", "dspark", edit=no_markov_head, edited="deepspec", k=7, v2=True),
    Case("DSpark, V2, fill-in", "dspark-fill-in", k=7, v2=True),
    Case("DSpark, V2, fill-in, speculators layout", "dspark-fill-in", to="speculators", k=7, v2=True),
    Case("DSpark, V2, reduced vocabulary", "dspark-reduced", k=7, v2=True),
    Case("DFlash2, V2", "dflash2", k=7, v2=True),
    Case("DFlash2, V2, 12 of 7", "dflash2", k=12, v2=True),
    Case("DFlash2, V2, as speculators saved it", "dflash2", to=AS_IT_IS, k=7, v2=True),
)
NGRAMS = ((1, 3), (2, 4))  # sizes looked up
SEEING = ("qwen2_5_vl", "qwen3_vl")  # targets that read images
# Drafts that are trained on their answers about images, for vLLM's V2 runner: V1 gives EAGLE-3 other positions after
# an image. By their recipes.
SEEN_BY = {"EAGLE-3, V2": "eagle3", "DFlash, V2": "dflash"}


def run_draftkit(
    model: PreTrainedModel, drafter: Drafter, requests: list[Request], k: int, like: Like
) -> tuple[list[Generation], list[list[list[int]]]]:
    """The generations, and the proposals of each request."""
    proposals: list[list[list[int]]] = []
    propose = drafter.propose

    def recorded(committed: Committed, count: int, draw: Draw) -> Proposal:
        drafted = propose(committed, count, draw)
        (tokens,) = drafted.tokens.tolist()
        proposals[-1].append(tokens if drafted.lengths is None else tokens[: int(drafted.lengths)])
        return drafted

    drafter.propose = recorded  # type: ignore[method-assign, assignment]
    engine = Engine(Target(model, drafter.aux_layers), drafter, num_speculative_tokens=k, num_slots=1, like=like)
    generations = []
    for request in requests:
        proposals.append([])
        generations += engine.generate([request])
    return generations, proposals


def run_vllm(python: str, job: dict[str, object]) -> dict[str, Any] | None:
    """vLLM's outputs, proposals and counters, or None when it refused the draft."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "vllm.json"
        asked = json.dumps(job | {"result": str(result)})
        command = [python, "-m", "scripts.check.parts.vllm_generate"]
        ran = subprocess.run(command, input=asked, capture_output=True, text=True, check=False)
        if result.is_file():
            return json.loads(result.read_text())
    if "are not supported for now" in ran.stderr:
        return None
    sys.exit(f"vLLM failed:\n{ran.stderr[-3000:]}")


def main() -> None:
    parser = arguments(__doc__, vllm=True)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--drafts", type=Path, help="more drafts; cases of those that are not there are left out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    comparison = Comparison(options)
    for case in CASES:
        if options.only in case.name and (draft := source_of(case, options.drafts)) is not None:
            comparison.add_case(case, draft)
    for sizes in NGRAMS:
        if options.only in (name := f"n-gram, {sizes[0]}–{sizes[1]} tokens"):
            comparison.add_draft(name, f"ngram:{sizes[0]}-{sizes[1]}")
    for tiny in TARGETS:
        if drafts := [draft for draft in tiny.drafts if options.only in f"{tiny.title}, {draft}"]:
            add_tiny(comparison, tiny, drafts)
    for kind in SEEING:
        if cases := {name: case for name, case in SEEN_BY.items() if options.only in f"{kind} with images, {name}"}:
            add_seeing(comparison, kind, cases)
    show("", COLUMNS, comparison.rows)
    sys.exit(1 if comparison.differences else 0)


@dataclass(frozen=True)
class Pair:
    """A target and its requests. `job`: what else vLLM is told; `prompts`: what it is asked if that is not tokens."""

    source: str
    folder: Path
    model: PreTrainedModel
    requests: list[Request]
    job: dict[str, object] = field(default_factory=dict)
    prompts: list[PromptTokens] = field(default_factory=list)


def zoo_pair(count: int, max_new_tokens: int) -> Pair:
    model, tokenizer = load_model("zoo:target", device="cpu", dtype=torch.float32)
    encoded = [encode_prompt(prompt, tokenizer) for prompt in load_prompts("zoo", count)]
    requests = [Request(str(i), prompt, max_new_tokens) for i, prompt in enumerate(encoded)]
    return Pair("zoo:target", zoo.path("target"), model, requests)


def add_tiny(comparison: Comparison, tiny: TinyTarget, drafts: list[str]) -> None:
    """The rows of a tiny target with some of its drafts."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "target"
        save_tiny_target(tiny, folder)
        model = load_target(folder, device="cpu", dtype=torch.float32, attention=ATTENTION)
        requests = prompts(comparison.options.max_new_tokens)
        pair = Pair(str(folder), folder, model, requests, {"plain_ops": tiny.plain_ops})
        comparison.pair = pair
        for draft in drafts:
            name = f"{tiny.title}, {draft}"
            if draft == NGRAM:
                comparison.add_draft(name, "ngram:1-3")
                continue
            if draft in (ASSISTANT, ORDERED_ASSISTANT):
                published, unified = (Path(scratch) / f"{draft} {layout}" for layout in ("published", "unified"))
                save_assistant(model, published, ordered=draft == ORDERED_ASSISTANT)
                comparison.add_draft(name, convert_checkpoint(str(published), unified, target=str(folder)))
                continue
            plain = Engine(Target(model), None, num_speculative_tokens=0, num_slots=1).generate(requests)
            texts = [(generation.request.prompt, generation.tokens) for generation in plain]
            trained = train(draft, folder, texts, Path(scratch) / draft)
            if draft == OWN_HEAD:
                add_head_rows(comparison, name, trained, Path(scratch), tiny)
            else:
                comparison.add_draft(name, trained)


def add_seeing(comparison: Comparison, kind: str, cases: Mapping[str, str]) -> None:
    """The rows of a tiny target with prompts that have images, and of drafts trained on its answers to such prompts."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = save_visual_target(Path(scratch) / "target", kind)
        data = write_image_samples(folder, Path(scratch) / "data" / "samples.jsonl", count=24, new=64)
        opened = open_target(str(folder)).with_images()
        media, samples = SampleMedia(data, opened), list(open_samples(data))[: comparison.options.prompts]
        requests, prompts = [], []
        for sample, seen in zip(samples, media(samples).values(), strict=True):
            begin, end = sample.spans[0]
            tokens = sample.tokens[:begin].tolist()
            requests.append(Request(sample.id, tuple(tokens), end - begin, media=of_length(seen, begin)))
            prompts.append(image_prompt(tokens, sample.media, media.images(sample), {}))
        model = opened.load(device="cpu", dtype=torch.float32)
        comparison.pair = Pair(str(folder), folder, model, requests, {"images": 1}, prompts)
        for name, recipe in cases.items():
            trained = train_on(recipe, folder, data, {"layers": [1, 2, 3]}, Path(scratch) / name)
            comparison.add_draft(f"{kind} with images, {name}", trained, v2=True)


def add_head_rows(comparison: Comparison, name: str, trained: Path, scratch: Path, tiny: TinyTarget) -> None:
    """A trained head put back into its target, which drafts with it once and again, and taken out of it."""
    whole, taken, v2 = scratch / "whole", scratch / "taken", tiny.modules > 1
    put_heads_back(str(trained), comparison.pair.source, whole)
    comparison.pair = replace(comparison.pair, source=str(whole), folder=whole)
    for k in tiny.head_drafts:
        comparison.add_own_head(f"{name}, K={k}", k, v2=v2)
    convert_checkpoint(str(whole), taken, format="mtp")
    comparison.add_draft(f"{name}, K={k}, taken out", taken, k, v2=v2)


class Comparison:
    """Both engines on a `pair`'s prompts: a row per draft, and how many `differences` there were."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.pair = zoo_pair(options.prompts, options.max_new_tokens)
        self.rows: list[list[str]] = []
        self.differences = 0

    def add_case(self, case: Case, source: str) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            if case.edit is not None:
                source = edited(source, case.edit, case.edited, Path(scratch) / "source")
            unified, served = Path(scratch) / "unified", Path(scratch) / "served"
            convert_checkpoint(source, unified, target="zoo:target", overrides=case.overrides)
            if case.to == AS_IT_IS:
                served = locate(source).path
            else:
                convert_checkpoint(source, served, to=case.to, target="zoo:target", overrides=case.overrides)
            # The fold for vLLM changes the tensors within their rounding; both engines must run the same ones.
            draft = read_draft(served if case.to in ("unified", "vllm") else unified)
            refusal = refusal_by_vllm(draft.spec) if case.to == "unified" else None
            settings = speculative_config(draft.spec, served, case.k or self.options.k)
            self._add(case.name, draft, settings, refusal, v2=case.v2)

    def add_draft(self, name: str, source: str | Path, k: int | None = None, *, v2: bool = False) -> None:
        """A draft in the unified layout, or n-grams."""
        with open_draft(str(source), self.pair.source) as draft:
            settings = speculative_config(draft.spec, draft.path, k or self.options.k)
            self._add(name, draft, settings, refusal_by_vllm(draft.spec), v2=v2)

    def add_own_head(self, name: str, k: int, *, v2: bool) -> None:
        """The head in the target's own folder."""
        with open_draft("mtp", self.pair.source) as draft:
            self._add(name, draft, {"method": "mtp", "num_speculative_tokens": k}, None, v2=v2)

    def _add(
        self, name: str, draft: Draft, settings: dict[str, object], refusal: str | None, *, v2: bool = False
    ) -> None:
        k = settings["num_speculative_tokens"]
        assert isinstance(k, int)
        drafter = load_drafter(draft, self.pair.model)
        ours, proposals = run_draftkit(self.pair.model, drafter, self.pair.requests, k, "vllm-v2" if v2 else "vllm-v1")
        drafts = sum(r.drafted > 0 for g in ours for r in g.rounds)
        accepted = accepted_per_position(ours, k)
        row = [name, str(drafts), str(accepted), f"{1 + sum(accepted) / sum(len(g.rounds) for g in ours):.4f}"]
        theirs = run_vllm(self.options.vllm_python, self._job(settings, v2=v2))
        if theirs is None:
            self.rows.append([*row, f"refused: {refusal}", "–", "–"])
            self.differences += refusal is None
            return
        same = sum(a.tokens == b for a, b in zip(ours, theirs["tokens"], strict=True))
        # Not strict: vLLM also proposes after the last round of a request, which nothing verifies.
        steps = [list(zip(*pair, strict=False)) for pair in zip(proposals, theirs["proposals"], strict=True)]
        equal, compared = sum(a == b for request in steps for a, b in request), sum(map(len, steps))
        counters = theirs["counters"]
        counts = (counters["num_drafts"], counters["num_accepted_tokens_per_pos"]) == (drafts, accepted)
        longest = max(map(len, steps))
        outputs, drafted = f"{same} of {len(ours)} equal", f"{equal} of {compared} equal, {longest} in a row"
        self.rows.append([*row, outputs, drafted, "equal" if counts else str(counters)])
        complete = compared == sum(map(len, proposals)) and longest >= IN_A_ROW
        self.differences += not (same == len(ours) and equal == compared and complete and counts and refusal is None)

    def _job(self, settings: dict[str, object], *, v2: bool) -> dict[str, object]:
        """What `parts/vllm_generate.py` reads."""
        return self.pair.job | {
            "target": str(self.pair.folder),
            "speculative": settings,
            "prompts": self.pair.prompts
            or [{"tokens": list(request.prompt), "sampling": {}} for request in self.pair.requests],
            "max_new_tokens": self.pair.requests[0].max_new_tokens,
            "eos_token_ids": sorted(Target(self.pair.model).eos_token_ids),
            "v2": v2,
        }


def source_of(case: Case, drafts: Path | None) -> str | None:
    """The draft of a case, in the zoo or else in `drafts`; None where it is in neither."""
    if case.source in zoo.names():
        return f"zoo:{case.source}"
    return str(drafts / case.source) if drafts is not None and (drafts / case.source).is_dir() else None


def edited(draft: str, edit: Edit, layout: str, folder: Path) -> str:
    """The edited copy of a draft in `folder`, in a layout of others."""
    convert_checkpoint(draft, folder, to=layout, target="zoo:target")
    config_path, tensors_path = folder / "config.json", folder / "model.safetensors"
    config, tensors = json.loads(config_path.read_text()), load_file(tensors_path)
    edit(config, tensors)
    config_path.write_text(json.dumps(config))
    save_file(tensors, tensors_path, metadata={"format": "pt"})
    return str(folder)


if __name__ == "__main__":
    main()
