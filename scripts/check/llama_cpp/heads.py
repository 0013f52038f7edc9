"""Multi-token prediction heads of tiny targets: made, and drafted with as llama.cpp does.

Of each kind of target a random one, with a head that knows some of its answers by heart, so that drafts are accepted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from fixtures.checkpoints import pico
from fixtures.checkpoints.mtp_targets import save_with_head
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from draftkit.convert.api import plan_conversion
from draftkit.engines.llama_cpp.releases import REPLAYED
from draftkit.loading import load_model
from draftkit.models.mtp import MtpModel, load_mtp, stored_mtp
from draftkit.requests import Request
from draftkit.runtime.records import Generation, Round
from draftkit.targets.target import Target

HEAD_TOKENS = 3  # draft tokens a round
KINDS = ("glm4_moe", "glm4_moe_lite", "hy_v3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
PROMPT, NEW_TOKENS, STEPS = 12, 40, 60
LR = 3e-3


def requests(count: int) -> list[Request]:
    """Random prompts."""
    drawn = torch.Generator().manual_seed(0)
    prompts = torch.randint(4, pico.VOCABULARY - 20, (count, PROMPT), generator=drawn).tolist()
    return [Request(str(number), tuple(prompt), NEW_TOKENS) for number, prompt in enumerate(prompts)]


def save_target(kind: str, folder: Path, asked: Sequence[Request]) -> Path:
    """A target with a tokenizer, and a head that has learnt its answers."""
    folder.mkdir()
    save_with_head(kind, folder)
    if kind == "glm4_moe_lite":  # llama.cpp knows that its router is a sigmoid by the number of layers, or if told
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"scoring_func": "sigmoid"}))
    pico.save_tokenizer(folder, ("a", "b"))
    target, head = loaded(folder)
    head.requires_grad_(True).float()
    texts = [torch.tensor([*request.prompt, *plain(target, request)]) for request in asked]
    seen = [states(target, text) for text in texts]
    optimizer = torch.optim.AdamW(head.heads.parameters(), lr=LR)
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses = []
        for text, hidden in zip(texts, seen, strict=True):
            rows = head.heads[0](embed(target, text[1:-1])[None], hidden[None, :-2], torch.arange(len(text) - 2)[None])
            losses.append(cross_entropy(head.logits(rows.head_input)[0], text[2:]))
        torch.stack(losses).mean().backward()
        optimizer.step()
    path = folder / "model.safetensors"
    own = {name: tensor.detach().contiguous() for name, tensor in stored_mtp(head, head.state_dict()).items()}
    save_file(load_file(path) | own, path, {"format": "pt"})
    return folder


def loaded(folder: Path) -> tuple[PreTrainedModel, MtpModel]:
    model, _ = load_model(str(folder), device="cpu", dtype=torch.float32)
    model.set_attn_implementation("sdpa")
    draft = plan_conversion(str(folder), format="mtp").require_draft()
    return model, load_mtp(draft, model, attention="sdpa")


@torch.no_grad()
def states(target: PreTrainedModel, tokens: Tensor) -> Tensor:
    """After the last norm, [tokens, H]."""
    hidden: Tensor = target.model(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
    return hidden


def choices(target: PreTrainedModel, hidden: Tensor) -> list[int]:
    chosen: list[int] = target.lm_head(hidden).argmax(-1).tolist()
    return chosen


def embed(target: PreTrainedModel, tokens: Tensor) -> Tensor:
    rows: Tensor = target.get_input_embeddings()(tokens)
    return rows


def plain(target: PreTrainedModel, request: Request) -> list[int]:
    """The target's own greedy answer."""
    tokens = list(request.prompt)
    for _ in range(request.max_new_tokens):
        tokens += choices(target, states(target, torch.tensor(tokens))[-1:])
    return tokens[len(request.prompt) :]


@dataclass
class LlamaCppHead:
    """A head as llama.cpp b11434 drafts with it, everything computed anew, with no cache (`common/speculative.cpp`).

    Row p is of the token at p and the target's state before it; that at 0 has the `last` state of the request before,
    zeros at first. The state after the head's last norm is fed back. Where a target's memory cannot go back by single
    tokens (`REPLAYED`), what stands of a draft is run again from a checkpoint, which gives one token more; and the row
    of the token before the draft then reads the state after the draft's last token.
    """

    target: PreTrainedModel
    head: MtpModel
    last: Tensor = field(init=False)
    replays: bool = field(init=False)

    def __post_init__(self) -> None:
        self.replays = self.target.config.model_type in REPLAYED
        self.last = torch.zeros(self.target.config.get_text_config().hidden_size)

    @torch.no_grad()
    def generate(self, request: Request, k: int) -> Generation:
        found, ends = Generation(request), Target(self.target).eos_token_ids
        hidden = states(self.target, torch.tensor(request.prompt))
        read, self.last = torch.cat((self.last[None], hidden[:-1])), hidden[-1]  # by the rows so far; by the next one
        found.tokens += choices(self.target, hidden[-1:])
        while not ends & set(found.tokens) and len(found.tokens) < request.max_new_tokens:
            tokens = [*request.prompt, *found.tokens]
            room = min(k, request.max_new_tokens - len(found.tokens) - 1)
            drafts = self._drafts(torch.tensor(tokens), torch.cat((read, self.last[None])), room)
            new = states(self.target, torch.tensor([*tokens, *drafts]))[len(tokens) - 1 :]
            chosen = choices(self.target, new)
            accepted = next((n for n, draft in enumerate(drafts) if draft != chosen[n]), room)
            emitted = chosen[: accepted + 1]
            if accepted < room and self.replays:
                self.last = new[-1]  # of a draft that was rejected
                new = states(self.target, torch.tensor([*tokens, *emitted]))[len(tokens) - 1 :]
                emitted += choices(self.target, new[-1:])
            read = torch.cat((read, self.last[None], new[: len(emitted) - 1]))
            self.last = new[len(emitted) - 1]
            found.rounds.append(Round(len(tokens), room, accepted, len(emitted), proposal=tuple(drafts)))
            end = next((n + 1 for n, token in enumerate(emitted) if token in ends), None)
            found.tokens += emitted[:end][: request.max_new_tokens - len(found.tokens)]
        return found

    def _drafts(self, tokens: Tensor, rows: Tensor, k: int) -> list[int]:
        """After `tokens`, beside each of which stands what its row reads."""
        drafts: list[int] = []
        for _ in range(k):
            embedding = embed(self.target, tokens)
            output = self.head.heads[0](embedding[None], rows[None], torch.arange(len(tokens))[None])
            drafts += choices(self.target, output.head_input[0, -1:])
            tokens = torch.cat((tokens, torch.tensor(drafts[-1:])))
            rows = torch.cat((rows, output.head_input[0, -1:]))
        return drafts
