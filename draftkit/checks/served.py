"""What engines do with a draft that ends before its target, and with a quantized one, by the tables of their releases.

vLLM has two model runners, which differ in this: the second (V2), which it takes by itself where Triton is, and the
first (V1). A finding names the runner whose rule it tells, and the releases of which is spoken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from draftkit.checks.evidence import FAR
from draftkit.checks.registry import check
from draftkit.engines.known import asked
from draftkit.engines.releases import Release
from draftkit.engines.sglang import ENGINE as SGLANG
from draftkit.engines.vllm.accepts import method_of, runner_of, verdicts
from draftkit.finding import Finding
from draftkit.io.records import excerpt
from draftkit.layout.architecture import Architecture
from draftkit.layout.positions import ropes_of
from draftkit.layout.provenance import FactOrigin, trained_tokens
from draftkit.layout.quantization import algorithm_of
from draftkit.layout.spec import DraftSpec
from draftkit.layout.target import TargetFacts, language_model

LENGTH_MATTERS = ("dynamic", "yarn", "longrope")  # the length enters their formula, so raising it changes the draft
REFUSED = "short-drafts-refused"  # the rule of SGLang's releases that tells it
MULTIMODAL = "mrope_section"
FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"} | dict.fromkeys(
    ("gate_proj", "up_proj"), "gate_up_proj"
)


@check
def short_rope(architecture: Architecture, target: TargetFacts) -> Iterator[Finding]:
    """A chain, whose positions engines other than vLLM take from its own config."""
    rope, theirs = architecture.rope, target.max_position_embeddings
    if rope is None or architecture.parallel is not None or theirs is None:
        return
    if rope.max_position_embeddings < theirs and _kind(architecture) not in LENGTH_MATTERS:
        refusing = {str(one): one.rules[REFUSED] for one in asked(SGLANG) if REFUSED in one.rules}
        not_starting = "".join(f"; {one} does not start ({row.when})" for one, row in refusing.items())
        yield Finding(
            "short-rope",
            "note",
            f"max_position_embeddings is {rope.max_position_embeddings}, the target's {theirs}: engines other than "
            f"vLLM stop or degrade there{not_starting}",
            fix=f"--set max_position_embeddings={theirs}",
            source=", ".join(["vllm-project/vllm #48894", *(row.thread for row in refusing.values())]),
        )


@check
def short_draft(spec: DraftSpec, target: TargetFacts) -> Iterator[Finding]:
    """vLLM's first runner, which compares lengths with the draft's config as it was loaded."""
    if (lengths := _lengths(spec.architecture, target)) is None:
        return
    releases = _running(spec, "V1")
    if not releases:
        return
    elsewhere = any(_raised(release, spec) for release in _running(spec, "V2"))
    yield Finding(
        "short-draft",
        "note" if elsewhere else "warning",
        f"the draft ends at {lengths[0]:,} tokens, the target at {lengths[1]:,}: the first model runner (V1) of "
        f"{_numbers(releases)} drafts nothing for longer sequences, nor for those in a batch with one, and counts "
        "their rounds",
        fix=_longer(spec.architecture, lengths[1]),
        source="vLLM gpu_model_runner.py, _input_fits_in_drafter",
    )


@check
def cut_target(spec: DraftSpec, target: TargetFacts) -> Iterator[Finding]:
    """Later releases serve no sequence that is longer than a draft whose positions they cannot stretch."""
    lengths = _lengths(spec.architecture, target)
    cutting = [release for release in _unraised(spec) if _has(release, "target-length-lowered", spec)]
    if lengths is not None and cutting:
        yield Finding(
            "cut-target",
            "warning",
            f"the second model runner (V2) of {_numbers(cutting)} lowers the target's max_model_len from "
            f"{lengths[1]:,} to {lengths[0]:,}, where the draft ends: {_why_not_raised(spec)}",
            cost="longer requests are refused",
            fix=_longer(spec.architecture, lengths[1]),
            source="vLLM config/vllm.py, _limit_max_model_len_to_draft",
        )


@check
def positions_beyond_draft(spec: DraftSpec, target: TargetFacts) -> Iterator[Finding]:
    """Earlier releases give such a draft positions that its table of rotations does not have."""
    lengths = _lengths(spec.architecture, target)
    beyond = [release for release in _unraised(spec) if not _has(release, "target-length-lowered", spec)]
    if lengths is not None and beyond:
        yield Finding(
            "positions-beyond-draft",
            "warning",
            f"the second model runner (V2) of {_numbers(beyond)} drafts on where the draft ends, at {lengths[0]:,} "
            f"tokens of the target's {lengths[1]:,}, with positions that its rotary table does not have",
            fix=_longer(spec.architecture, lengths[1]),
            source="vLLM config/speculative.py, _maybe_override_draft_max_position_embeddings",
        )


@check
def short_training(origins: Mapping[str, FactOrigin], target: TargetFacts) -> Iterator[Finding]:
    """A draft whose training has said how long its samples were, with a target that may be asked much longer text."""
    trained, theirs = trained_tokens(origins.values()), target.max_position_embeddings
    if trained is not None and theirs is not None and theirs > FAR * trained:
        yield Finding(
            "short-training",
            "note",
            f"the draft was trained on samples of up to {trained:,} tokens, and the target takes {theirs:,}",
            cost=f"acceptance may fall where text grows far beyond {trained:,} tokens",
            fix=f"doctor --context {FAR * trained} tells what mends it; or train on longer samples",
            source="vllm-project/speculators #684",
        )


@check
def multimodal_rope(spec: DraftSpec) -> Iterator[Finding]:
    """A rope over three positions of a token, which are equal for text: what vLLM's runners make of it for images."""
    rope = spec.architecture.rope
    if rope is None or MULTIMODAL not in (rope.scaling or {}):
        return
    refusing = [one for one in _running(spec, "V1") if _refuses_multimodal(one, spec)]
    counting = [one for one in _running(spec, "V2") if _has(one, "positions-count-tokens", spec)]
    said = [f"the first model runner (V1) of {_numbers(refusing)} refuses it"] if refusing else []
    if counting:
        said.append(
            f"the second (V2) of {_numbers(counting)} gives it one position for each token, which after an image is "
            "another than in training"
        )
    if said:
        yield Finding(
            "multimodal-rope",
            "note",
            f"the draft's rope has {MULTIMODAL}: {'; '.join(said)}",
            cost="none for text",
            source="vLLM v1/spec_decode/llm_base_proposer.py, v1/worker/gpu/spec_decode",
        )


