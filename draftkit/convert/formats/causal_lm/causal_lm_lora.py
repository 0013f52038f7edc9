"""A LoRA adapter of peft, merged into the causal language model that it was trained on.

`adapter_config.json` and `adapter_model.safetensors` without a config of their own: the base model is opened beside
them, and what it is (plain, PARD, …) decides the rest. W' = W + scale · B·A with the scale `lora_alpha / r`, or
`lora_alpha / √r` where rank-stabilised; with DoRA, W' is that times a learned magnitude over its norm, for each output.
Source: huggingface/peft `src/peft/tuners/lora/layer.py`, `config.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar, cast

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.detect import detect
from draftkit.convert.facts import Facts
from draftkit.convert.formats.causal_lm.causal_lm import full_names
from draftkit.convert.operations import Move, Operation, carry_out, copy, drop
from draftkit.convert.plan import Plan, renamed
from draftkit.errors import FormatError
from draftkit.io.dtypes import FLOATS
from draftkit.io.handles import TensorHandle
from draftkit.layout.folder import tokenizer_files
from draftkit.layout.target import ADAPTER_CONFIG, ADAPTER_PREFIX, TargetFacts

NAME = "lora"
TITLE = "causal language model with a LoRA adapter (peft), merged"

# Options under which the merged weights are more than W + scale · B·A, and magnitudes.
VARIANTS = {
    "alora_invocation_tokens": "an activated LoRA acts only after its invocation tokens, so that it cannot be merged",
    "layer_replication": "it repeats layers of the base model",
    "lora_bias": "its B matrices have a bias",
    "target_parameters": "it adapts parameters that are not the weight of a module",
    "trainable_token_indices": "it replaces rows of the embedding",
}
UNCHANGED_BASE = (None, True, False, "gaussian", "eva", "orthogonal")  # initializations that leave W as it was
UNUSED = {
    "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config", "exclude_modules",
    "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "megatron_core",
    "modules_to_save", "peft_version", "qalora_group_size", "revision", "runtime_config",
    "target_modules", "task_type",
}  # fmt: skip
MAGNITUDE = "magnitude_vector"
FACTOR = re.compile(rf"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<factor>[AB]|{MAGNITUDE})(\.weight)?")
TRANSPOSED: dict[Operation, Operation] = {"add_lora": "add_lora_transposed", "add_dora": "add_dora_transposed"}
EMBEDDING_OR_HEAD = re.compile(r".*\b(embed_tokens|wte|embed_in|embed_out|word_embeddings|lm_head)\.weight")


Patterns = Mapping[re.Pattern[str], float]
Number = TypeVar("Number", float, int | None)


@dataclass(frozen=True)
class AdapterSettings:
    """What an adapter's config says about the merge: alpha and rank, and those of modules that match a pattern.

    `rank` None: not stated.
    """

    alpha: float
    alphas: Patterns
    rank: int | None
    ranks: Patterns
    rank_stabilised: bool
    fan_in_fan_out: bool
    dora: bool

    @property
    def factors(self) -> tuple[str, ...]:
        """What the adapter has for each matrix, in the order in which the merge takes them."""
        return ("A", "B", MAGNITUDE) if self.dora else ("A", "B")

    def scale(self, module: str, rank: int) -> float:
        alpha = _matching(self.alphas, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.rank_stabilised else rank)

    def stated_rank(self, module: str) -> float | None:
        return _matching(self.ranks, module, self.rank)


def _matching(patterns: Patterns, module: str, default: Number) -> float | Number:
    return next((number for pattern, number in patterns.items() if pattern.fullmatch(module)), default)


@dataclass(frozen=True)
class Changes:
    """The tensors of an adapter by the base model's name of what they change.

    `factors`: the matrices A and B, and DoRA's magnitude. `embeddings`: which of them are an embedding's. `saved`:
    trained whole, in place of the old.
    """

    factors: dict[str, dict[str, TensorHandle]]
    embeddings: set[str]
    saved: dict[str, TensorHandle]


def recognize(checkpoint: Checkpoint) -> int:
    return 9 if checkpoint.adapter is not None else 0


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    path = checkpoint.source.path / ADAPTER_CONFIG
    if checkpoint.adapter is None:
        raise FormatError("there is no adapter", where=path, hint="leave out --from")
    settings = _read_settings(facts.beside(checkpoint.adapter.config, path), checkpoint.adapter.config, path)
    base = _base_model(checkpoint)
    changes = _read_changes(checkpoint)
    _check_names(checkpoint, settings, base, changes)
    facts.record("base_model", checkpoint.adapter.base.name, "stated", checkpoint.adapter.base.revision or "")
    kind = "DoRA" if settings.dora else "LoRA"
    facts.record("adapter", f"{kind} in {len(changes.factors)} matrices", "stated", f"lora_alpha {settings.alpha:g}")
    merged = {name: replace(handle, name=name) for name, handle in (base | changes.saved).items()}
    model = replace(checkpoint, source=checkpoint.adapter.base, tensors=merged, adapter=None)
    planned = detect(model).plan(model, facts, target)
    moves = [_with_changes(checkpoint, settings, base, changes, move) for move in planned.moves]
    moves += [drop(base[name], "the adapter has its own (modules_to_save)") for name in changes.saved]
    files = {path.name: path for path in (*planned.copied_files, *tokenizer_files(checkpoint.source.path))}
    return replace(planned, format=NAME, moves=tuple(moves), copied_files=tuple(files.values()))


def changed_weights(checkpoint: Checkpoint) -> dict[str, TensorHandle]:
    """The weights of a base model that its adapter changes, merged, by their names in the base's files; none is read.

    Raises `FormatError` for an adapter that cannot be merged or does not fit.
    """
    assert checkpoint.adapter is not None
    path = checkpoint.source.path / ADAPTER_CONFIG
    settings = _read_settings(Facts(checkpoint.adapter.config, path), checkpoint.adapter.config, path)
    changes = _read_changes(checkpoint)
    base = _as_called(_base_model(checkpoint), changes)
    _check_names(checkpoint, settings, base, changes)
    moves = [
        _with_changes(checkpoint, settings, base, changes, replace(copy(base[name], base[name].name), sources=(name,)))
        for name in changes.factors
    ]
    return carry_out(moves, checkpoint.tensors)


def _base_model(checkpoint: Checkpoint) -> dict[str, TensorHandle]:
    """The tensors that the adapter changes, as it calls them: under the names that they have in the causal LM."""
    tensors = {name: handle for name, handle in checkpoint.tensors.items() if not name.startswith(ADAPTER_PREFIX)}
    renames = full_names(tensors)
    return {renamed(name, renames): handle for name, handle in tensors.items()}


def _as_called(base: dict[str, TensorHandle], changes: Changes) -> dict[str, TensorHandle]:
    """The base model's tensors, those that the adapter calls otherwise under its names too: transformers has the
    `language_model.model.layers` of a file as `model.language_model.layers`, or as `model.layers` of the text alone."""
    spelled: dict[str, list[str]] = {}
    for name in base:
        spelled.setdefault(_core(name), []).append(name)
    found = {change: spelled.get(_core(change), []) for change in changes.factors.keys() - base.keys()}
    return base | {change: base[names[0]] for change, names in found.items() if len(names) == 1}


def _core(name: str) -> str:
    """What the spellings of a weight's name share."""
    return ".".join(part for part in name.split(".") if part not in ("model", "language_model"))


