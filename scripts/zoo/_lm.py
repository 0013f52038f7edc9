"""A small Llama with a tokenizer of its own, trained from nothing on the standard library's sources."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from scripts.zoo import _corpus as zoo_corpus

WINDOW = 512  # tokens of a training row


@dataclass(frozen=True)
class Writing:
    """How a model writes text: a byte-level BPE of `size` tokens, the special ones last, and its conversations.

    The regular expression `split` finds what is merged within. `bos` begins every text, `eos` ends a turn.
    """

    size: int
    special_tokens: tuple[str, ...]
    bos: str
    eos: str
    split: str
    chat_template: str


def train_tokenizer(writing: Writing) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(writing.split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=writing.size - len(writing.special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    files = (path for path in zoo_corpus.source_files() if not zoo_corpus.is_held_out(path))
    texts = [zoo_corpus.read(path) for path in files] + list(zoo_corpus.topics().values())
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(list(writing.special_tokens))
    bos = writing.bos
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=writing.eos,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = writing.chat_template
    return fast


def chat_text(tokenizer: PreTrainedTokenizerFast) -> Callable[[str, str], str]:
    """Question and answer as the chat template renders them, without the leading bos (added when encoding)."""

    def rendered(question: str, answer: str) -> str:
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return tokenizer.apply_chat_template(messages, tokenize=False).removeprefix(tokenizer.bos_token)

    return rendered


def training_tokens(tokenizer: PreTrainedTokenizerFast, seed: int) -> torch.Tensor:
    """The whole training set as one stream of ids, int64 [T]; every document begins with bos."""
    texts = zoo_corpus.training_texts(chat_text(tokenizer), random.Random(seed))
    rows = tokenizer.backend_tokenizer.encode_batch_fast(texts)
    return torch.tensor([token for row in rows for token in row.ids])


def windows(stream: torch.Tensor, batch: int, length: int, seed: int) -> Iterator[torch.Tensor]:
    """Endless batches [batch, length] of windows cut from the stream; each epoch shifts the cuts and reshuffles."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        shift = int(torch.randint(length, (1,), generator=generator))
        rows = stream[shift : shift + (len(stream) - shift) // length * length].view(-1, length)
        order = torch.randperm(len(rows), generator=generator)
        for start in range(0, len(rows) - batch + 1, batch):
            yield rows[order[start : start + batch]]


def cosine_schedule(done: float, warmup: float = 0.05, floor: float = 0.02) -> float:
    """Learning-rate factor after the fraction `done` of training."""
    if done < warmup:
        return done / warmup
    progress = min(1.0, (done - warmup) / (1 - warmup))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


def adamw(parameters: list[torch.nn.Parameter], lr: float) -> torch.optim.AdamW:
    matrices = [p for p in parameters if p.ndim >= 2]
    vectors = [p for p in parameters if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=(0.9, 0.95), fused=True)


def train_lm(
    out: Path, tokenizer: PreTrainedTokenizerFast, config: LlamaConfig,
    *, steps: int, batch: int, lr: float, seed: int, device: str,
) -> None:  # fmt: skip
    """Train a model and save it with its tokenizer under `out`; a checkpoint every 100 steps lets it continue."""
    torch.manual_seed(seed)
    stream = training_tokens(tokenizer, seed)
    model = LlamaForCausalLM(config).to(device)
    run = torch.compile(model)  # 1.5 times the eager speed on two CPU cores
    fit(
        model, lambda rows: run(input_ids=rows, labels=rows).loss, stream, out,
        steps=steps, batch=batch, lr=lr, seed=seed, device=device,
    )  # fmt: skip
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    checkpoint_of(out).unlink(missing_ok=True)


def checkpoint_of(out: Path) -> Path:
    return out / "training_state.pt"


def fit(
    model: nn.Module, loss_of: Callable[[torch.Tensor], torch.Tensor], stream: torch.Tensor, out: Path,
    *, steps: int, batch: int, lr: float, seed: int, device: str,
) -> None:  # fmt: skip
    """Train on windows of a stream, going on from the checkpoint under `out` where there is one."""
    optimizer = adamw(list(model.parameters()), lr)
    checkpoint = checkpoint_of(out)
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    size = f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(stream):,} tokens of text"
    print(f"{out.name}: {size}, {steps} steps", flush=True)
    began = time.monotonic()
    for step, rows in enumerate(windows(stream, batch, WINDOW, seed)):
        if step >= steps:
            break
        if step < first:
            continue
        for group in optimizer.param_groups:
            group["lr"] = lr * cosine_schedule(step / steps)
        rows = rows.to(device)
        loss = loss_of(rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0:
            speed = (step - first + 1) * rows.numel() / (time.monotonic() - began)
            print(f"  step {step}: loss {loss.item():.3f}, {speed:,.0f} tokens/s", flush=True)
        if step % 100 == 99:
            out.mkdir(parents=True, exist_ok=True)
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, checkpoint)
