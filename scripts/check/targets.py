"""Does every architecture of the installed transformers decode through draftkit as through `generate`?

`python -m scripts.check.targets [--out FILE.jsonl] [--only TYPE …] [--again [OUTCOME …]]`

For each type of configuration with a causal or multi-modal LM, a tiny random model (`targets/tiny.py`) is saved, loaded
by draftkit, and decodes six prompts greedily with a draft that is mostly right. It runs one sequence at a time, and
four together with prompts in chunks. Every token must be that of `generate(do_sample=False)`. Beside it stands what
draftkit finds out itself before it runs a target (`runtime/architecture_check.py`). Each type runs in a process of its
own with a time limit. FILE keeps the results, and what it has is not run again. Exits with 1 when any is wrong.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)
from transformers.utils.logging import disable_progress_bar

from draftkit.errors import DraftkitError, TargetError
from draftkit.requests import Request
from draftkit.runtime.architecture_check import Known, decoding_of
from draftkit.runtime.attention import NAME
from draftkit.runtime.cache import SlotCache
from draftkit.runtime.engine import Engine
from draftkit.targets.pretrained import auto_class
from draftkit.targets.rope import Positions
from draftkit.targets.states import AuxLayers
from draftkit.targets.target import Target, load_target, read_supported
from draftkit.targets.tiny import TEXT, draw_weights, tiny_config
from scripts._bench import arguments

K = 3
PROMPTS = ((5, 24), (21, 17), (3, 24), (9, 12), (33, 20), (14, 24))  # tokens, and new ones
SECONDS = 240
TRIES = ((0, 0.2), (1, 0.2), (2, 0.4), (3, 0.1))  # seeds, and how large weights are
CLEAR = 1e-4  # how far apart the logits of the first two tokens must be
SLIDING, FULL = "sliding_attention", "full_attention"
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MROPE = {"rope_parameters": ROPE | {"mrope_section": [16, 24, 24]}}
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 48,
    "long_factor": [1 + i / 4 for i in range(48)], "original_max_position_embeddings": 4096,
}  # fmt: skip
OF_MROPE = (
    "glm4v", "glm_ocr", "paddleocr_vl", "qwen2_vl", "qwen2_5_vl", "qwen2_5_omni", "qwen3_omni_moe", "qwen3_vl",
    "qwen3_vl_moe",
)  # fmt: skip
GEMMA4 = {"num_kv_shared_layers": 15}
# What configurations have in published models and not by default, by their type.
PUBLISHED: dict[str, dict[str, Any]] = {
    **{f"{kind}_text": MROPE for kind in OF_MROPE},
    "bamba": {"attn_layer_indices": [1, 3]},
    "chameleon": {"vocabulary_map": {"<image>": 100, "IMGIMGA": 101}},
    "cohere_compass_text": {
        "layer_types": [SLIDING, FULL] * 20,
        "rope_parameters": dict.fromkeys((SLIDING, FULL), MROPE["rope_parameters"]),
    },
    "dbrx": {"attn_config": {"kv_n_heads": 8, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_ocr2_text": {"num_experts_per_tok": 6, "mlp_layer_types": ["dense", *["sparse"] * 11]},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "diffusion_gemma_text": {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 704},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "ernie4_5_vl_moe_text": {"rope_parameters": ROPE | {"mrope_section": [22, 22, 20]}},
    "gemma3n_text": {"num_kv_shared_layers": 15},
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4,
    "glm4v_moe_text": {"rope_parameters": ROPE | {"mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}},
    "granite4_vision": {"deepstack_layer_map": [], "downsample_rate": "1/2"},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 16},
    "hunyuan_vl_text": {"rope_parameters": ROPE | {"mrope_section": [16, 16, 16, 16]}},
    "lfm2_moe": {"layer_types": ["conv", FULL] * 16},
    "phi4_multimodal": {"rope_parameters": LONG},
    "step3p7_text": {"sliding_window": 512},
}
BUILT_NOT, EQUAL, REFUSED, WRONG, BROKEN, LATE = "not built", "equal", "refused", "wrong", "error", "time limit"


@dataclass(frozen=True)
class Finding:
    """What became of a type. `accepted`: rounds by their accepted drafts. `checked`: what draftkit's own check says."""

    model_type: str
    outcome: str
    why: str = ""
    accepted: dict[str, int] | None = None
    checked: str = ""