@check
def positions_after_images(spec: DraftSpec, target: TargetFacts) -> Iterator[Finding]:
    """A draft with plain rope, whose target counts an image's tokens on three axes: vLLM's first runner takes the first
    of these for the draft's positions, its second each token's place in the text."""
    rope, theirs = spec.architecture.rope, language_model(target.config)
    three = any(MULTIMODAL in one for one in ropes_of(theirs))
    if rope is None or not three or MULTIMODAL in (rope.scaling or {}):
        return
    if shifting := [one for one in _running(spec, "V1") if _has(one, "multimodal-positions-by-time", spec)]:
        yield Finding(
            "positions-after-images",
            "note",
            f"after an image the first model runner (V1) of {_numbers(shifting)} gives the draft the target's "
            "positions in time, which are fewer than tokens; trained drafts count tokens, as the second (V2) does",
            cost="none for text",
            source="vLLM v1/spec_decode/llm_base_proposer.py, _set_positions",
        )


@check
def embedded_images(spec: DraftSpec, target: TargetFacts) -> Iterator[Finding]:
    """A draft of a target that reads images: what an engine feeds it in the place of an image's tokens."""
    running = [*asked(SGLANG), *(one.release for one in verdicts(spec) if one.runs)]
    feeding = [one for one in running if _embeds_images(one, spec)]
    if "vision_config" in target.config and feeding:
        yield Finding(
            "embedded-images",
            "note",
            f"{_numbers(feeding)} feeds the draft an image's own embeddings, one position ahead, and draftkit that of "
            "the placeholder, as it trains: after an image there are other keys to draft from",
            cost="none for text",
            source="SGLang srt/models/llama_eagle3.py; vLLM v1/spec_decode/llm_base_proposer.py",
        )


@check
def quantization_unread(spec: DraftSpec, config: Mapping[str, object]) -> Iterator[Finding]:
    """Weights quantized by an algorithm that a release does not read."""
    algorithm = algorithm_of(_stated(spec, config))
    blind = [one.release for one in verdicts(spec) if one.runs and algorithm not in one.release.quantizations]
    if algorithm is not None and blind:
        yield Finding(
            "quantization-unread",
            "warning",
            f"{_numbers(blind)} reads no weights quantized as {excerpt(algorithm)}, but "
            f"{', '.join(blind[0].quantizations)}",
            cost="loading stops",
            source="vLLM model_executor/layers/quantization/modelopt.py",
        )


@check
def exclusions_unread(spec: DraftSpec, config: Mapping[str, object]) -> Iterator[Finding]:
    """ModelOpt's settings in config.json, with the key that its own file has for what is left out."""
    stated = _stated(spec, config)
    blind = [
        one.release for one in verdicts(spec) if one.runs and _has(one.release, "flat-exclusions-called-ignore", spec)
    ]
    if "quant_algo" in stated and stated.get("exclude_modules") and not stated.get("ignore") and blind:
        yield Finding(
            "exclusions-unread",
            "warning",
            f"quantization_config names what is left out as exclude_modules, which {_numbers(blind)} reads only in "
            "hf_quant_config.json",
            cost="it takes every module for quantized: loading stops, or reads the weights wrongly",
            fix="call it ignore in config.json",
            source="vLLM model_executor/layers/quantization/modelopt.py, from_config",
        )


