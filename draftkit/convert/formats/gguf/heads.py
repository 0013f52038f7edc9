"""A target's multi-token prediction heads in GGUF: further blocks of the target's own architecture, both ways.

Source: llama.cpp b11434 `conversion/glm.py`, `qwen.py`, `hunyuan.py`, `deepseek.py`, `src/models/`. What lies around a
head's decoder layer is called `nextn` there; experts are stacked. The facts of a
target that is a GGUF file are read here too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from draftkit.convert.formats.gguf.layers import LAYER_MODULES
from draftkit.convert.operations import Move, copy, drop
from draftkit.errors import FormatError
from draftkit.hub.locate import Located
from draftkit.io.gguf_file import ARCHITECTURE, TOKENS, read_header
from draftkit.io.handles import TensorHandle
from draftkit.layout.mtp import COPIES, HeadParts
from draftkit.layout.mtp_layer import FUSED
from draftkit.layout.target import TargetFacts, read_target_facts

BESIDE = {
    "embedding_norm": "nextn.enorm.weight",
    "hidden_norm": "nextn.hnorm.weight",
    "projection": "nextn.eh_proj.weight",
    "final_norm": "nextn.shared_head_norm.weight",
}
COPIED = ("nextn.embed_tokens.weight", "nextn.shared_head_head.weight")  # of the target's tables
BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
STACKED = re.compile(r"ffn_(gate|up|down)_exps\.weight")
LATENT, LATENT_KEYS, LATENT_VALUES = "self_attn.kv_b_proj.weight", "attn_k_b.weight", "attn_v_b.weight"
NORM = "norm.weight"


def _weights(names: Mapping[str, str]) -> dict[str, str]:
    return {f"{name}.weight": f"{gguf}.weight" for name, gguf in names.items()}


def _shared(name: str) -> dict[str, str]:
    return _weights({f"mlp.{name}.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")})


BIASES = {f"self_attn.{part}_proj.bias": f"attn_{part}.bias" for part in "qkv"}
LAYER = _weights(LAYER_MODULES) | BIASES | {"mlp.gate.weight": "ffn_gate_inp.weight"}
POST = {"post_attention_layernorm.weight": "post_attention_norm.weight"}
BIAS = {"mlp.gate.e_score_correction_bias": "exp_probs_b.bias"}
LATENTS = _weights(
    {
        "self_attn.q_a_proj": "attn_q_a",
        "self_attn.q_a_layernorm": "attn_q_a_norm",
        "self_attn.q_b_proj": "attn_q_b",
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    }
)


@dataclass(frozen=True, kw_only=True)
class HeadNames:
    """How GGUF has the heads of one type of target.

    `architecture`: what it calls the target. `layer`: the tensors of a head's decoder layer. `one_plus`: norms hold
    what they multiply by, of which the checkpoint has one less.
    """

    architecture: str
    layer: Mapping[str, str]
    one_plus: bool = False


FUSED_DOWN = {"mlp.experts.down_proj": "ffn_down_exps.weight"}
QWEN = LAYER | POST | FUSED_DOWN | _shared("shared_expert") | _weights({"mlp.shared_expert_gate": "ffn_gate_inp_shexp"})
HUNYUAN = _weights({"mlp.router.gate": "ffn_gate_inp"}) | {"mlp.expert_bias": "exp_probs_b"}
# By `model_type`, the targets whose heads both llama.cpp and draftkit run.
HEADS = {
    "glm4_moe": HeadNames(architecture="glm4moe", layer=LAYER | POST | BIAS | _shared("shared_experts")),
    "glm4_moe_lite": HeadNames(architecture="deepseek2", layer=LAYER | LATENTS | BIAS | _shared("shared_experts")),
    "hy_v3": HeadNames(architecture="hy_v3", layer=LAYER | HUNYUAN | _shared("shared_mlp")),
    "qwen3_5": HeadNames(architecture="qwen35", layer=QWEN, one_plus=True),
    "qwen3_5_text": HeadNames(architecture="qwen35", layer=QWEN, one_plus=True),
    "qwen3_5_moe": HeadNames(architecture="qwen35moe", layer=QWEN, one_plus=True),
    "qwen3_5_moe_text": HeadNames(architecture="qwen35moe", layer=QWEN, one_plus=True),
    "qwen3_next": HeadNames(architecture="qwen3next", layer=QWEN, one_plus=True),
}


@dataclass(frozen=True)
class GgufHeads:
    """The heads of a target of `num_layers`: their names in the layout and in GGUF.

    `prefixes`, `parts`: as in `MtpSpec`. `latent`: of latent attention, the heads, and
    how many rows of each in `kv_b_proj` are of its keys.
    """

    names: HeadNames
    prefixes: Sequence[str]
    parts: HeadParts
    num_layers: int
    count: int
    latent: tuple[int, int] = (1, 0)
    beside: list[dict[str, str]] = field(init=False)

    def __post_init__(self) -> None:
        names = [
            {f"{self._prefix(index)}{getattr(self.parts, part)}.weight": gguf for part, gguf in BESIDE.items()}
            for index in range(self.count)
        ]
        object.__setattr__(self, "beside", names)

    def index(self, written: str) -> int:
        """The module whose block a tensor of a file is in; below 0 for the target's own."""
        match = BLOCK.fullmatch(written)
        return -1 if match is None else int(match[1]) - self.num_layers

    def _prefix(self, index: int) -> str:
        return self.prefixes[min(index, len(self.prefixes) - 1)]

    def layer(self, index: int) -> str:
        """What stands before the names of a module's decoder layer."""
        return self._prefix(index) + self.parts.block.format(index=index)

    def written(self, tensors: Mapping[str, TensorHandle]) -> tuple[list[Move], list[str]]:
        """The moves of the heads into a file, and the tensors for which it has no name. Copies of the target's tables
        are left out: llama.cpp would use them, and vLLM does not."""
        moves, unknown = [], []
        for index in range(self.count):
            block, layer, beside = f"blk.{self.num_layers + index}.", self.layer(index), self.beside[index]
            experts: dict[str, dict[int, TensorHandle]] = {}
            for name, handle in tensors.items():
                part = name.removeprefix(layer)
                if name in beside:
                    moves.append(self._moved(handle, block + beside[name]))
                elif not name.startswith(layer) or part in COPIES:
                    continue
                elif expert := EXPERT.fullmatch(part):
                    experts.setdefault(f"{block}ffn_{expert[2]}_exps.weight", {})[int(expert[1])] = handle
                elif part == FUSED:
                    moves += _halves(handle, block)
                elif part == LATENT:
                    moves += _latents(handle, block, *self.latent)
                elif part in self.names.layer:
                    moves.append(self._moved(handle, block + self.names.layer[part]))
                else:
                    unknown.append(name)
            moves += [_stack(written, [of[n] for n in sorted(of)]) for written, of in experts.items()]
        return moves, unknown

    def _moved(self, handle: TensorHandle, written: str) -> Move:
        """A tensor into a file."""
        if self.names.one_plus and written.endswith(NORM):
            return Move("add", (handle.name,), written, "F32", handle.shape, number=1)
        return copy(handle, written)

    def read(self, tensors: Mapping[str, TensorHandle], dtypes: Mapping[str, str]) -> tuple[list[Move], list[str]]:
        """The moves of a file into the layout, each expert by itself, and the file's tensors that have no name there.
        `dtypes`: by name in the layout, what they had; others stay as they are in the file."""
        moves, unknown = [], []
        for written, handle in tensors.items():
            index, part = self.index(written), written.partition(".")[2].partition(".")[2]
            if index < 0:
                moves.append(drop(handle, "the target's own"))
            elif part in COPIED:
                moves.append(drop(handle, "a copy of one of the target's tables, which vLLM does not read"))
            elif (found := self._read(part, index, handle, tensors)) or part == LATENT_VALUES:
                moves += [replace(move, dtype=dtypes.get(str(move.destination), move.dtype)) for move in found]
            else:
                unknown.append(written)
        return [_or_cast(move, tensors) for move in moves], unknown

    def _read(self, part: str, index: int, handle: TensorHandle, tensors: Mapping[str, TensorHandle]) -> list[Move]:
        """What becomes of a tensor of a module's block, in the dtype of the file; nothing of one that it does not have,
        and of the second of two that are joined."""
        layer, block = self.layer(index), handle.name.removesuffix(part)
        names = {gguf: layer + name for name, gguf in self.names.layer.items()}
        names |= {gguf: name for name, gguf in self.beside[index].items()}
        if part == LATENT_KEYS and block + LATENT_VALUES in tensors:
            values = tensors[block + LATENT_VALUES]
            heads, rank, keys = handle.shape
            shape = (heads * (keys + values.shape[1]), rank)
            sources = (handle.name, values.name)
            return [Move("join_rows", sources, layer + LATENT, handle.dtype, shape)]
        if (stacked := STACKED.fullmatch(part)) and len(handle.shape) == 3:
            expert = f"{layer}mlp.experts.{{}}.{stacked[1]}_proj.weight"
            return [
                Move("unstack", (handle.name,), expert.format(number), handle.dtype, handle.shape[1:], number=number)
                for number in range(handle.shape[0])
            ]
        if part not in names:
            return []
        if self.names.one_plus and part.endswith(NORM):
            return [Move("add", (handle.name,), names[part], handle.dtype, handle.shape, number=-1)]
        return [copy(handle, names[part])]


