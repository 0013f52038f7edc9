"""What decoder layers are called in GGUF: the names of their tensors and the keys of their sizes, both ways.

Source: llama.cpp b11434: gguf-py `constants.py` and `tensor_mapping.py`, `conversion/llama.py`, `src/models/`. The
names are GGUF's own for every model; a family's other tensors are in its format module.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.export import Outgoing
from draftkit.convert.facts import Facts
from draftkit.convert.formats.vocabulary_map import mapped_tokens, problem_of_map
from draftkit.convert.operations import Move, copy, integers
from draftkit.convert.plan import common_dtype
from draftkit.errors import FormatError
from draftkit.finding import Finding
from draftkit.io.dtypes import FLOATS
from draftkit.io.gguf_file import TOKENS, TYPES
from draftkit.io.handles import TensorHandle, memory_handle
from draftkit.io.records import excerpt
from draftkit.layout.architecture import Rope
from draftkit.layout.decoder import Decoder

Value = TypeVar("Value", int, float, str, bool)

LAYER_MODULES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
DEFAULT = "llama.cpp's default"
TABLE_IS_HEAD = "the file has a table and no head, and its table is both"
ROTATED = ("attn_q", "attn_k")
ROPE_FACTORS = "rope_freqs.weight"
FACTORED = "llama3"  # the kind of scaling that llama.cpp takes as a factor of each frequency
SCALED_BY_KEY = ("linear",)
OWN = "draftkit"  # what keys that only draftkit reads begin with
CONFIG = f"{OWN}.config"  # the model's config.json, verbatim; beside heads, their target's
ROPE_SCALING = f"{OWN}.rope_scaling"  # the parameters that the factors were computed from
LAYER = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)")
BLOCK = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")


@dataclass(frozen=True)
class Names:
    """The tensor names of one kind of model in both layouts.

    `tensors` maps unified names to GGUF's, for the tensors outside the layers and for those that only this kind's
    layers have. `prefix` stands before the layers' names in the unified layout. `interleaved` says that neighboring
    features rotate together, so that the rows of queries and keys are in another order than in the unified layout.
    """

    tensors: Mapping[str, str]
    prefix: str = ""
    interleaved: bool = False

    def written(self, name: str) -> str:
        """A unified name in GGUF."""
        match = LAYER.fullmatch(name.removeprefix(self.prefix))
        if name in self.tensors or match is None:
            return self.tensors[name]
        return f"blk.{match[1]}.{LAYER_MODULES[match[2]]}.{match[3]}"

    def read(self, name: str) -> str | None:
        """The unified name of a tensor of GGUF, None of one that this kind of model does not have."""
        tensors = {gguf: unified for unified, gguf in self.tensors.items()}
        modules = {gguf: unified for unified, gguf in LAYER_MODULES.items()}
        match = BLOCK.fullmatch(name)
        if name in tensors or match is None or match[2] not in modules:
            return tensors.get(name)
        return f"{self.prefix}layers.{match[1]}.{modules[match[2]]}.{match[3]}"

    def heads(self, name: str, decoder: Decoder) -> int | None:
        """How many heads a tensor of GGUF has whose rows are in another order there; None of others."""
        match = BLOCK.fullmatch(name)
        if not self.interleaved or match is None or match[2] not in ROTATED:
            return None
        return decoder.num_attention_heads if match[2] == "attn_q" else decoder.num_key_value_heads


def writing_moves(outgoing: Outgoing, names: Names, decoder: Decoder, kept: Iterable[str]) -> list[Move]:
    """The moves of the unified tensors `kept` into a file."""
    moves = []
    for name in kept:
        handle, written = outgoing.tensor(name), names.written(name)
        heads = names.heads(written, decoder)
        if name == "d2t":
            moves.append(Move("offset_to_index", (name,), written, handle.dtype, handle.shape))
        elif heads is not None:
            moves.append(Move("interleave", (name,), written, handle.dtype, handle.shape, number=heads))
        else:
            moves.append(copy(handle, written))
    return moves


def reading_moves(checkpoint: Checkpoint, names: Names, decoder: Decoder, narrowed: str | None) -> list[Move]:
    """The moves of the tensors of a file into the layout; `narrowed`: the dtype that float32 ones are to have
    again. What computes rotary positions is left out: the facts have it.

    Raises `FormatError` for tensors that this kind of model does not have.
    """
    moves, unknown = [], []
    for written, handle in checkpoint.tensors.items():
        name, heads = names.read(written), names.heads(written, decoder)
        dtype = narrowed if narrowed is not None and handle.dtype == "F32" else handle.dtype
        if written == ROPE_FACTORS:
            moves.append(Move("drop", (written,), None, handle.dtype, handle.shape, "computed from the rope scaling"))
        elif name is None:
            unknown.append(written)
        elif name == "d2t":
            moves.append(Move("index_to_offset", (written,), name, "I64", handle.shape))
        elif heads is not None:
            moves.append(Move("part_halves", (written,), name, dtype, handle.shape, number=heads))
        elif dtype != handle.dtype:
            moves.append(Move("cast", (written,), name, dtype, handle.shape))
        else:
            moves.append(copy(handle, name))
    if unknown:
        raise FormatError(
            f"llama.cpp knows no {', '.join(sorted(unknown))} in a model of this kind, and does not load the file",
            where=checkpoint.source.path,
        )
    return moves


def layer_metadata(architecture: str, decoder: Decoder, vocab_size: int) -> dict[str, object]:
    """The keys of decoder layers, each stated: llama.cpp's defaults are those of other models."""
    keys: dict[str, object] = {
        "block_count": decoder.num_hidden_layers,
        "context_length": decoder.rope.max_position_embeddings,
        "embedding_length": decoder.hidden_size,
        "feed_forward_length": decoder.intermediate_size,
        "attention.head_count": decoder.num_attention_heads,
        "attention.head_count_kv": decoder.num_key_value_heads,
        "attention.key_length": decoder.head_dim,
        "attention.value_length": decoder.head_dim,
        "attention.layer_norm_rms_epsilon": decoder.rms_norm_eps,
        "rope.dimension_count": decoder.head_dim,
        "rope.freq_base": float(decoder.rope.base),
        "vocab_size": vocab_size,
    }
    scaling = decoder.rope.scaling or {}
    if scaling.get("rope_type") in SCALED_BY_KEY:
        keys |= {
            "rope.scaling.type": scaling["rope_type"],
            "rope.scaling.factor": float(cast("float", scaling["factor"])),
        }
    elif scaling:
        return _under(architecture, keys) | {ROPE_SCALING: json.dumps(scaling)}
    return _under(architecture, keys)


