"""Medusa: heads on the target's last hidden state, in the original layout and in vLLM's.

The original's `medusa_lm_head.pt` numbers everything: `{head}.{layer}.linear.{weight,bias}` and, last in each head,
`{head}.{layers}.weight` to logits, which early heads lack: they use the target's. In whole models the names follow
`medusa_head.` or `medusa_heads.`. vLLM has `blocks`, `lm_heads` or one `lm_head`, and `token_map`, absolute ids.
Sources: FasterDecoding/Medusa `medusa/model/medusa_model.py`, `medusa_model_legacy.py`; vLLM
`vllm/model_executor/models/medusa.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.destinations import Remedy
from draftkit.convert.facts import Facts
from draftkit.convert.operations import Move, copy, drop, integers
from draftkit.convert.plan import Plan, common_dtype, make_plan
from draftkit.errors import FormatError
from draftkit.io.handles import TensorHandle
from draftkit.layout.architecture import Architecture
from draftkit.layout.families.medusa import MedusaSpec
from draftkit.layout.provenance import FactOrigin
from draftkit.layout.spec import DraftSpec
from draftkit.layout.target import TargetFacts

NAME = "medusa"
TITLE = "Medusa (original and vLLM layouts)"

PREFIX = re.compile(r"^medusa_heads?\.")
NUMBERED = (
    (re.compile(r"^(\d+)\.(\d+)\.linear\.(weight|bias)$"), r"blocks.\1.layers.\2.\3"),
    (re.compile(r"^(\d+)\.\d+\.weight$"), r"lm_heads.\1.weight"),
)
BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.weight")
BLOCK_BIAS = re.compile(r"blocks\.\d+\.layers\.\d+\.bias")
OWN_HEAD = re.compile(r"lm_heads\.\d+\.weight")
SHARED_HEAD, TOKEN_MAP = "lm_head.weight", "token_map"
OF_HEADS = re.compile(rf"blocks\.|lm_heads\.|{SHARED_HEAD}$|{TOKEN_MAP}$")
HEAD_COUNTS = ("medusa_num_heads", "num_heads")
LAYER_COUNTS = ("medusa_num_layers", "num_hidden_layers")
READ = {"medusa_fc_bias", "original_lm_head", "truncated_vocab_size", "vocab_size"}
UNUSED = {
    "base_model_name_or_path": "names the target",
    "hidden_size": "the tensors tell",
    "max_paths": "of tree drafting, which vLLM does not do",
    "max_seq_len": "heads have no positions",
    "num_attention_heads": "heads have no attention",
    "topk": "of tree drafting, which vLLM does not do",
    "version": "the tensors tell whether the heads have matrices of their own",
}


@dataclass(frozen=True)
class Heads:
    """The tensors of a checkpoint by unified name, those left out (own name → why), and whose head they use."""

    tensors: dict[str, TensorHandle]
    dropped: dict[str, str]
    lm_head: Literal["draft", "shared", "target"]

    @property
    def to_logits(self) -> TensorHandle | None:
        """A matrix to logits, where the checkpoint has any."""
        return next((handle for name, handle in self.tensors.items() if _is_to_logits(name)), None)


def recognize(checkpoint: Checkpoint) -> int:
    return 2 if any(BLOCK.fullmatch(_unified(name)) for name in checkpoint.tensors) else 0


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    heads = _read_heads(checkpoint, facts)
    blocks = [match.groups() for name in heads.tensors if (match := BLOCK.fullmatch(name))]
    if not blocks:
        raise FormatError("there is no block of a Medusa head", where=checkpoint.source.path, hint="leave out --from")
    num_heads = _counted(facts, checkpoint, "num_heads", {head for head, _ in blocks}, HEAD_COUNTS)
    num_layers = _counted(facts, checkpoint, "num_layers", {layer for _, layer in blocks}, LAYER_COUNTS)
    hidden, _ = checkpoint.matrix(next(handle.name for name, handle in heads.tensors.items() if BLOCK.fullmatch(name)))
    facts.record("target_hidden_size", hidden, "from tensors", "rows of the first block")
    bias = _has_bias(checkpoint, facts, heads)
    vocab_size = _vocab_size(checkpoint, facts, target, heads)
    _drop_unused(checkpoint, facts)
    if vocab_size is None:
        return make_plan(NAME, checkpoint, facts, None, _moves(checkpoint, heads, None))
    if target is not None:
        checkpoint.check_target(target, hidden_size=hidden, vocab_size=vocab_size)
    medusa = MedusaSpec(
        target_hidden_size=hidden,
        vocab_size=vocab_size,
        draft_vocab_size=_draft_vocab_size(checkpoint, facts, heads, vocab_size),
        num_heads=num_heads,
        num_layers=num_layers,
        bias=bias,
        lm_head=heads.lm_head,
    )
    spec = DraftSpec(architecture=medusa, dtype=common_dtype(checkpoint))
    return make_plan(NAME, checkpoint, facts, spec, _moves(checkpoint, heads, medusa))


def _unified(name: str) -> str:
    name = PREFIX.sub("", name)
    for pattern, unified in NUMBERED:
        name = pattern.sub(unified, name)
    return name


def _is_to_logits(name: str) -> bool:
    return name == SHARED_HEAD or OWN_HEAD.fullmatch(name) is not None


def _read_heads(checkpoint: Checkpoint, facts: Facts) -> Heads:
    """Sort the tensors. With `original_lm_head` all heads of vLLM's class share `lm_head`, else `lm_heads.0`."""
    names = {name: _unified(name) for name in checkpoint.tensors}
    dropped = {}
    if checkpoint.is_causal_lm:
        dropped = {name: "a weight of the target" for name, new in names.items() if not OF_HEADS.match(new)}
    own = [name for name, new in names.items() if OWN_HEAD.fullmatch(new)]
    shared = [name for name, new in names.items() if new == SHARED_HEAD]
    if facts.optional("original_lm_head", bool) and own:
        shared = shared or [name for name in own if names[name] == "lm_heads.0.weight"]
        names |= dict.fromkeys(shared, SHARED_HEAD)
        dropped |= {name: "original_lm_head: all heads share one matrix" for name in own if name not in shared}
        own = []
    lm_head: Literal["draft", "shared", "target"] = "draft" if own else "shared" if shared else "target"
    if own:
        dropped |= dict.fromkeys(shared, "the heads have matrices of their own")
    facts.record("lm_head", lm_head, "from tensors")
    tensors = {new: checkpoint.tensors[name] for name, new in names.items() if name not in dropped}
    return Heads(tensors, dropped, lm_head)


