"""Multi-token prediction heads as llama.cpp runs them from GGUF: blocks behind the target's, in a file of their own or
in the target's.

Everything but the heads is copied from the target's file, so that both agree. A file of their own has the target's
table, last norm and output layer besides. Source: llama.cpp b11434 `common/speculative.cpp`, `conversion/`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.export import Export, Outgoing
from draftkit.convert.facts import Facts
from draftkit.convert.formats.gguf.heads import COPIED, HEADS, GgufHeads, HeadNames
from draftkit.convert.formats.gguf.layers import CONFIG, own_json, own_object
from draftkit.convert.formats.mtp.heads import TargetHeads, refuse_window
from draftkit.convert.formats.mtp.mtp import plan_heads
from draftkit.convert.operations import carry_out
from draftkit.convert.plan import Plan
from draftkit.engines.llama_cpp import refusal_of_heads
from draftkit.errors import FormatError, LayoutError, TargetError
from draftkit.io.dtypes import DTYPES
from draftkit.io.gguf_file import ARCHITECTURE, TOKENIZER, Header, read_header, stored_tensors
from draftkit.io.records import excerpt
from draftkit.layout.families.mtp import MtpSpec
from draftkit.layout.mtp import head_kind
from draftkit.layout.target import TargetFacts, language_model

NAME = "gguf-mtp"
TITLE = "multi-token prediction heads (GGUF, llama.cpp)"
DESTINATION = "gguf"
METHODS = ("mtp",)

WEIGHTS = "draftkit.weights"  # what the checkpoint had of the heads
COPIES = "copies of the target's tables"  # the name of that fact
OUTSIDE_LAYERS = ("token_embd.weight", "output_norm.weight", "output.weight", "rope_freqs.weight")
PROJECTION = ".nextn.eh_proj.weight"
PER_LAYER = {"attention.recurrent_layers": False}  # lists of one value for each layer, and that of a head's


def recognize(checkpoint: Checkpoint) -> int:
    return 3 * (checkpoint.gguf_architecture is not None and any(n.endswith(PROJECTION) for n in checkpoint.tensors))


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    facts.keep_config()
    config = _target_config(checkpoint, target)
    own: Any = checkpoint.config.get(str(checkpoint.gguf_architecture)) or {}
    text = language_model(config)
    count, layers = own.get("nextn_predict_layers"), cast("int", text["num_hidden_layers"])
    if not isinstance(count, int) or own.get("block_count") != layers + count:
        raise FormatError(
            f"the file has {own.get('block_count')} blocks, {count} of them heads, and its target {layers} layers",
            where=checkpoint.source.path,
            hint="pass the target that the heads are of with --target",
        )
    if own.get("embedding_length") != text.get("hidden_size"):
        raise FormatError(
            f"the file is {own.get('embedding_length')} wide, and its target {text.get('hidden_size')}",
            where=checkpoint.source.path,
            hint="pass the target that the heads are of with --target",
        )
    dtypes = _stored_dtypes(checkpoint)
    known = head_kind(config)
    assert known is not None
    assert known.parts is not None
    kind = next((k for k in known.spellings() if any(n.startswith(k.prefixes(1, layers)) for n in dtypes)), known)
    prefixes = kind.prefixes(count, layers)
    heads = GgufHeads(HEADS[str(text["model_type"])], prefixes, known.parts, layers, count)
    moves, unknown = heads.read(checkpoint.tensors, dtypes)
    if unknown:
        raise FormatError(
            f"llama.cpp knows no {', '.join(sorted(unknown))} in heads of this kind", where=checkpoint.source.path
        )
    if copies := [name for name in checkpoint.tensors if name.endswith(COPIED)]:
        facts.record(COPIES, ", ".join(copies), "stated")
    found = TargetHeads(
        kind=kind,
        promised=count,
        prefixes=prefixes,
        tensors=carry_out(moves, checkpoint.tensors),
        unexpected={},
        trunk="",
        like={},
        num_layers=layers,
    )
    return plan_heads(NAME, checkpoint, facts, found, config, moves)


def export(outgoing: Outgoing) -> Export:
    """A file of the heads, to be loaded beside the target's."""
    return _export(outgoing, whole=False)


def export_into(outgoing: Outgoing) -> Export:
    """The target's file with the heads in it, in the place of its own."""
    return _export(outgoing, whole=True)