def model_types() -> list[str]:
    """Every type of configuration that transformers has a causal LM for, or one of several kinds of input to text."""
    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES})


def published(kind: type[PretrainedConfig]) -> PretrainedConfig:
    """The class's default, with what published models say beside it."""
    parts = {name: published(type(part)) for name, part in vars(kind()).items() if isinstance(part, PretrainedConfig)}
    return kind(**parts | PUBLISHED.get(kind.model_type, {}))


def prompts(config: PretrainedConfig) -> list[Request]:
    generator, room = torch.Generator().manual_seed(0), Positions.of(config).room
    drawn = [torch.randint(TEXT.start, TEXT.stop, (length,), generator=generator).tolist() for length, _ in PROMPTS]
    return [
        Request(str(length), tuple(tokens), min(new, room(length)))
        for tokens, (length, new) in zip(drawn, PROMPTS, strict=True)
    ]


def whole_model(config: PretrainedConfig, seed: int, scale: float) -> PreTrainedModel:
    """A random model of the published class, with the parts that read other kinds of input where it has them."""
    several = type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING
    model: PreTrainedModel = (AutoModelForMultimodalLM if several else AutoModelForCausalLM).from_config(config)
    draw_weights(model, seed, scale)
    return model.eval()


def reference(folder: Path, config: PretrainedConfig) -> tuple[dict[tuple[int, ...], list[int]], float]:
    """What `generate` makes of each prompt, and how clear its closest decision is."""
    model = auto_class(config).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    texts, clear = {}, float("inf")
    for request in prompts(config):
        tokens = torch.tensor([request.prompt])
        out = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            max_new_tokens=request.max_new_tokens,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        first, second = torch.cat(out.logits).float().topk(2).values.unbind(-1)
        clear = min(clear, float((first - second).min()))
        texts[request.prompt] = out.sequences[0, len(request.prompt) :].tolist()
    return texts, clear


def run(model_type: str) -> Finding:
    """One type, in this process, and what draftkit's check says of it."""
    finding = decoded(model_type)
    if finding.outcome not in (EQUAL, WRONG, BROKEN):
        return finding
    begin = time.process_time()
    answer = decoding_of(published(CONFIG_MAPPING[model_type]))
    said = f"{answer.outcome} in {time.process_time() - begin:.1f} s {answer.why}".strip()
    return replace(finding, checked=said, outcome=finding.outcome if answer.outcome != "different" else WRONG)


def decoded(model_type: str) -> Finding:
    finding = Finding(model_type, BUILT_NOT)
    for seed, scale in TRIES:
        with tempfile.TemporaryDirectory(prefix="draftkit-sweep-") as scratch:
            folder = Path(scratch)
            try:
                whole = published(CONFIG_MAPPING[model_type])
                whole.save_pretrained(folder)
                if (refusal := _refusal(folder)) is not None:
                    return Finding(model_type, REFUSED, refusal)
                config = tiny_config(whole)
                config.save_pretrained(folder)
                whole_model(config, seed, scale).save_pretrained(folder)
                texts, clear = reference(folder, AutoConfig.from_pretrained(folder))
            except Exception as error:
                return Finding(model_type, BUILT_NOT, _line(error))
            distinct = min(len(set(text)) / len(text) for text in texts.values())
            if clear < CLEAR or distinct < 1 / 3:
                finding = Finding(model_type, BUILT_NOT, f"no clear text: margin {clear:.1e}, distinct {distinct:.2f}")
                if (seed, scale) != TRIES[-1] or clear < CLEAR:
                    continue
            return _compared(model_type, folder, texts)
    return finding