def _or_cast(move: Move, tensors: Mapping[str, TensorHandle]) -> Move:
    """A copy in another dtype is a cast."""
    changed = move.operation == "copy" and tensors[move.sources[0]].dtype != move.dtype
    return replace(move, operation="cast") if changed else move


def _stack(name: str, experts: Sequence[TensorHandle]) -> Move:
    first = experts[0]
    return Move("stack", tuple(e.name for e in experts), name, first.dtype, (len(experts), *first.shape))


def _halves(handle: TensorHandle, block: str) -> list[Move]:
    """Gates and ups of all experts, which lie one above the other."""
    count, both, width = handle.shape
    shape = (count, both // 2, width)
    parts = ("ffn_gate_exps.weight", 0), ("ffn_up_exps.weight", both // 2)
    return [Move("part_rows", (handle.name,), block + part, handle.dtype, shape, number=row) for part, row in parts]


def _latents(handle: TensorHandle, block: str, heads: int, latent_keys: int) -> list[Move]:
    """Keys, transposed, and values of each head."""
    rows, rank = handle.shape
    keys, values = (heads, rank, latent_keys), (heads, rows // heads - latent_keys, rank)
    return [
        Move("part_rows_transposed", (handle.name,), block + LATENT_KEYS, handle.dtype, keys, number=0),
        Move("part_rows", (handle.name,), block + LATENT_VALUES, handle.dtype, values, number=latent_keys),
    ]


def gguf_target_facts(located: Located) -> TargetFacts:
    """The facts of a GGUF target, as far as transformers reads it. Of types that it does not read from GGUF, and with
    whose heads llama.cpp drafts: the sizes by the file's own keys, and a config of its type alone. Raises as
    `folder_of_gguf`."""
    file = located.path
    try:
        return replace(read_target_facts(located.folder, located.name, None, located.config), path=file)
    except FormatError:
        header = read_header(file)
        own = str(header.value(ARCHITECTURE, str))
        kind = next((kind for kind, names in HEADS.items() if names.architecture == own), None)
        hidden_size, blocks = (header.value(f"{own}.{key}", int) for key in ("embedding_length", "block_count"))
        vocab_size = header.length(TOKENS)
        if kind is None or hidden_size is None or vocab_size is None or blocks is None:
            raise
    return TargetFacts(
        path=file,
        name=located.name,
        revision=None,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        num_hidden_layers=blocks - (header.value(f"{own}.nextn_predict_layers", int) or 0),
        max_position_embeddings=header.value(f"{own}.context_length", int),
        architectures=(),
        config={"model_type": kind},
    )