def _read_settings(facts: Facts, config: dict[str, object], path: Path) -> AdapterSettings:
    """Raises `FormatError` for every kind of adapter that is more than W + scale · B·A."""
    if (kind := facts.optional("peft_type", str)) != "LORA":
        raise _refusal(path, f"this is a {kind} adapter", "only LORA is merged")
    for key, reason in VARIANTS.items():
        if config.get(key):
            raise _refusal(path, f"{key} is {config[key]!r}", reason)
    if (bias := facts.optional("bias", str)) not in (None, "none"):
        raise _refusal(path, f"bias is {bias!r}", "the adapter trains biases of the base model too")
    if (start := config.get("init_lora_weights")) not in UNCHANGED_BASE:
        raise _refusal(path, f"init_lora_weights is {start!r}", "it changed the base model's weights before training")
    settings = AdapterSettings(
        alpha=facts.stated("lora_alpha", float),
        alphas=_patterns("alpha_pattern", facts, path),
        rank=facts.optional("r", int),
        ranks=_patterns("rank_pattern", facts, path),
        rank_stabilised=bool(facts.optional("use_rslora", bool)),
        fan_in_fan_out=bool(facts.optional("fan_in_fan_out", bool)),
        dora=bool(facts.optional("use_dora", bool)),
    )
    for key, value in config.items():
        if key in UNUSED or key == "init_lora_weights":
            facts.drop(key, "no effect on the merged weights")
        elif not value:
            facts.drop(key, "off")
    facts.check_keys_used()
    return settings


def _patterns(key: str, facts: Facts, path: Path) -> Patterns:
    """peft's patterns: regular expressions for the end of a module's name."""
    patterns = {}
    for text, number in (facts.mapping(key) or {}).items():
        if type(number) not in (int, float):
            raise FormatError(f"{key} has {number!r} for {text}", where=path, expected="a number")
        try:
            patterns[re.compile(rf"(.*\.)?({text})")] = cast("float", number)
        except re.error as error:
            raise FormatError(f"{key} has {text!r}: {error}", where=path) from error
    return patterns