def runs_scaling(rope: Rope) -> bool:
    """Whether llama.cpp is told how rotary positions are scaled, in a way that has been compared."""
    return rope.scaling is None or rope.scaling.get("rope_type") in (*SCALED_BY_KEY, FACTORED)


def rope_factors(outgoing: Outgoing, decoder: Decoder) -> dict[str, TensorHandle]:
    """What llama.cpp divides each frequency by, [head_dim / 2]; empty where rotary positions are not scaled so.

    The formula of Llama 3.1 (transformers `_compute_llama3_parameters`).
    """
    scaling = decoder.rope.scaling or {}
    if scaling.get("rope_type") != FACTORED:
        return {}
    import torch

    factor, low, high, length = (
        float(cast("float", scaling[key]))
        for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    found = []
    for index in range(0, decoder.head_dim, 2):
        wavelength = 2 * math.pi * decoder.rope.base ** (index / decoder.head_dim)
        smooth = min(max((length / wavelength - low) / (high - low), 0.0), 1.0)
        found.append(1 / ((1 - smooth) / factor + smooth))
    return {ROPE_FACTORS: memory_handle(ROPE_FACTORS, torch.tensor(found), outgoing.draft.path)}


def read_layers(checkpoint: Checkpoint, facts: Facts, *, hidden_act: str = "silu") -> Decoder:
    """The decoder of a file, of which the keys under its architecture stand as if beside each other (`Facts.lift`)."""
    hidden = stated(facts, "embedding_length", int, "hidden_size")
    heads = stated(facts, "attention.head_count", int, "num_attention_heads")
    width = facts.size("attention.key_length", hidden // heads, DEFAULT, "head_dim")
    for key in ("attention.value_length", "rope.dimension_count"):
        if facts.optional(key, int) not in (None, width):
            raise FormatError(f"{key} is not attention.key_length, {width}", where=checkpoint.source.path)
    return Decoder(
        hidden_size=hidden,
        intermediate_size=stated(facts, "feed_forward_length", int, "intermediate_size"),
        num_hidden_layers=stated(facts, "block_count", int, "num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=facts.size("attention.head_count_kv", heads, DEFAULT, "num_key_value_heads"),
        head_dim=width,
        hidden_act=facts.record("hidden_act", hidden_act, "format default", "what llama.cpp computes"),
        rms_norm_eps=stated(facts, "attention.layer_norm_rms_epsilon", float, "rms_norm_eps"),
        qkv_bias=facts.record("qkv_bias", "blk.0.attn_q.bias" in checkpoint.tensors, "from tensors"),
        output_bias=facts.record("output_bias", "blk.0.attn_output.bias" in checkpoint.tensors, "from tensors"),
        mlp_bias=facts.record("mlp_bias", "blk.0.ffn_gate.bias" in checkpoint.tensors, "from tensors"),
        qk_norm=facts.record("qk_norm", "blk.0.attn_q_norm.weight" in checkpoint.tensors, "from tensors"),
        sliding_window=None,
        rope=_read_rope(checkpoint, facts),
    )


def stated(facts: Facts, key: str, kind: type[Value], fact: str) -> Value:
    """A key that llama.cpp does not load a file without, under its name in the layout; integers are sizes. Raises
    `FormatError`."""
    value = facts.optional(key, kind)
    if value is None:
        raise FormatError(f"the file has no {key}, and llama.cpp does not load it", expected=kind.__name__)
    if kind is int and isinstance(value, int) and value <= 0:
        raise FormatError(f"{key} is {value}", expected="a positive integer")
    return facts.record(fact, value, "stated", f"GGUF key {key}")


def vocabulary_of(checkpoint: Checkpoint, facts: Facts) -> int:
    """How many tokens the file's tokenizer has, which llama.cpp goes by."""
    said = facts.optional("vocab_size", int)
    tokenizer = checkpoint.config.get("tokenizer")
    count = tokenizer.get(TOKENS.partition(".")[2]) if isinstance(tokenizer, dict) else None
    if not isinstance(count, int):
        raise FormatError(
            "the file has no tokenizer, and llama.cpp does not load it",
            where=checkpoint.source.path,
            hint="convert the draft again with --target",
        )
    other = "" if said in (None, count) else f"; its vocab_size, {said}, is another"
    return facts.record("vocab_size", count, "stated", f"the length of {TOKENS}{other}")


def begin_reading(checkpoint: Checkpoint, facts: Facts) -> str | None:
    """Have the keys under the file's architecture stand beside each other, and account for those that say nothing of
    what the model computes. Returns the dtype that all floats had which draftkit made the file of, and that float32
    ones of the file are to have again; None where it made another, or where quantizing has changed them.
    """
    facts.lift(str(checkpoint.gguf_architecture))
    general, own = facts.mapping("general") or {}, facts.mapping(OWN) or {}
    facts.mapping("tokenizer")
    facts.mapping("quantize")  # llama-quantize's notes
    number = facts.optional("file_type", int, general)
    stored = next((name for name, (_, own) in TYPES.items() if own == number), None)
    facts.record("stored as", stored or str(number), "stated", "general.file_type")
    before = own.get("dtype")
    found = common_dtype(checkpoint)
    plain = stored is not None and TYPES[stored][0] == found
    return str(before) if before in FLOATS and plain and found in (before, "F32") else None


def own_json(checkpoint: Checkpoint, key: str) -> object:
    """What draftkit has put under a key of its own, None where it has not. Raises `FormatError` for what is no JSON."""
    own = checkpoint.config.get(OWN)
    said = own.get(key.removeprefix(f"{OWN}.")) if isinstance(own, dict) else None
    if said is None:
        return None
    try:
        return json.loads(cast("str", said))
    except (TypeError, ValueError, RecursionError) as error:
        raise FormatError(
            f"GGUF key {key} is {excerpt(said)}", where=checkpoint.source.path, expected="JSON, as draftkit writes it"
        ) from error


def own_object(checkpoint: Checkpoint, key: str) -> dict[str, object] | None:
    """The same of an object."""
    found = own_json(checkpoint, key)
    if found is not None and not isinstance(found, dict):
        raise FormatError(f"GGUF key {key} is {excerpt(found)}", where=checkpoint.source.path, expected="an object")
    return found


def _read_rope(checkpoint: Checkpoint, facts: Facts) -> Rope:
    base = facts.stated_or("rope.freq_base", float, 10000.0, DEFAULT, "rope_theta")
    length = stated(facts, "context_length", int, "max_position_embeddings")
    kind, factor = facts.optional("rope.scaling.type", str), facts.optional("rope.scaling.factor", float)
    scaling: dict[str, object] | None = None
    if ROPE_FACTORS in checkpoint.tensors:
        scaling = own_object(checkpoint, ROPE_SCALING)
        if scaling is None:
            raise FormatError(
                f"{ROPE_FACTORS} scales the rotary positions, and the file does not say by which parameters",
                where=checkpoint.source.path,
                hint="convert the checkpoint that the file was made from",
            )
    elif kind in SCALED_BY_KEY:
        scaling = {"rope_type": kind, "factor": factor}
    elif kind not in (None, "none"):
        raise FormatError(f"rope.scaling.type is {kind}", where=checkpoint.source.path, expected="linear, or none")
    facts.record("rope_scaling", str(scaling), "stated")
    return Rope(base=base, declared_base=base, scaling=scaling, max_position_embeddings=length)


def _under(architecture: str, keys: Mapping[str, object]) -> dict[str, object]:
    return {f"{architecture}.{key}": value for key, value in keys.items()}


OFFSETS = "offsets"


def read_ids(checkpoint: Checkpoint, facts: Facts, moves: Sequence[Move], vocab_size: int) -> list[Move]:
    """The moves with that of `d2t` as the user says it is stored (`--set d2t=offsets`); notes a map that is none."""
    handle = checkpoint.tensors.get("d2t")
    if handle is None:
        return list(moves)
    if facts.choice("d2t", (OFFSETS,)):
        return [copy(handle) if move.destination == "d2t" else move for move in moves]
    if problem := problem_of_map(integers(handle), vocab_size):
        as_offsets = problem_of_map(mapped_tokens(handle), vocab_size) is None
        name = "gguf-d2t-offsets" if as_offsets else "d2t"
        message = "d2t holds offsets, where llama.cpp reads the target's ids" if as_offsets else problem
        facts.problems.append(
            Finding(
                name,
                "error",
                message,
                where="tensor d2t",
                cost="proposals are other tokens than the draft means: nothing is accepted, and nothing is logged",
                fix="--set d2t=offsets reads it, and convert --to gguf writes ids" if as_offsets else "convert again",
                source="llama.cpp `src/models/eagle3.cpp`",
            )
        )
    return list(moves)
