"""The output layer of a draft, and the draft with some of its rows. Vd tokens of a draft, V of its target, H width."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from draftkit.data.vocabulary import choose_vocabulary
from draftkit.errors import FormatError
from draftkit.io.dtypes import FLOATS, tensor_bytes
from draftkit.io.handles import TensorHandle
from draftkit.layout.folder import Draft
from draftkit.prepare.vocabulary import Vocabulary


@dataclass(frozen=True)
class Head:
    """The output layer that a draft proposes with. `ids` int64 [Vd]: its tokens; row i has the logit of `ids[i]`.

    `weights` [Vd, H]: the draft's own tensor or the target's; of a causal language model all V rows, whatever `ids`.
    """

    ids: Tensor
    weights: TensorHandle

    def __len__(self) -> int:
        return len(self.ids)

    def bytes_of(self, size: int) -> int:
        """The bytes of `size` rows, which a draft step reads."""
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
    if (reason := draft.spec.architecture.whole_head) is not None:
        raise FormatError(reason, where=draft.path, expected="an EAGLE-style draft or a causal language model")
    head: Head = _family(draft).head_of(draft, owner)
    if head.weights.dtype not in FLOATS:
        raise FormatError(
            f"the head is quantized: {head.weights.dtype}", where=draft.path, expected=" or ".join(FLOATS)
        )
    return head


def with_rows(draft: Draft, head: Head, rows: Tensor) -> Draft:
    """The draft with some rows int64 [n] of its head. Of a borrowed head they become the draft's own, bit for bit."""
    cut: Draft = _family(draft).with_rows(draft, head, rows)
    return cut


def _family(draft: Draft) -> ModuleType:
    return importlib.import_module(f"draftkit.prepare.{draft.spec.architecture.family}")