def _export(outgoing: Outgoing, *, whole: bool) -> Export:
    spec = outgoing.draft.spec.architecture.expect(MtpSpec)
    refuse_window(spec, outgoing.draft.path)
    names = _written_as(outgoing, spec)
    text: dict[str, Any] = language_model(spec.config)
    file = _target_file(outgoing)
    header, architecture = read_header(file), names.architecture
    found, layers = header.metadata, _layers(header, architecture)
    if layers is None or layers != text["num_hidden_layers"]:
        raise TargetError(
            f"the target's file is of type {header.value(ARCHITECTURE, str)}"
            + ("" if layers is None else f" with {layers} layers"),
            where=file,
            expected=f"{architecture} with {text['num_hidden_layers']} layers, as the heads were taken from",
        )
    width = header.value(f"{architecture}.embedding_length", int)
    if width != spec.target_hidden_size:
        raise TargetError(f"the heads are {spec.target_hidden_size} wide, and the target {width} wide", where=file)
    latent = (int(text["num_attention_heads"]), int(text.get("qk_nope_head_dim", 0)))
    assert spec.parts is not None
    heads = GgufHeads(names, spec.prefixes, spec.parts, layers, spec.num_modules, latent)
    moves, unknown = heads.written(outgoing.draft.tensors)
    if unknown:
        raise LayoutError(f"llama.cpp's graph has no {', '.join(unknown)}", where=outgoing.draft.path)
    kept = {
        k: v for k, v in found.items() if (whole and not k.startswith(TOKENIZER)) or k.startswith(f"{architecture}.")
    }
    stored = [(t.name, t.dtype, t.shape) for t in outgoing.draft.tensors.values()]
    metadata: dict[str, object] = kept | {
        ARCHITECTURE: architecture,
        f"{architecture}.block_count": layers + spec.num_modules,
        f"{architecture}.nextn_predict_layers": spec.num_modules,
        CONFIG: json.dumps(spec.config),
        WEIGHTS: json.dumps(stored),
    }
    for key, value in PER_LAYER.items():
        if (each := header.value(f"{architecture}.{key}", list)) is not None:
            longer = [*each[:layers], *[value] * spec.num_modules]
            metadata[f"{architecture}.{key}"] = found[f"{architecture}.{key}"]._replace(value=longer)
    beside = [
        t for t in stored_tensors(file) if t.handle.name in OUTSIDE_LAYERS or (whole and heads.index(t.handle.name) < 0)
    ]
    return Export(metadata, tuple(moves), beside=tuple(beside))


def _written_as(outgoing: Outgoing, spec: MtpSpec) -> HeadNames:
    """How GGUF has such heads. Raises `LayoutError` for those that llama.cpp, or draftkit, does not know there."""
    kind = str(language_model(spec.config).get("model_type"))
    problem = refusal_of_heads(kind, spec.num_modules)
    hint = "serve them with another engine"
    if problem is None and (kind not in HEADS or spec.parts is None):
        problem = f"draftkit writes no GGUF of the heads of {kind}: what llama.cpp makes of them has not been compared"
        hint = "llama.cpp's convert_hf_to_gguf.py --mtp may"
    if problem is None and outgoing.draft.spec.quantization is not None:
        problem, hint = "the weights are quantized in another way than GGUF's", "take the heads of the original target"
    if problem is not None:
        raise LayoutError(problem, where=outgoing.draft.path, expected=f"heads of {', '.join(HEADS)}", hint=hint)
    return HEADS[kind]


def _target_file(outgoing: Outgoing) -> Path:
    """The target's GGUF file, with which the heads' must agree."""
    target = outgoing.need_target("its GGUF file")
    file = Path(target.name).expanduser()
    if file.suffix != ".gguf":
        raise LayoutError(
            f"{target.name} is no GGUF file, with which that of the heads must agree",
            where=outgoing.draft.path,
            hint="--target FILE.gguf, as llama.cpp's convert_hf_to_gguf.py --no-mtp makes it of the target",
        )
    return file


def _layers(header: Header, architecture: str) -> int | None:
    """The target's own layers, by its file."""
    count, heads = (header.value(f"{architecture}.{key}", int) for key in ("block_count", "nextn_predict_layers"))
    return None if count is None else count - (heads or 0)


def _stored_dtypes(checkpoint: Checkpoint) -> dict[str, str]:
    """What the heads' tensors were stored in, by their names in the layout, where draftkit made the file."""
    stored: Any = own_json(checkpoint, WEIGHTS) or []
    try:
        return {name: dtype for name, dtype, _ in stored if dtype in DTYPES}
    except (TypeError, ValueError) as error:
        raise FormatError(
            f"GGUF key {WEIGHTS} is {excerpt(stored)}", where=checkpoint.source.path, expected="names, dtypes, shapes"
        ) from error


def _target_config(checkpoint: Checkpoint, target: TargetFacts | None) -> dict[str, object]:
    """The configuration of the heads' target: the user's target's, or that of which draftkit made the file."""
    if target is not None and target.architectures:
        config = dict(target.config)
    else:
        config = own_object(checkpoint, CONFIG) or {}
    if checkpoint.gguf_architecture not in {names.architecture for names in HEADS.values()}:
        raise FormatError(
            f"draftkit reads no heads of {checkpoint.gguf_architecture} targets from GGUF",
            where=checkpoint.source.path,
            hint="take them from the target's own checkpoint with --part mtp",
        )
    names = HEADS.get(str(language_model(config).get("model_type")))
    if names is None or names.architecture != checkpoint.gguf_architecture:
        raise FormatError(
            f"the file does not say of which target its heads of type {checkpoint.gguf_architecture} are",
            where=checkpoint.source.path,
            hint="--target with the folder or Hub id of the target",
        )
    return config
