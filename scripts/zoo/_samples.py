"""What the embedded drafts are trained on: the embedded target's own greedy answers, and source text."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from draftkit import zoo
from draftkit.data.sample_files import write_samples
from draftkit.data.samples import Sample, SamplesOrigin
from draftkit.data.tokenizer import load_tokenizer
from draftkit.requests import Request
from draftkit.runtime import attention
from draftkit.runtime.engine import Engine
from draftkit.targets.target import Target, load_target
from scripts.zoo import _corpus as zoo_corpus
from scripts.zoo._target import training_tokens

TARGET = "zoo:target"
WINDOW = 256  # tokens of a sample of source text, and of a prompt at most
ANSWER_TOKENS = 128


def write_training_samples(out: Path, *, answers: int, seed: int, device: str) -> int:
    """Write `answers` of the target and as many tokens of source text, so that the drafts have seen what the target was
    trained on. Returns how many samples there are."""
    served = load_tokenizer(TARGET)
    samples = greedy_answers(served.tokenizer, answers, seed, device)
    size = sum(map(len, samples)) // WINDOW * WINDOW
    source = training_tokens(served.tokenizer, seed)[:size].view(-1, WINDOW)
    samples += [Sample.of(f"source-{n}", row.tolist(), [(1, WINDOW)]) for n, row in enumerate(source)]
    return write_samples(out, samples, SamplesOrigin(TARGET, served.sha256, served.template_sha256))


def greedy_answers(tokenizer: PreTrainedTokenizerBase, count: int, seed: int, device: str) -> list[Sample]:
    """Training questions with the target's answers, which alone are in the loss mask."""
    target = load_target(zoo.path("target"), device=device, dtype=torch.float32, attention=attention.NAME)
    engine = Engine(Target(target), None, num_speculative_tokens=0, num_slots=64)
    numbered = zip(range(count), questions(tokenizer, seed), strict=False)
    samples = []
    for g in engine.generate([Request(f"answer-{n}", tuple(prompt), ANSWER_TOKENS) for n, prompt in numbered]):
        tokens = [*g.request.prompt, *g.tokens]
        samples.append(Sample.of(g.request.id, tokens, [(len(g.request.prompt), len(tokens))]))
    return samples


def questions(tokenizer: PreTrainedTokenizerBase, seed: int) -> Iterator[list[int]]:
    """The prompts of all training questions that are short enough, in random order."""
    files = [path for path in zoo_corpus.source_files() if not zoo_corpus.is_held_out(path)]
    texts = [e.question for path in files for e in zoo_corpus.examples_of_file(path)]
    random.Random(seed).shuffle(texts)
    for text in texts:
        messages = [{"role": "user", "content": text}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        if len(prompt) <= WINDOW:
            yield prompt