def _counted(facts: Facts, checkpoint: Checkpoint, name: str, numbers: set[str], keys: tuple[str, ...]) -> int:
    """How many heads or layers the tensor names number, whatever the config says under one of `keys`."""
    said = next((checkpoint.config[key] for key in keys if key in checkpoint.config), "nothing")
    for key in keys:
        facts.drop(key, "the tensor names tell")
    return facts.record(name, len(numbers), "from tensors", f"counted in the tensor names; the config says {said}")


def _has_bias(checkpoint: Checkpoint, facts: Facts, heads: Heads) -> bool:
    present = any(BLOCK_BIAS.fullmatch(name) for name in heads.tensors)
    said = facts.optional("medusa_fc_bias", bool)
    if said and not present:
        raise FormatError(
            "medusa_fc_bias is true, and no block has a bias",
            where=checkpoint.source.path,
            hint="fetch the checkpoint again, or one from before it was converted",
        )
    return facts.record("bias", present, "from tensors", "" if said == present else f"the config says {said}")


def _vocab_size(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None, heads: Heads) -> int | None:
    """The target's vocabulary: the rows of heads that score all of it, else what the config or the target says."""
    stated, truncated = facts.optional("vocab_size", int), facts.optional("truncated_vocab_size", int)
    is_reduced = TOKEN_MAP in heads.tensors or (truncated is not None and stated is not None and truncated < stated)
    if heads.to_logits is not None and not is_reduced:
        return facts.from_tensors("vocab_size", checkpoint.matrix(heads.to_logits.name)[0], "rows of a head")
    if stated is not None:
        return facts.record("vocab_size", stated, "stated")
    if target is not None:
        return facts.record("vocab_size", target.vocab_size, "from target")
    given = facts.require("vocab_size", "pass --target: the heads use its vocabulary")
    return None if given is None else facts.as_integers("vocab_size", [given])[0]