def _refusal(folder: Path) -> str | None:
    """What draftkit has against a configuration alone; its other errors come out later."""
    try:
        read_supported(folder)
    except DraftkitError as error:
        return _line(error)
    except Exception:
        return None
    return None


def _compared(model_type: str, folder: Path, texts: dict[tuple[int, ...], list[int]]) -> Finding:
    accepted: Counter[str] = Counter()
    note = ""
    try:
        model = load_target(folder, device="cpu", dtype=torch.float32, attention=NAME)
        for slots, chunk in ((1, 2048), (4, 6)):
            drafter: Any = Known([(*prompt, *text) for prompt, text in texts.items()], AuxLayers((1,)))
            if note := _untold(model, drafter.aux_layers):
                drafter.aux_layers = None
            target = Target(model, drafter.aux_layers)
            engine = Engine(target, drafter, num_speculative_tokens=K, num_slots=slots, prefill_chunk=chunk)
            generations = engine.generate(prompts(model.config))
            accepted.update(str(r.accepted) for g in generations for r in g.rounds)
            for generation, tokens in zip(generations, texts.values(), strict=True):
                if generation.tokens != tokens:
                    where = f"{slots} together, prompt of {len(generation.request.prompt)}"
                    return Finding(model_type, WRONG, f"{where}: {generation.tokens} instead of {tokens}")
    except DraftkitError as error:
        return Finding(model_type, REFUSED, _line(error))
    except Exception as error:
        return Finding(model_type, BROKEN, _line(error) + " | " + traceback.format_exc()[-600:])
    return Finding(model_type, EQUAL, note, dict(sorted(accepted.items())))


def _untold(model: PreTrainedModel, aux_layers: AuxLayers | None) -> str:
    """What keeps drafts from reading the states of a model's layers, if anything does."""
    target, tokens = Target(model, aux_layers), torch.tensor([[TEXT.start]])
    rows = SlotCache(1, 1).rows(torch.tensor([0]), torch.tensor([[0]]), 1, prompt=True)
    try:
        target.forward(tokens, torch.tensor([[0]]), rows)
    except TargetError as error:
        return f"without hidden states: {_line(error)}"
    return ""


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".split("\n", 1)[0][:300]


def _worker(model_type: str, connection: object) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    disable_progress_bar()
    connection.send(run(model_type))  # type: ignore[attr-defined]


def sweep(types: list[str], out: Path) -> None:
    context = multiprocessing.get_context("fork")  # imports take longer than most types
    for number, model_type in enumerate(types, 1):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_worker, args=(model_type, theirs))
        process.start()
        theirs.close()
        try:
            finding = ours.recv() if ours.poll(SECONDS) else Finding(model_type, LATE, f"{SECONDS} s")
        except EOFError:
            process.join()
            finding = Finding(model_type, BROKEN, f"the process ended with {process.exitcode}")
        process.kill()
        process.join()
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(finding)) + "\n")
        said = f"{finding.why[:150]} {finding.checked}"
        print(f"{number}/{len(types)} {model_type}: {finding.outcome} {said}", flush=True)


def read(out: Path) -> dict[str, Finding]:
    """The last finding of each type."""
    lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    return {finding.model_type: finding for finding in (Finding(**json.loads(line)) for line in lines)}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--out", type=Path, default=Path("targets.jsonl"), help="where results are kept")
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--again", nargs="*", help="run these outcomes once more, or all")
    options = parser.parse_args()
    known = read(options.out)
    types = options.only or model_types()
    if options.only is None:
        again = () if options.again is None else options.again or [f.outcome for f in known.values()]
        types = [t for t in types if t not in known or known[t].outcome in again]
    sweep(types, options.out)
    outcomes = Counter(finding.outcome for finding in read(options.out).values())
    print(dict(outcomes))
    sys.exit(1 if outcomes[WRONG] or outcomes[BROKEN] else 0)


if __name__ == "__main__":
    main()
