"""Which entries of a slot cache the rows of one forward write and see.

S slots, B sequences, T rows of each.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class Branches(NamedTuple):
    """What the rows of a tree see of each other, where entries say nothing of it.

    The newest M entries of a sequence begin at `first` int64 [B, 1]; what lies before is seen by all. `places` int64
    [B, M] are their positions in the text, those of the T rows the last. `visible` bool [B, T, M]: which of them each
    row sees, itself included.
    """

    first: Tensor
    places: Tensor
    visible: Tensor

    def on(self, device: torch.device) -> Branches:
        return Branches(*(tensor.to(device) for tensor in self))

    @property
    def entries(self) -> Tensor:
        """The entries of the rows: int64 [B, T]."""
        most, count = self.places.shape[1], self.visible.shape[1]
        return self.first + torch.arange(most - count, most, device=self.first.device)

    @property
    def of_rows(self) -> Tensor:
        """The places of the rows: int64 [B, T]."""
        return self.places[:, -self.visible.shape[1] :]

    def seen(self, window: int | None, chunk: int | None, sink_tokens: int = 0) -> Tensor:
        """bool [B, T, M]: `visible` within a window and a chunk of places, as `SlotRows.bias` has them."""
        row, place = self.of_rows[:, :, None], self.places[:, None]
        seen = self.visible
        if window is not None:
            seen = seen & ((place > row - window) | (place < sink_tokens))
        if chunk is not None:
            seen = seen & (place >= row // chunk * chunk)
        return seen


class SlotRows:
    """Sequence b is in slot `slots[b]`, its rows are at `positions[b]`: int64 [B] and [B, T], below the capacity.

    A negative slot or position marks a row that is not there: it stores nothing, and its attention is zero. The other
    slots are distinct. `prompt`: they are those of a prompt or of a piece of it, all there, and nothing lies beyond
    them. `branches`: those of a tree, where `positions` are their entries alone.

    The kernels read these two tensors and nothing else. What is derived from them here serves the torch references,
    once for all layers of a forward, and looks at values on the host, for a prompt on a GPU aside.
    """

    def __init__(self, slots: Tensor, positions: Tensor, *, prompt: bool = False, branches: Branches | None = None):
        self.branches = branches
        self.slots = slots.contiguous()
        self.positions = positions.contiguous()
        self.prompt = prompt
        self._biases: dict[object, Tensor] = {}
        self._seen: dict[object, Tensor] = {}
        self._copies: dict[torch.device, SlotRows] = {}

    def on(self, device: torch.device) -> SlotRows:
        """A copy of these rows for tensors on another device, as a target that is spread over several needs."""
        if device == self.slots.device:
            return self
        if device not in self._copies:
            branches = None if self.branches is None else self.branches.on(device)
            slots, positions = self.slots.to(device), self.positions.to(device)
            self._copies[device] = SlotRows(slots, positions, prompt=self.prompt, branches=branches)
        return self._copies[device]

    @property
    def places(self) -> Tensor:
        """int64 [B, T]: the positions of the rows in the text."""
        return self.positions if self.branches is None else self.branches.of_rows

    def seen(self, window: int | None, chunk: int | None, sink_tokens: int) -> Tensor:
        """`Branches.seen` as int32 [B, T, ⌈M/32⌉], of which each has 32 entries as bits, the first as its lowest: once
        for all layers of a forward."""
        assert self.branches is not None
        key = window, chunk, sink_tokens
        if key not in self._seen:
            seen = self.branches.seen(*key)
            words = pad(seen, (0, -seen.shape[2] % 32)).unflatten(2, (-1, 32)).int()
            bits = torch.arange(32, dtype=torch.int32, device=seen.device)
            self._seen[key] = (words << bits).sum(3, dtype=torch.int32)
        return self._seen[key]

    @cached_property
    def complete(self) -> bool:
        """Whether all rows are there; those of a prompt are."""
        return self.prompt or (min(self._slot_list) >= 0 and int(self.positions.min()) >= 0)

    @cached_property
    def present(self) -> Tensor:
        """bool [B, T]: the rows that are there."""
        return (self.positions >= 0) & (self.slots >= 0)[:, None]

    @cached_property
    def entries(self) -> tuple[Tensor, Tensor]:
        """Slots and positions of the rows, [B, 1] and [B, T]; where not `complete`, [n] of the n `present` ones."""
        slots = self.slots[:, None]
        return (
            (slots, self.positions)
            if self.complete
            else (slots.expand_as(self.positions)[self.present], self.positions[self.present])
        )

    def kept(self, of_rows: Tensor) -> Tensor:
        """What is stored of rows [B, T, …], as `entries` are."""
        return of_rows if self.complete else of_rows[self.present]

    def of_sequences(self, pool: Tensor) -> Tensor:
        """The sequences' part [B, …] of a pool [S, …]: a view where their slots are consecutive."""
        part = self._part
        if isinstance(part, Tensor):
            return pool.index_select(0, part)
        return pool if part == slice(0, pool.shape[0]) else pool[part]

    def bias(
        self,
        length: int,
        window: int | None,
        repeats: int,
        dtype: torch.dtype,
        *,
        bidirectional: bool = False,
        anchored: bool = False,
        chunk: int | None = None,
        sink_tokens: int = 0,
    ) -> Tensor:
        """What is added to scores over positions 0 … `length` − 1: [B, 1, repeats · T, length], the T rows repeated.

        0 where a row may look: at itself and at earlier positions, `window` of them in all, and where it is
        `bidirectional` at the sequence's later rows, as far ahead as back; −∞ elsewhere. `anchored`: the window of all
        rows is that of the sequence's first, and bounds no later row. `sink_tokens`: so many at the sequence's
        beginning are seen besides the window. `chunk`: nothing before a row's own chunk of so many positions. Rows that
        are not there may look anywhere; what they see is not used.
        """
        # A text for the length, as that of a trace is a symbol without a hash.
        key = str(length), window, repeats, dtype, bidirectional, anchored, chunk, sink_tokens
        if key not in self._biases and self.branches is not None:
            assert (bidirectional, anchored) == (False, False), "a block has no branches"
            hidden = self._hidden(self.branches, length, window, chunk, sink_tokens).repeat(1, repeats, 1)[:, None]
            self._biases[key] = torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf)
        if key not in self._biases:
            index = torch.arange(length, device=self.positions.device)
            row = self.positions[:, None].expand(-1, repeats, -1).reshape(self.slots.shape[0], 1, -1, 1)
            hidden = index > (row.amax(2, keepdim=True).expand_as(row) if bidirectional else row)
            if window is not None:
                before = index <= (row[:, :, :1] if anchored else row) - window
                hidden = hidden | (before & (index >= sink_tokens))
                if bidirectional and not anchored:
                    hidden |= index >= row + window
            if chunk is not None:
                hidden = hidden | (index < row // chunk * chunk)
            if not self.complete:  # a row that sees nothing is NaN, which some bfloat16 products spread
                hidden &= row >= 0
            self._biases[key] = torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf)
        return self._biases[key]

    def _hidden(
        self, branches: Branches, length: int, window: int | None, chunk: int | None, sink_tokens: int
    ) -> Tensor:
        """bool [B, T, length]: what the rows of a tree do not see."""
        entry = torch.arange(length, device=self.slots.device)
        newest = entry - branches.first  # [B, length]
        row = branches.of_rows[:, :, None]
        seen = (newest < 0)[:, None].expand(-1, row.shape[1], -1)
        if window is not None:
            seen = seen & ((entry > row - window) | (entry < sink_tokens))
        if chunk is not None:
            seen = seen & (entry >= row // chunk * chunk)
        most = branches.places.shape[1]
        inside = (newest >= 0) & (newest < most)
        among = branches.seen(window, chunk, sink_tokens).take_along_dim(newest.clamp(0, most - 1)[:, None], 2)
        hidden = ~(seen | (inside[:, None] & among))
        return hidden if self.complete else hidden & self.present[:, :, None]

    @cached_property
    def _slot_list(self) -> list[int]:
        return self.slots.tolist()

    @cached_property
    def _part(self) -> slice | Tensor:
        """The index that selects the sequences' slots from a pool."""
        if self.prompt and self.slots.is_cuda:  # a copy of them costs less than waiting for the device
            return self.slots
        slots = self._slot_list
        span = slice(slots[0], slots[0] + len(slots))
        if slots[0] >= 0 and slots == list(range(span.start, span.stop)):
            return span
        return self.slots.clamp(min=0)  # what a row without a sequence reads is not used
