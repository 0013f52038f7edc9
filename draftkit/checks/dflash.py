"""The convention of a block drafter's rows, told by its weights alone: a file need not state it, and no target is
run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftkit import zoo
from draftkit.checks.registry import check_unless
from draftkit.finding import Finding
from draftkit.io.jsonl import read_lines
from draftkit.layout.families.dflash import DFlashSpec
from draftkit.layout.folder import Draft
from draftkit.models.dflash import DFlashModel, load_dflash
from draftkit.targets.chat import token_ids

ROWS = 4  # the first ones of a block, which tell most
PASSAGES, CHUNK = 1024, 64  # how many passages of text are asked of, and how many are in memory at a time
DECIDED = 3.0  # standard errors, from which on a draft's rows have said what they are


@check_unless("not-finite")
def moved_rows(draft: Draft, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Iterator[Finding]:
    """Rows that know the tokens of other places than the spec says. Of the target, its embedding and head are read."""
    spec = draft.spec.architecture.expect(DFlashSpec)
    if spec.block_size < ROWS:
        return
    sure = sure_of_own_places(load_dflash(draft, model, attention="eager"), bundled_passages(tokenizer))
    found, known = ("fill-in", "their own places") if sure > 0 else ("anchor-first", "the places after their own")
    if abs(sure) >= DECIDED and found != spec.slots:
        yield Finding(
            "slots",
            "warning",
            f"rows are taken for {spec.slots}, and without any context they know more of the tokens in {known} "
            f"({abs(sure):.1f} standard errors)",
            fix=f"--set slots={found}",
            source="draftkit; vllm-project/vllm #56792",
        )


def bundled_passages(tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Passages int64 [N, ROWS] from all over the bundled prompts."""
    texts = [token_ids(tokenizer, "\n".join(_texts(row))) for _, row in read_lines(zoo.prompts_path())]
    found = torch.tensor([text[i : i + ROWS] for text in texts for i in range(len(text) - ROWS + 1)])
    return found[torch.randperm(len(found), generator=torch.Generator().manual_seed(0))[:PASSAGES]]


@torch.no_grad()
def sure_of_own_places(model: DFlashModel, passages: Tensor) -> float:
    """By how many standard errors the rows of a block predict the tokens in their own places rather than those in the
    next ones; below 0 it is the next ones.

    Each passage int64 [N, ROWS] begins a block that has no context. Of each of its further tokens it is asked whether
    the row in its place or the row before knows it better: by its log-probability there, less the mean of what the same
    row of other passages gives it.
    """
    known = _draft_ids(model, passages)
    usable = (known >= 0).all(dim=1).nonzero()[:, 0]
    gains = [_gains(model, passages[rows, 0], known[rows]) for rows in usable.split(CHUNK)]
    gain = torch.cat(gains) if gains else torch.zeros(0)
    return float(gain.mean() / (gain.std() / len(gain) ** 0.5)) if len(gain) > 1 else 0.0


def _gains(model: DFlashModel, anchors: Tensor, known: Tensor) -> Tensor:
    """By how much the log-probabilities of tokens, `known` [n, ROWS], are higher in their own rows than in the rows
    before: [n]."""
    chances = model.logits(_first_rows(model, anchors)).float().log_softmax(-1).cpu()
    of_all = chances[:, :, known]  # [passage, row, passage of the token, its place]
    knows = of_all.diagonal(dim1=0, dim2=2).permute(2, 0, 1) - of_all.mean(0).permute(1, 0, 2)  # [n, row, place]
    own, before = knows.diagonal(0, 1, 2)[:, 1:], knows.diagonal(1, 1, 2)
    return (own - before).sum(dim=1)


def _first_rows(model: DFlashModel, anchors: Tensor) -> Tensor:
    """The outputs [n, ROWS, H] of blocks that begin with these tokens and have no context."""
    spec, (weight, rows) = model.spec, (model.norm.weight, model.spec.block_size)
    tokens = torch.full((len(anchors), rows), spec.parallel.mask_token_id, device=weight.device)
    tokens[:, 0] = anchors
    hidden = model.embed(tokens, weight.dtype)
    cos_sin = model.rotary(hidden, torch.arange(rows, device=weight.device).expand(len(anchors), -1))
    step = torch.arange(rows, device=weight.device)
    distance = step - step[:, None]
    for index, layer in enumerate(model.layers):
        unseen = distance > (0 if index in spec.causal_layers else rows)
        if (window := spec.windows[index]) is not None and spec.window_rule == "row":
            unseen |= distance.abs() >= window
        bias = torch.zeros_like(unseen, dtype=weight.dtype).masked_fill_(unseen, -torch.inf)
        hidden = layer(hidden, cos_sin, attention_mask=bias)
    return model.norm(hidden)[:, :ROWS]


def _draft_ids(model: DFlashModel, tokens: Tensor) -> Tensor:
    """The draft's ids of the target's tokens, −1 for those that it does not have."""
    if model.target_ids is None:
        return tokens
    lookup = torch.full((model.spec.vocab_size,), -1)
    lookup[model.target_ids.cpu()] = torch.arange(len(model.target_ids))
    return lookup[tokens]


def _texts(row: Mapping[str, object]) -> list[str]:
    turns = row["turns"]
    assert isinstance(turns, list)
    return [str(turn) for turn in turns]
