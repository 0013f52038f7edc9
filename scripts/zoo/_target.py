"""The embedded target: a tokenizer and a small Llama, trained from nothing on the standard library's sources."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from scripts.zoo import _corpus as zoo_corpus

VOCABULARY = 4096
WINDOW = 512  # tokens of a training row
# The tokenizer and the form of conversations resemble Llama 3's.
BOS, EOS = "<|begin_of_text|>", "<|eot|>"
SPECIAL_TOKENS = [
    BOS, "<|end_of_text|>", "<|start_header|>", "<|end_header|>", EOS,
    "<|reserved_0|>",  # never in any text: the mask token of parallel drafts
    "<|reserved_1|>", "<|reserved_2|>",
]  # fmt: skip
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|start_header|>{{ message['role'] }}<|end_header|>\n{{ message['content'] }}<|eot|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header|>assistant<|end_header|>\n{% endif %}"
)
# The split of GPT-4-style tokenizers: words, numbers of up to three digits, punctuation, runs of white space.
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def train_target(out: Path, *, steps: int, batch: int, lr: float, seed: int, device: str) -> None:
    """Train tokenizer and target, and save both under `out`. A checkpoint every 100 steps lets training continue."""
    tokenizer = train_tokenizer()
    torch.manual_seed(seed)
    stream = training_tokens(tokenizer, seed)
    model = LlamaForCausalLM(target_config(tokenizer)).to(device)
    run = torch.compile(model)  # 1.5 times the eager speed on two CPU cores
    checkpoint, first = out / "training_state.pt", 0
    optimizer = adamw(list(model.parameters()), lr)
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(stream):,} tokens of text", flush=True)
    began = time.monotonic()
    for step, cut in enumerate(windows(stream, batch, WINDOW, seed)):
        if step >= steps:
            break
        if step < first:
            continue
        for group in optimizer.param_groups:
            group["lr"] = lr * cosine_schedule(step / steps)
        rows = cut.to(device)
        loss = run(input_ids=rows, labels=rows).loss
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
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    checkpoint.unlink(missing_ok=True)


def train_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE whose last tokens are the special ones."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    files = (path for path in zoo_corpus.source_files() if not zoo_corpus.is_held_out(path))
    texts = [zoo_corpus.read(path) for path in files] + list(zoo_corpus.topics().values())
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def target_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=10,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )


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
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
