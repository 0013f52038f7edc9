"""A small causal LM with the tokenizer of a target.

As in Qwama (turboderp, Qwen2-0.5B with the tokenizer of Llama 3): tokens of both vocabularies keep their rows, the
others are put together from the donor's. Everything between embedding and output layer stays as it was.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from draftkit.convert.api import inspect_checkpoint
from draftkit.convert.unified import unify, write_draft
from draftkit.errors import DraftkitError, FormatError
from draftkit.hub.locate import Located, locate
from draftkit.io.handles import Chunk, TensorHandle, raw_memory
from draftkit.io.records import to_dict
from draftkit.layout.decoder import DENSE_MODEL_TYPES, decoder_of_config
from draftkit.layout.families.causal_lm import CausalLMSpec
from draftkit.layout.folder import Draft, tokenizer_files
from draftkit.layout.provenance import FactOrigin
from draftkit.prepare.causal_lm import vocabulary_tensors
from draftkit.prepare.matching import Match, check_kind, count_kinds, match_vocabularies
from draftkit.prepare.vocabulary import TOKEN_KEYS, Vocabulary, open_vocabulary


@dataclass(frozen=True)
class Transplant:
    """A planned transplant; no weight has been read. `matches`: for every row of the target, what it is made of."""

    donor: Vocabulary
    target: Vocabulary
    matches: tuple[Match, ...]
    draft: Draft

    def write(self, out: Path, *, force: bool = False) -> Path:
        """Write the draft, one tensor in memory at a time. Raises `DraftkitError`; then `out` is as it was."""
        write_draft(out, self.draft, force=force)
        return out

    def to_dict(self) -> dict[str, object]:
        """What becomes of the rows, in JSON values."""
        target, donor = self.target, self.donor
        return {
            "schema": 1,
            "donor": donor.name,
            "tokenizer_of": target.name,
            "vocab_size": {"donor": donor.size, "target": target.size},
            "rows": count_kinds(self.matches),
            "roles": [
                {"target": target.named[row], "donor": donor.named[match.donors[0]]}
                for row, match in enumerate(self.matches)
                if match.kind == "role"
            ],
            "tokens_without_a_row": target.tokenizer.convert_ids_to_tokens(target.beyond),
            "facts": [to_dict(fact) for fact in self.draft.provenance.facts],
        }


def plan_transplant(
    donor: str,
    tokenizer_of: str,
    *,
    weighting: Weighting = "mean",
    layers: str | None = None,
    intermediate: int | None = None,
) -> Transplant:
    """Match the vocabularies of two models, and plan the draft that has the donor's layers and the target's tokens.

    Both are folders, Hub ids or zoo models; of the target no weights are read. `weighting`: how the row of a token is
    put together that the donor writes as several (`shares`). `layers` (a number, or a list as 0,1,5) and `intermediate`
    (MLP channels) trim the donor. Raises `DraftkitError` for donors that are no plain causal LM or are quantized, and
    for tokenizers whose tokens cannot be compared.
    """
    target = open_vocabulary(locate(tokenizer_of, weights=False))
    check_kind(target.tokenizer, target.name)
    model = _open_donor(donor)
    own = open_vocabulary(Located(model.path, donor))
    matches = match_vocabularies(own, target)
    origin = ", ".join(f"{count} {kind}" for kind, count in count_kinds(matches).items() if count)
    facts = [FactOrigin(name="tokenizer", value=target.name, origin="from target", note=origin)]
    if layers is not None:
        model, kept = keep_layers(model, layers)
        facts.append(_kept("layers", ",".join(map(str, kept))))
    if intermediate is not None:
        model = keep_channels(model, intermediate)
        facts.append(_kept("intermediate_size", str(intermediate)))
    draft = _with_vocabulary(model, own, target, matches, weighting)
    provenance = replace(
        draft.provenance,
        facts=(*draft.provenance.facts, *facts),
        target=target.name,
        target_revision=target.revision,
    )
    return Transplant(own, target, tuple(matches), replace(draft, provenance=provenance))


def _open_donor(source: str) -> Draft:
    """The donor in the layout. Raises `FormatError` for drafts of other kinds and for quantized weights."""
    found = inspect_checkpoint(source)
    draft = found if isinstance(found, Draft) else unify(found.checkpoint, found.plan, None)
    if draft.spec.method != "draft-model":
        raise FormatError(
            f"{source} is a draft of the kind {draft.spec.method}", where=draft.path, expected="a plain causal LM"
        )
    if draft.spec.quantization is not None:
        raise FormatError(f"the weights of {source} are quantized", where=draft.path, hint="pass the original model")
    return draft


def _kept(name: str, value: str) -> FactOrigin:
    return FactOrigin(name=name, value=value, origin="overridden", note="kept of the donor")


def _with_vocabulary(
    model: Draft, donor: Vocabulary, target: Vocabulary, matches: Sequence[Match], weighting: Weighting
) -> Draft:
    """The model with other rows, ids and tokenizer files."""
    lm = model.spec.architecture.expect(CausalLMSpec)
    lengths = [len(donor.named.get(row, "")) for row in range(donor.size)]
    tensors = dict(model.tensors)
    for name in vocabulary_tensors(lm):
        if name in tensors:  # a tied output layer may be stored or not
            tensors[name] = transplanted_rows(tensors[name], matches, lengths, weighting)
    ids = {key: target.token_ids.get(key) for key in TOKEN_KEYS if key in lm.config or key in target.token_ids}
    architecture = replace(
        lm, config=lm.config | ids | {"vocab_size": target.size}, vocab_size=target.size, head_ids=None
    )
    spec = replace(model.spec, architecture=architecture)
    spec.check_tensors({t.name: (t.dtype, t.shape) for t in tensors.values()}, model.path)
    return replace(model, spec=spec, tensors=tensors, files=tokenizer_files(target.folder))


Weighting = Literal["mean", "length"]
BLOCK_ROWS = 1024  # of the result in memory at once, in float32


def shares(weighting: Weighting, lengths: Sequence[int]) -> list[float]:
    """What part each piece has in the row of a token, from the pieces' lengths in bytes; both sum to 1.

    `mean`: all the same (Qwama). `length`: by bytes, as a long piece says more of what the token means. Embedding and
    output layer go by the same shares, each with rows of its own. Measured with zoo:target on its own answers, under a
    tokenizer of 1,825 tokens of which 755 are made of pieces: `mean` has the right token on top at 69.2 % of the places
    and takes 1.01 bits a byte, `length` 68.5 % and 0.99. The last piece alone as embedding is no better (68.8 %, 0.99),
    the first alone as output row worse (69.3 %, 1.32: all tokens with that beginning get its logit).
    """
    if weighting == "mean":
        return [1 / len(lengths)] * len(lengths)
    return [length / sum(lengths) for length in lengths]


def transplanted_rows(
    table: TensorHandle, matches: Sequence[Match], lengths: Sequence[int], weighting: Weighting
) -> TensorHandle:
    """A tensor [V', H] or [V'] of the donor with the rows of another vocabulary: [V, H] or [V], in its dtype.

    `lengths` [V']: bytes of each donor token, 0 for rows without one. A row of one donor token is a copy, bit for bit;
    one of several is their sum by their `shares`; one of none is the average of the donor's tokens, whose logit is the
    average of theirs and so never the largest. Computed in float32, block by block, when the handle is read.
    """
    shape = (len(matches), *table.shape[1:])
    return replace(table, shape=shape, reader=partial(_stream, table, matches, lengths, weighting))


def _stream(
    table: TensorHandle, matches: Sequence[Match], lengths: Sequence[int], weighting: Weighting, size: int
) -> Iterator[Chunk]:
    rows = table.load()
    average = _average(rows, torch.tensor([row for row, length in enumerate(lengths) if length]))
    for begin in range(0, len(matches), BLOCK_ROWS):
        block = _block(rows, average, matches[begin : begin + BLOCK_ROWS], lengths, weighting)
        memory = raw_memory(block)
        for start in range(0, len(memory), size):
            yield memory[start : start + size]


def _average(rows: Tensor, used: Tensor) -> Tensor:
    """The average of the rows `used`, in float32 [H] or []."""
    total = torch.zeros(rows.shape[1:], dtype=torch.float64)
    for block in used.split(BLOCK_ROWS):
        total += rows[block].sum(dim=0, dtype=torch.float64)
    return (total / max(len(used), 1)).float()


def _block(
    rows: Tensor, average: Tensor, matches: Sequence[Match], lengths: Sequence[int], weighting: Weighting
) -> Tensor:
    """The rows of some matches, in the donor's dtype."""
    block = average.to(rows.dtype).expand(len(matches), *average.shape).clone()
    copied = [(row, match.donors[0]) for row, match in enumerate(matches) if len(match.donors) == 1]
    if copied:
        to, origin = torch.tensor(copied).unbind(1)
        block[to] = rows[origin]
    summed = [row for row, match in enumerate(matches) if len(match.donors) > 1]
    if summed:
        pieces = [(place, token) for place, row in enumerate(summed) for token in matches[row].donors]
        parts = [shares(weighting, [lengths[token] for token in matches[row].donors]) for row in summed]
        place, origin = torch.tensor(pieces).unbind(1)
        weights = torch.tensor([part for row in parts for part in row]).view(-1, *[1] * average.dim())
        total = torch.zeros(len(summed), *average.shape)
        block[summed] = total.index_add_(0, place, weights * rows[origin].float()).to(rows.dtype)
    return block


LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
# How the channels of a gated MLP lie in its tensors: the dimension that counts them.
CHANNELS = {
    "mlp.gate_proj.weight": 0,
    "mlp.up_proj.weight": 0,
    "mlp.down_proj.weight": 1,
    "mlp.gate_proj.bias": 0,
    "mlp.up_proj.bias": 0,
}


def parse_layers(text: str, num_layers: int) -> tuple[int, ...]:
    """`12`: that many layers; `0,1,5`: these. Raises `DraftkitError` for layers that there are not."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    chosen = evenly_spread(numbers[0], num_layers) if "," not in text and numbers else tuple(numbers)
    if not chosen or list(chosen) != sorted(set(chosen)) or not 0 <= chosen[0] <= chosen[-1] < num_layers:
        raise DraftkitError(
            f"layers {text}", expected=f"a number from 1 to {num_layers}, or different layers in order, as 0,1,5"
        )
    return chosen


def evenly_spread(count: int, num_layers: int) -> tuple[int, ...]:
    """`count` of the layers at even distances, the first and the last among them; one layer is the first."""
    if not 1 <= count <= num_layers:
        return ()
    return tuple(round(index * (num_layers - 1) / max(count - 1, 1)) for index in range(count))


def keep_layers(draft: Draft, text: str) -> tuple[Draft, tuple[int, ...]]:
    """The draft with the layers that `parse_layers` reads from `text`, in their order, and their numbers."""
    lm = _dense(draft)
    layers = parse_layers(text, decoder_of_config(lm.config).num_hidden_layers)
    place = {layer: index for index, layer in enumerate(layers)}
    tensors = {}
    for name, handle in draft.tensors.items():
        if match := LAYER.fullmatch(name):
            if int(match[1]) not in place:
                continue
            name = f"model.layers.{place[int(match[1])]}.{match[2]}"
        tensors[name] = replace(handle, name=name)
    config = lm.config | {"num_hidden_layers": len(layers)}
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        config["layer_types"] = [kinds[layer] for layer in layers]
    elif config.get("use_sliding_window"):
        raise FormatError(
            "the config counts from which layer on attention slides", where=draft.path, expected="layer_types"
        )
    return _with_config(draft, config, tensors), layers


def keep_channels(draft: Draft, width: int) -> Draft:
    """The draft with the `width` channels of every MLP that have the largest product of norms, in their order.

    The norms are those of the channel's weights in gate, up and down: the product bounds what the channel adds.
    """
    lm = _dense(draft)
    full = decoder_of_config(lm.config).intermediate_size
    if not 1 <= width <= full:
        raise DraftkitError(f"an intermediate size of {width}", expected=f"1 to {full}")
    tensors = dict(draft.tensors)
    for index in range(decoder_of_config(lm.config).num_hidden_layers):
        prefix = f"model.layers.{index}."
        mlp = {part: tensors[prefix + part] for part in CHANNELS if prefix + part in tensors}
        kept = cache(partial(_strongest, mlp, width))
        tensors |= {prefix + part: _selected(handle, CHANNELS[part], width, kept) for part, handle in mlp.items()}
    return _with_config(draft, lm.config | {"intermediate_size": width}, tensors)


def _strongest(mlp: Mapping[str, TensorHandle], width: int) -> Tensor:
    """The channels to keep of one MLP, ascending: int64 [width]."""
    norms = [
        torch.linalg.vector_norm(mlp[part].load(), dim=1 - CHANNELS[part], dtype=torch.float32)
        for part in ("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")
    ]
    strength = norms[0] * norms[1] * norms[2]
    return strength.sort(descending=True, stable=True).indices[:width].sort().values


def _selected(handle: TensorHandle, dimension: int, width: int, kept: Callable[[], Tensor]) -> TensorHandle:
    """A tensor with the channels `kept` along one dimension, chosen when it is read."""

    def stream(size: int) -> Iterator[Chunk]:
        memory = raw_memory(handle.load().index_select(dimension, kept()))
        for start in range(0, len(memory), size):
            yield memory[start : start + size]

    shape = tuple(width if axis == dimension else length for axis, length in enumerate(handle.shape))
    return replace(handle, shape=shape, reader=stream)


def _dense(draft: Draft) -> CausalLMSpec:
    """The causal LM of a draft. Raises `FormatError` for families whose layers have other names or parts."""
    lm = draft.spec.architecture.expect(CausalLMSpec)
    kind = lm.config.get("model_type")
    if kind not in DENSE_MODEL_TYPES:
        raise FormatError(
            f"models of the type {kind} cannot be trimmed", where=draft.path, expected=" or ".join(DENSE_MODEL_TYPES)
        )
    return lm


def _with_config(draft: Draft, config: dict[str, object], tensors: dict[str, TensorHandle]) -> Draft:
    architecture = replace(draft.spec.architecture.expect(CausalLMSpec), config=config)
    return replace(draft, spec=replace(draft.spec, architecture=architecture), tensors=tensors)
