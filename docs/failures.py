"""What people have met in public, by symptom: the findings that name its causes, and the threads.

The causes themselves are written from the checks (`generate.failures`), which fails for a name that no check has.
"""

from __future__ import annotations

from dataclasses import dataclass

HOMES = {
    "DeepSpec": "deepseek-ai/DeepSpec",
    "Model-Optimizer": "NVIDIA/Model-Optimizer",
    "SpecForge": "sgl-project/SpecForge",
    "TensorRT-LLM": "NVIDIA/TensorRT-LLM",
    "dflash": "z-lab/dflash",
    "dynamo": "ai-dynamo/dynamo",
    "llama.cpp": "ggml-org/llama.cpp",
    "llm-compressor": "vllm-project/llm-compressor",
    "mlx-lm": "ml-explore/mlx-lm",
    "mlx-vlm": "Blaizzy/mlx-vlm",
    "sglang": "sgl-project/sglang",
    "speculators": "vllm-project/speculators",
    "vllm": "vllm-project/vllm",
    "vllm-ascend": "vllm-project/vllm-ascend",
}


@dataclass(frozen=True)
class Failure:
    """`symptom`: what is seen. `findings`: names that checks give. `threads`: `PROJECT#NUMBER`, each with what it
    reports, if it says a figure. `tried`: what `doctor` measures. `do`: the command that tells."""

    symptom: str
    findings: tuple[str, ...]
    threads: tuple[tuple[str, str], ...]
    do: str
    tried: tuple[str, ...] = ()


FAILURES = (
    Failure(
        "Training looked good, and serving accepts about one token a round",
        (
            "layer-ids-as-outputs",
            "layer-ids-as-states",
            "slots",
            "unstated-residual",
            "norm-output",
            "unused-rope-base",
            "doubtful-rope-base",
            "double-norm",
        ),
        (
            ("speculators#613", ""),
            ("SpecForge#455", ""),
            ("SpecForge#533", ""),
            ("SpecForge#560", ""),
            ("dflash#41", ""),
            ("vllm#49559", ""),
            ("sglang#40144", ""),
            ("sglang#40203", "1.0653 became 1.6310 when the layout was declared"),
        ),
        "draftkit doctor --target T --draft D",
        ("layer-ids", "slots", "norm-before-residual", "feedback", "rope-base", "positions"),
    ),
    Failure(
        "Nothing is accepted at all, without an error",
        (
            "zero-d2t",
            "broken-d2t",
            "unsorted-d2t",
            "random-embedding",
            "no-lm-head",
            "bias-as-attention-bias",
            "lost-fc-bias",
        ),
        (("TensorRT-LLM#18905", "a reference recorded as 1.0097: the dead draft had made its own baseline"),),
        "draftkit inspect D --target T --check",
        ("vocabulary-map", "matched-map", "embedding", "head"),
    ),
    Failure(
        "A target's MTP head accepts nothing after fine-tuning, merging or quantizing",
        (
            "heads-missing",
            "heads-not-promised",
            "head-tensors-missing",
            "head-shapes",
            "heads-not-quantized",
            "heads-quantized-otherwise",
            "heads-not-finite",
            "heads-zero",
            "head-copies",
        ),
        (
            ("mlx-vlm#1931", "NaN in the head: 0 % became 82 %"),
            ("llm-compressor#1843", ""),
            ("vllm-ascend#12886", ""),
        ),
        "draftkit inspect TARGET --check",
        ("swapped-norms", "modules", "hidden-state"),
    ),
    Failure(
        "Acceptance falls as the text gets longer",
        ("short-rope", "short-draft", "narrow-window", "beyond-positions", "beyond-training"),
        (
            ("speculators#684", "an EAGLE-3 draft: 2.295 at 2k tokens, 1.084 at 20k"),
            ("sglang#6783", ""),
            ("speculators#574", "a conversion that dropped rope_scaling"),
        ),
        "draftkit eval --target T --draft D --context 1k,4k,16k",
        ("rope-scaling", "window-rule"),
    ),
    Failure(
        "A block drafter accepts less than published",
        ("shortened-blocks", "lengthened-blocks", "causality-in-vllm", "heads-used-again"),
        (("vllm#41834", "K beside the block size: 1.31 instead of 2.74"), ("vllm#56792", ""), ("sglang#31047", "")),
        "draftkit eval --target T --draft D --k 4,7,8,15",
        ("block-size", "causal-layers", "mask-token"),
    ),
    Failure(
        "Two tools give two numbers for one draft",
        ("double-bos", "first-turn-only", "masked-prompts", "loops", "acceptance-estimated", "other-traffic"),
        (
            ("Model-Optimizer#1211", "one head on GSM8K by two evaluators: 5.19 and 4.08"),
            ("speculators#1095", ""),
            ("dynamo#12918", ""),
            ("vllm#39359", ""),
            ("dflash#133", ""),
        ),
        "draftkit eval --target T --draft D --server http://HOST:PORT",
    ),
    Failure(
        "Fewer tokens since the target was fine-tuned, in another language, or with thinking",
        ("other-target", "other-revision", "other-precision", "other-tokenizer", "other-template"),
        (
            ("dflash#60", "thinking: 9.49 became 2.7"),
            ("dflash#163", "Danish: 6 % are accepted"),
            ("dflash#7", "Chinese: 6.4 became 3.3"),
            ("speculators#269", ""),
            ("sglang#9756", ""),
        ),
        "draftkit eval --target T --draft D --slice language,thinking,tools",
        ("template", "thinking"),
    ),
    Failure(
        "Many tokens are accepted, and it is no faster",
        (
            "latency-disagrees",
            "speed-unexplained",
            "speed-disturbed",
            "no-warm-up",
            "unequal-baseline",
            "mostly-prompts",
        ),
        (
            ("mlx-lm#1132", "a mixture of experts: 35 % slower"),
            ("llama.cpp#27342", "slower from two requests on"),
            ("llama.cpp#27383", "a draft in Q8_0 20.8 % slower, in F16 17.7 % faster, at equal acceptance"),
        ),
        "draftkit eval --target T --draft D --k 1-8 --concurrency 1,8,64 --advise",
    ),
    Failure(
        "llama.cpp accepts less than another engine",
        (
            "gguf-default-taken",
            "gguf-last-state",
            "gguf-mask-is-text",
            "gguf-other-vocabulary",
            "gguf-norm-of-ones",
            "gguf-pattern-without-window",
        ),
        (("llama.cpp#25792", ""), ("llama.cpp#25116", "")),
        "draftkit inspect FILE.gguf --target T",
    ),
    Failure(
        "A draft that was trained on answers of another model, or on cut ones",
        ("tokenizer", "chat-template", "mask", "end-of-turn", "truncation", "beginning"),
        (("DeepSpec#84", "acceptance is best after 4.6 epochs and 5 % lower after 10, while the loss still falls"),),
        "draftkit data check samples.jsonl --target T",
    ),
)