@check
def parts_left_unquantized(spec: DraftSpec, config: Mapping[str, object]) -> Iterator[Finding]:
    """A block drafter whose exclusions name parts that vLLM fuses, and not what it calls the whole."""
    stated = config.get("quantization_config")
    if method_of(spec) != "dflash" or not isinstance(stated, dict) or "modelopt" not in str(stated.get("quant_method")):
        return
    excluded = [str(name) for name in stated.get("ignore") or stated.get("exclude_modules") or ()]
    parts = {name.rpartition(".")[2].lstrip("*") for name in excluded}
    fused = {whole for part, whole in FUSED.items() if part in parts} - parts
    blind = [
        one.release
        for one in verdicts(spec)
        if one.runs and not _has(one.release, "exclusions-by-checkpoint-name", spec)
    ]
    if fused and blind:
        yield Finding(
            "parts-left-unquantized",
            "warning",
            f"quantization leaves out {', '.join(sorted(parts & FUSED.keys()))}, which {_numbers(blind)} loads as "
            f"{' and '.join(sorted(fused))} and takes for quantized",
            cost="loading stops, or reads the weights wrongly",
            fix=f"add {', '.join(f'*{name}' for name in sorted(fused))} to the modules that are left out",
            source="vLLM model_executor/models/utils.py, map_draft_quant_config",
        )


def _lengths(architecture: Architecture, target: TargetFacts) -> tuple[int, int] | None:
    """The tokens at which a draft ends and those at which its target does; None where that is not earlier."""
    own, theirs = architecture.max_positions, target.max_position_embeddings
    return None if own is None or theirs is None or own.tokens >= theirs else (own.tokens, theirs)


def _running(spec: DraftSpec, runner: str) -> list[Release]:
    """The releases of vLLM of which is spoken that run a draft in one of its runners."""
    running = [one.release for one in verdicts(spec) if one.runs]
    bound = {release.number: runner_of(release, spec, "unified") for release in running}
    return [release for release in running if (only := bound[release.number]) is None or only[0] == runner]


def _unraised(spec: DraftSpec) -> list[Release]:
    """Those of the releases that run a draft in the second runner, and do not give it the target's positions."""
    return [release for release in _running(spec, "V2") if not _raised(release, spec)]


def _raised(release: Release, spec: DraftSpec) -> bool:
    """Whether a release gives a draft that ends early the target's positions."""
    ropes = release.raised_ropes
    return _has(release, "draft-length-raised", spec) and (ropes is None or _kind(spec.architecture) in ropes)


def _has(release: Release, rule: str, spec: DraftSpec) -> bool:
    row = release.rules[rule]
    return row.there and (row.methods is None or method_of(spec) in row.methods)


def _embeds_images(release: Release, spec: DraftSpec) -> bool:
    row = release.rules.get("images-embedded-for-drafts")
    return row is not None and method_of(spec) in [name.lower() for name in row.methods or ()]


def _stated(spec: DraftSpec, config: Mapping[str, object]) -> Mapping[str, object]:
    """What a draft says of its quantized weights; nothing where they are plain."""
    stated = spec.quantization or config.get("quantization_config")
    return stated if isinstance(stated, dict) else {}


def _refuses_multimodal(release: Release, spec: DraftSpec) -> bool:
    row = release.rules["multimodal-ropes-refused"]
    return row.there and (spec.architecture.parallel is not None or method_of(spec) in (row.methods or ()))


def _why_not_raised(spec: DraftSpec) -> str:
    kind = _kind(spec.architecture)
    return "it gives no language model of its own more positions" if kind is None else f"{kind} is not stretched"


def _kind(architecture: Architecture) -> str | None:
    """The kind of its rotary positions; None where the layout does not hold them."""
    if architecture.rope is None:
        return None
    scaling = architecture.rope.scaling or {}
    return str(scaling.get("rope_type", "default"))


def _longer(architecture: Architecture, wanted: int) -> str:
    """How a draft gets more positions, where its weights then still mean the same."""
    rope = architecture.rope
    scaling = {} if rope is None else rope.scaling or {}
    original, factor = scaling.get("original_max_position_embeddings"), scaling.get("factor")
    known = isinstance(original, int) and isinstance(factor, int | float)
    enough = _kind(architecture) == "yarn" and known and original * factor >= wanted  # type: ignore[operator]
    settable = rope is not None and (_kind(architecture) not in LENGTH_MATTERS or enough)
    return f"--set max_position_embeddings={wanted}" if settable else "serve shorter text, or take another draft"


def _numbers(releases: Sequence[Release]) -> str:
    return f"{releases[0].engine} {', '.join(release.number for release in releases)}"