def _draft_vocab_size(checkpoint: Checkpoint, facts: Facts, heads: Heads, vocab_size: int) -> int:
    """`truncated_vocab_size`, with a `token_map` that lists as many distinct tokens of the target."""
    size = facts.optional("truncated_vocab_size", int)
    if size is None or size >= vocab_size:
        return facts.record("draft_vocab_size", vocab_size, "format default" if size is None else "stated")
    facts.record("draft_vocab_size", size, "stated", "truncated_vocab_size")
    handle = heads.tensors.get(TOKEN_MAP)
    if handle is None or handle.dtype not in ("I64", "I32") or handle.shape != (size,):
        found = "missing" if handle is None else f"{handle.dtype} {list(handle.shape)}"
        raise FormatError(f"token_map is {found}", where=checkpoint.source.path, expected=f"I64 [{size}]")
    tokens = integers(handle)
    if len(set(tokens)) < size or not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise FormatError(
            "token_map repeats tokens or leaves the vocabulary",
            where=checkpoint.source.path,
            expected=f"{size} distinct tokens below {vocab_size}",
        )
    return size


def _drop_unused(checkpoint: Checkpoint, facts: Facts) -> None:
    for key, reason in UNUSED.items():
        facts.drop(key, reason)
    if checkpoint.config.get("model_type") not in (None, NAME):
        for key in sorted(checkpoint.config.keys() - facts.dropped.keys() - READ):
            facts.drop(key, "describes the target that the heads were trained with")


def _moves(checkpoint: Checkpoint, heads: Heads, medusa: MedusaSpec | None) -> list[Move]:
    """Heads that score the whole vocabulary beside a token map are cut to the map's tokens, as vLLM cuts them."""
    moves = [drop(checkpoint.tensors[name], reason) for name, reason in heads.dropped.items()]
    reduced = medusa is not None and medusa.draft_vocab_size < medusa.vocab_size
    whole = None if medusa is None else (medusa.vocab_size, medusa.target_hidden_size)
    for name, handle in heads.tensors.items():
        if name == TOKEN_MAP and not reduced:
            moves.append(drop(handle, "truncated_vocab_size says that the heads score the whole vocabulary"))
        elif medusa is not None and reduced and _is_to_logits(name) and handle.shape == whole:
            shape = (medusa.draft_vocab_size, medusa.target_hidden_size)
            moves.append(Move("select_rows", (handle.name, heads.tensors[TOKEN_MAP].name), name, handle.dtype, shape))
        elif name == TOKEN_MAP and handle.dtype == "I32":
            moves.append(Move("widen", (handle.name,), name, "I64", handle.shape))
        else:
            moves.append(copy(handle, name))
    return moves


def remedy_for_vllm(architecture: Architecture) -> Remedy | None:
    """vLLM's class does not borrow the target's head, but loads a copy of it."""
    medusa = architecture.expect(MedusaSpec)
    if medusa.lm_head != "target":
        return None
    note = "a copy of the target's, for vLLM"
    return Remedy(
        what="copies the target's head",
        architecture=replace(medusa, lm_head="shared"),
        changed=(FactOrigin(name="lm_head", value="shared", origin="from target", note=note),),
        moves=lambda outgoing: [*outgoing.renamed({}), outgoing.borrowed(SHARED_HEAD)],
    )