def _refusal(path: Path, what: str, reason: str) -> FormatError:
    hint = "merge it with peft (merge_and_unload, then save_pretrained) and convert the result"
    return FormatError(f"{what}: {reason}", where=path, hint=hint)


def _read_changes(checkpoint: Checkpoint) -> Changes:
    changes = Changes({}, set(), {})
    for name, handle in checkpoint.tensors.items():
        if not name.startswith(ADAPTER_PREFIX):
            continue
        inner = name.removeprefix(ADAPTER_PREFIX)
        if match := FACTOR.fullmatch(inner):
            weight = f"{match['module']}.weight"
            changes.factors.setdefault(weight, {})[match["factor"]] = handle
            changes.embeddings.update([weight] if match["embedding"] else [])
        else:
            changes.saved[inner.replace(".base_layer.", ".")] = handle
    return changes


def _check_names(
    checkpoint: Checkpoint, settings: AdapterSettings, base: Mapping[str, TensorHandle], changes: Changes
) -> None:
    """Raise `FormatError` unless every change has its matrix, which is not tied to another."""
    changed = changes.factors.keys() | changes.saved.keys()
    is_tied = bool(checkpoint.config.get("tie_word_embeddings")) or "lm_head.weight" not in base
    tied = {name for name in changed if is_tied and EMBEDDING_OR_HEAD.fullmatch(name)}
    problems = [f"{name}: the base model ties embedding and head, the adapter trains one of them" for name in tied]
    problems += [f"{name}: not in the base model" for name in changed - base.keys() - tied]
    for name, factors in changes.factors.items():
        problems += [f"{name}: lora_{factor} is missing" for factor in settings.factors if factor not in factors]
        if MAGNITUDE in factors and not settings.dora:
            problems.append(f"{name}: lora_{MAGNITUDE} is there, and use_dora is not true")
        if name in base and base[name].dtype not in FLOATS:
            problems.append(f"{name}: {base[name].dtype}, quantized; name the model that was quantized as the base")
    if problems:
        listing = "\n    ".join(sorted(problems))
        raise FormatError(
            f"the adapter does not fit its base model:\n    {listing}",
            where=checkpoint.source.path,
            hint="check base_model_name_or_path in adapter_config.json, or merge the adapter with peft",
        )


def _with_changes(
    checkpoint: Checkpoint, settings: AdapterSettings, base: Mapping[str, TensorHandle], changes: Changes, move: Move
) -> Move:
    """A move of the base model, from the tensors of the files: the adapter's own, or with its update added."""
    name = move.sources[0]
    source, *others = ((changes.saved.get(name) or base[name]).name for name in move.sources)
    if name not in changes.factors:
        return replace(move, sources=(source, *others))
    factors = [changes.factors[name][factor] for factor in settings.factors]
    a, b, *magnitude = factors
    weight = checkpoint.tensors[source]
    stated = settings.stated_rank(name.removesuffix(".weight"))
    if stated is not None and stated != a.shape[0]:
        raise FormatError(
            f"{a.name} has rank {a.shape[0]}, and {ADAPTER_CONFIG} says {stated:g}",
            where=checkpoint.source.path,
            hint="config and weights are not of one adapter: fetch both again",
        )
    transposed = _is_transposed(checkpoint, settings, weight, a, b, name in changes.embeddings)
    if magnitude and math.prod(magnitude[0].shape) != b.shape[0]:
        raise FormatError(
            f"{magnitude[0].name} is {list(magnitude[0].shape)}",
            where=checkpoint.source.path,
            expected=f"a number for each of the {b.shape[0]} outputs",
        )
    operation: Operation = "add_dora" if settings.dora else "add_lora"
    return replace(
        move,
        operation=TRANSPOSED[operation] if transposed else operation,
        sources=(source, *(factor.name for factor in factors)),
        number=settings.scale(name.removesuffix(".weight"), a.shape[0]),
    )


def _is_transposed(
    checkpoint: Checkpoint,
    settings: AdapterSettings,
    weight: TensorHandle,
    a: TensorHandle,
    b: TensorHandle,
    embedding: bool,
) -> bool:
    """Whether the weight is [in, out], as embeddings and GPT-2's layers are. Raises `FormatError` when neither fits."""
    rank, inputs = checkpoint.matrix(a.name)
    outputs, columns = checkpoint.matrix(b.name)
    plain, turned = weight.shape == (outputs, inputs), weight.shape == (inputs, outputs)
    if not rank or rank != columns or not (turned if embedding else plain or turned):
        raise FormatError(
            f"{a.name} is {list(a.shape)} and {b.name} {list(b.shape)}, which do not fit {weight.name} "
            f"{list(weight.shape)}",
            where=checkpoint.source.path,
        )
    return embedding or (settings.fan_in_fan_out if plain and turned else turned)
