"""The output layer of a draft, and the draft with some of its rows. Vd tokens of a draft, V of its target, H width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftkit.convert.operations import Move, carry_out
from draftkit.convert.target_tensors import target_head
from draftkit.data.vocabulary import choose_vocabulary
from draftkit.errors import FormatError
from draftkit.io.dtypes import FLOATS, tensor_bytes
from draftkit.io.handles import TensorHandle, memory_handle
from draftkit.layout.families.causal_lm import CausalLMSpec
from draftkit.layout.families.eagle import EagleSpec
from draftkit.layout.families.mlp_speculator import MlpSpeculatorSpec
from draftkit.layout.folder import Draft
from draftkit.layout.target import read_target_facts
from draftkit.prepare.vocabulary import Vocabulary
from draftkit.prepare.vocabulary_tensors import vocabulary_tensors

HEAD, OFFSETS = "lm_head.weight", "d2t"


@dataclass(frozen=True)
class Head:
    """What a draft proposes with. `ids` int64 [Vd]: its tokens; row i has the logit of `ids[i]`.

    `weights` [Vd, H]: the draft's own tensor or the target's; of a causal language model all V rows, whatever `ids`.
    """

    ids: Tensor
    weights: TensorHandle

    def __len__(self) -> int:
        return len(self.ids)

    def bytes_of(self, size: int) -> int:
        """What a draft step reads of `size` rows."""
        return tensor_bytes(self.weights.dtype, (size, *self.weights.shape[1:]))

    def choose(self, counts: Tensor, size: int, kept: Sequence[int]) -> Tensor:
        """The rows int64 [size] of the tokens most frequent in counts int64 [V], those of `kept` among them, in the
        order of their tokens."""
        ids, rows = self.ids.sort()
        places = torch.searchsorted(ids, torch.tensor(kept, dtype=torch.int64))
        return rows[choose_vocabulary(counts[ids], size, places.tolist())]


def open_head(draft: Draft, owner: Vocabulary) -> Head:
    """The head of a draft, or the one that it borrows of `owner`, its target; no weight is read.

    Raises `FormatError` for heads that nothing could run over fewer tokens, and for quantized ones.
    """
    match draft.spec.architecture:
        case EagleSpec() as eagle:
            head = _eagle_head(draft, eagle, owner)
        case CausalLMSpec() as lm:
            head = _causal_lm_head(draft, lm)
        case MlpSpeculatorSpec():
            raise _refusal(draft, "MLP speculators have a head for each step, and no map from its rows to tokens")
        case _:
            raise _refusal(draft, "Medusa has a head for each position, and engines do not load its token_map")
    if head.weights.dtype not in FLOATS:
        raise FormatError(
            f"the head is quantized: {head.weights.dtype}", where=draft.path, expected=" or ".join(FLOATS)
        )
    return head


def with_rows(draft: Draft, head: Head, rows: Tensor) -> Draft:
    """The draft with some rows int64 [n] of its head. Of a borrowed head they become the draft's own, bit for bit."""
    ids = head.ids[rows]
    architecture, tensors = draft.spec.architecture, draft.tensors
    if isinstance(architecture, CausalLMSpec):
        spec = replace(draft.spec, architecture=replace(architecture, head_ids=tuple(ids.tolist())))
        return replace(draft, spec=spec)
    assert isinstance(architecture, EagleSpec)
    eagle = replace(architecture, draft_vocab_size=len(ids), lm_head="draft")
    offsets = memory_handle(OFFSETS, ids - torch.arange(len(ids)), draft.path)
    tensors = tensors | {HEAD: _selected(head.weights, rows), OFFSETS: offsets}
    return replace(draft, spec=replace(draft.spec, architecture=eagle), tensors=tensors)


def _eagle_head(draft: Draft, eagle: EagleSpec, owner: Vocabulary) -> Head:
    if eagle.lm_head == "draft":
        weights = draft.tensors[HEAD]
    else:
        weights = target_head(read_target_facts(owner.folder, owner.name, owner.revision))
    numbers = torch.arange(eagle.draft_vocab_size)
    return Head(numbers + draft.tensors[OFFSETS].load() if eagle.reduced_vocabulary else numbers, weights)


def _causal_lm_head(draft: Draft, lm: CausalLMSpec) -> Head:
    embedding, output, *_ = vocabulary_tensors(lm)
    ids = torch.arange(lm.vocab_size) if lm.head_ids is None else torch.tensor(lm.head_ids)
    return Head(ids, draft.tensors[output if output in draft.tensors else embedding])


def _selected(weights: TensorHandle, rows: Tensor) -> TensorHandle:
    numbers = memory_handle("rows", rows, weights.origin)
    move = Move("select_rows", (weights.name, "rows"), HEAD, weights.dtype, (len(rows), *weights.shape[1:]))
    return carry_out([move], {weights.name: weights, "rows": numbers})[HEAD]


def _refusal(draft: Draft, reason: str) -> FormatError:
    return FormatError(reason, where=draft.path, expected="an EAGLE-style draft or a causal language model")
