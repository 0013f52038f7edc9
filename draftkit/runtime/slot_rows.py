"""Which entries of a slot cache the rows of one forward write and see.

S slots, B sequences, T rows of each.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor


class SlotRows:
    """Sequence b is in slot `slots[b]`, its rows are at `positions[b]`: int64 [B] and [B, T], below the capacity.

    A negative slot or position marks a row that is not there: it stores nothing, and its attention is zero. The other
    slots are distinct. `prompt`: they are those of a prompt or of a piece of it, all there, and nothing lies beyond
    them.

    The kernels read these two tensors and nothing else. What is derived from them here serves the torch references,
    once for all layers of a forward, and looks at values on the host, for a prompt on a GPU aside.
    """

    def __init__(self, slots: Tensor, positions: Tensor, *, prompt: bool = False):
        self.slots = slots.contiguous()
        self.positions = positions.contiguous()
        self.prompt = prompt
        self._biases: dict[object, Tensor] = {}
        self._copies: dict[torch.device, SlotRows] = {}

    def on(self, device: torch.device) -> SlotRows:
        """These rows for tensors on a device: there, where the target is spread over several."""
        if device == self.slots.device:
            return self
        if device not in self._copies:
            self._copies[device] = SlotRows(self.slots.to(device), self.positions.to(device), prompt=self.prompt)
        return self._copies[device]

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
    ) -> Tensor:
        """What is added to scores over positions 0 … `length` − 1: [B, 1, repeats · T, length], the T rows repeated.

        0 where a row may look: at itself and at earlier positions, `window` of them in all, and where it is
        `bidirectional` at the sequence's later rows, as far ahead as back; −∞ elsewhere. `anchored`: the window of all
        rows is that of the sequence's first, and bounds no later row. `chunk`: nothing before a row's own chunk of so
        many positions. Rows that are not there may look anywhere; what they see is not used.
        """
        key = length, window, repeats, dtype, bidirectional, anchored, chunk
        if key not in self._biases:
            index = torch.arange(length, device=self.positions.device)
            row = self.positions[:, None].expand(-1, repeats, -1).reshape(len(self.slots), 1, -1, 1)
            hidden = index > (row.amax(2, keepdim=True).expand_as(row) if bidirectional else row)
            if window is not None:
                hidden = hidden | (index <= (row[:, :, :1] if anchored else row) - window)
                if bidirectional and not anchored:
                    hidden |= index >= row + window
            if chunk is not None:
                hidden = hidden | (index < row // chunk * chunk)
            if not self.complete:  # a row that sees nothing is NaN, which some bfloat16 products spread
                hidden &= row >= 0
            self._biases[key] = torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf)
        return self._biases[key]

    @cached_property
    def _slot_list(self) -> list[int]:
        return self.slots.tolist()

    @cached_property
    def _part(self) -> slice | Tensor:
        """What selects the sequences from a pool."""
        if self.prompt and self.slots.is_cuda:  # a copy of them costs less than waiting for the device
            return self.slots
        slots = self._slot_list
        span = slice(slots[0], slots[0] + len(slots))
        if slots[0] >= 0 and slots == list(range(span.start, span.stop)):
            return span
        return self.slots.clamp(min=0)  # what a row without a sequence reads is not used
