"""The output layer of an EAGLE-style draft: its own or its target's, with the map `d2t` from rows to tokens."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from draftkit.convert.export import target_head
from draftkit.convert.operations import Move, carry_out
from draftkit.io.handles import TensorHandle, memory_handle
from draftkit.layout.families.eagle import EagleSpec
from draftkit.layout.folder import Draft
from draftkit.layout.target import read_target_facts
from draftkit.prepare.head import Head
from draftkit.prepare.vocabulary import Vocabulary

HEAD, OFFSETS = "lm_head.weight", "d2t"


def head_of(draft: Draft, owner: Vocabulary) -> Head:
    """The draft's head, or the one that it borrows from its target."""
    eagle = draft.spec.architecture.expect(EagleSpec)
    if eagle.lm_head == "draft":
        weights = draft.tensors[HEAD]
    else:
        weights = target_head(read_target_facts(owner.folder, owner.name, owner.revision))
    numbers = torch.arange(eagle.draft_vocab_size)
    return Head(numbers + draft.tensors[OFFSETS].load() if eagle.reduced_vocabulary else numbers, weights)


def with_rows(draft: Draft, head: Head, rows: Tensor) -> Draft:
    """The draft with fewer rows and their map. Of a borrowed head they become the draft's own, bit for bit."""
    ids = head.ids[rows]
    eagle = replace(draft.spec.architecture.expect(EagleSpec), draft_vocab_size=len(ids), lm_head="draft")
    offsets = memory_handle(OFFSETS, ids - torch.arange(len(ids)), draft.path)
    tensors = draft.tensors | {HEAD: _selected(head.weights, rows), OFFSETS: offsets}
    return replace(draft, spec=replace(draft.spec, architecture=eagle), tensors=tensors)


def _selected(weights: TensorHandle, rows: Tensor) -> TensorHandle:
    numbers = memory_handle("rows", rows, weights.origin)
    move = Move("select_rows", (weights.name, "rows"), HEAD, weights.dtype, (len(rows), *weights.shape[1:]))
    return carry_out([move], {weights.name: weights, "rows": numbers})[HEAD]
