"""Drafting with a target's own multi-token prediction head, which feeds on its state as EAGLE's does.

Of a head with several modules that are run, each draft step takes the next in turn (`MtpInTurnDrafter`).
A step runs its module over all rows that the step before has run, each with that one's state and with the token one
later; the rows stay at their positions. The last K − 1 rows of a round read drafts, which the target may reject: those
that did read rejected ones are run again in the next round, with what it has said.

Source: `multi_module_mtp/speculator.py` of vLLM 0.32, its second runner; the first runs module 0 alone, but for
Step-3.5. A module has one cache there: one that is run more than once in a round overwrites its keys with those of a
later step, and sees these in the next round, so that drafts depend on where the rounds began. Here each step has a
cache, and those of one module become equal at the end of a round: the prompt's keys of every step are needed in the
first, which vLLM runs together with the prompt.

S slots, B sequences, R rows, K steps, H the target's width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import CONFIG_MAPPING, PreTrainedModel, PreTrainedTokenizerBase

from draftkit.layout.families.mtp import MtpSpec
from draftkit.layout.folder import Draft
from draftkit.models.mtp import MtpModel, load_mtp, one_layer
from draftkit.runtime.attention import NAME as ATTENTION
from draftkit.runtime.cache import SlotCache
from draftkit.runtime.drafters.chain import ChainDrafter
from draftkit.runtime.drafters.protocol import Committed, Draw, NewSequence, Proposal
from draftkit.runtime.memory_plan import SlotBytes
from draftkit.runtime.ops.expand_rows import expand_rows
from draftkit.targets.attention import chooses
from draftkit.targets.footprint import footprint
from draftkit.targets.states import FINAL, AuxLayers


class MtpDrafter(ChainDrafter[MtpModel]):
    """`num_layers`: those of the target."""

    def __init__(self, model: MtpModel, num_layers: int):
        super().__init__(model)
        self.joins_prompts = not chooses(model.layer_config)
        self._num_layers = num_layers

    @property
    def aux_layers(self) -> AuxLayers:
        return AuxLayers((FINAL if self.model.spec.hidden_state == "after_norm" else self._num_layers,))


class MtpInTurnDrafter(MtpDrafter):
    """`tokens` int64 [S + 1, K − 1] and `states` [S + 1, K − 1, H]: each slot's last rows; the one beyond the slots
    belongs to rows of a batch without a sequence. It drafts no tree: each step has a cache of its own."""

    expand = None  # type: ignore[assignment]

    def __init__(self, model: MtpModel, num_layers: int):
        super().__init__(model, num_layers)
        self.allocate(0, 0, 1)

    def allocate(self, num_slots: int, capacity: int, k: int) -> None:
        self.caches = [SlotCache(num_slots, capacity) for _ in range(k)]
        weight = next(self.model.parameters())
        self.tokens = weight.new_zeros(num_slots + 1, k - 1, dtype=torch.int64)
        self.states = weight.new_zeros(num_slots + 1, k - 1, self.model.spec.target_hidden_size)

    @property
    def overlap(self) -> int:
        """Each step's last row has waited for one token more than that of the step before."""
        return len(self.caches)

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[NewSequence]) -> None:
        for prompt in prompts:  # each by itself, as every step has other rows
            self._take_in_one(prompt)

    def _take_in_one(self, prompt: NewSequence) -> None:
        assert prompt.features is not None
        slot, tokens, hidden = prompt.slot, prompt.tokens[None, 1:], self.model.fuse(prompt.features[None, :-1])
        kept = min(self.tokens.shape[1], tokens.shape[1])
        if kept:
            self.tokens[slot, -kept:], self.states[slot, -kept:] = tokens[0, -kept:], hidden[0, -kept:]
        slots = torch.tensor([slot], device=tokens.device)
        for step, cache in enumerate(self.caches):
            rows = tokens.shape[1] - step  # of which the tokens are known
            if rows <= 0:
                return
            positions = prompt.begin + torch.arange(rows, device=tokens.device)[None]
            kv = cache.rows(slots, positions, prompt.begin + rows, prompt=True)
            hidden = self.model(tokens[:, step:], hidden[:, :rows], positions, step=step, kv=kv).feedback

    @torch.inference_mode()
    def propose(self, committed: Committed, k: int, draw: Draw) -> Proposal:
        assert committed.features is not None
        slots, steps = committed.slots, len(self.caches)
        again = (steps - committed.counts).clamp(min=0)  # rows that have read a rejected draft, or were a prompt's last
        columns = torch.arange(max(steps, committed.tokens.shape[1]), device=slots.device)
        window = (steps - 1 - again)[:, None] + columns
        known = torch.cat((self.tokens[slots], committed.tokens), dim=1)
        states = torch.cat((self.states[slots], self.model.fuse(committed.features)), dim=1)
        rows = expand_rows(
            known.gather(1, window),
            committed.counts + again,
            committed.start - 1 - again,  # below zero where there are no such rows
            committed.length,
            hidden=states.take_along_dim(window[..., None], 1),
        )
        assert rows.hidden is not None
        last = rows.sampled  # [B, 1]
        newest = last + torch.arange(2 - steps, 1, device=slots.device)
        self.tokens[slots] = rows.tokens.gather(1, newest)
        self.states[slots] = rows.hidden.take_along_dim(newest[..., None], 1)
        tokens, hidden, drafted = rows.tokens, rows.hidden, []
        for step, cache in enumerate(self.caches):  # all, though fewer be drafted: the next round may draft more
            kv = cache.rows(slots, rows.positions, committed.length)
            head_input, hidden = self.model(tokens, hidden, rows.positions, step=step, kv=kv)
            row = rows.drafting(head_input)[:, 0]
            drafted.append(draw(step, self.model.logits(row), self.model.target_ids) if step < k else tokens[:, 0])
            tokens = tokens.roll(-1, 1).scatter(1, last, drafted[-1][:, None])
        modules = self.model.spec.modules_run
        for step in range(steps - modules):
            final = steps - 1 - (steps - 1 - step) % modules  # the last step of the same module
            self.caches[step].take_over(self.caches[final], slots, committed.length)
        return Proposal(torch.stack(drafted[:k], dim=1))


def load_drafter(draft: Draft, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> MtpDrafter:
    """The drafter of a target's own head."""
    model = load_mtp(draft, target, attention=ATTENTION)
    drafter = MtpInTurnDrafter if model.spec.modules_run > 1 else MtpDrafter
    return drafter(model, target.config.get_text_config().num_hidden_layers)


def slot_bytes(draft: Draft, dtype: torch.dtype) -> SlotBytes:
    """The bytes of a slot: keys and values, or their latents; of modules that are used in turn, those of each step."""
    spec = draft.spec.architecture.expect(MtpSpec)
    stated = dict(spec.config)
    config = CONFIG_MAPPING[str(stated.pop("model_type"))].from_dict(stated).get_text_config()
    layer = footprint(one_layer(config))
    return lambda capacity, k: (k if spec.modules_run > 1 else 1) * layer.slot_bytes(dtype, capacity, k)
