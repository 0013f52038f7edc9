"""A draft that follows a target in training: what a loop of reinforcement learning does after each update of weights.

`python -m scripts.study.follow_target --updates 12 [--steps 4] [--answers 24] [--out DRAFT]`

The embedded target is trained on text that it has not seen, a stand-in for a loop's own updates. After each, it answers
a few questions greedily, as the loop's rollouts would, and the draft is judged on them and trained for a few steps.
Printed are the acceptance lengths of the draft that follows and of the one that is left as it was.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from draftkit import DraftTuner, Engine, Request, Target
from draftkit.data.loss_mask import Renderer
from draftkit.data.samples import Sample
from draftkit.data.states.online import load_training_target
from draftkit.data.tokenizer import load_tokenizer
from draftkit.runtime.attention import NAME as ATTENTION
from draftkit.train.settings import Optimization
from scripts.bench.train import training_questions
from scripts.check.lora import other_words
from scripts.zoo import _corpus as zoo_corpus
from scripts.zoo import _lm as zoo_lm

TARGET, DRAFT = "zoo:target", "zoo:eagle3"
NEW_TOKENS = 64


def answers(target: PreTrainedModel, prompts: Sequence[list[int]]) -> list[Sample]:
    """What a loop's rollouts give: prompts with the target's answers."""
    attention = target.config._attn_implementation
    target.set_attn_implementation(ATTENTION)
    requests = [Request(str(number), tuple(prompt), NEW_TOKENS) for number, prompt in enumerate(prompts)]
    generations = Engine(Target(target), None, num_speculative_tokens=0, num_slots=16).generate(requests)
    target.set_attn_implementation(attention)
    return [
        Sample.of(g.request.id, [*g.request.prompt, *g.tokens], [(len(g.request.prompt), g.length)])
        for g in generations
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--answers", type=int, default=24)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(TARGET)
    target = load_training_target(TARGET, device="cpu", dtype=torch.float32)
    following = DraftTuner(DRAFT, target, optimization=Optimization(lr=3e-4))
    left = DraftTuner(DRAFT, target)
    texts = zoo_corpus.training_texts(zoo_lm.chat_text(tokenizer.tokenizer), random.Random(0))[:400]
    rows = tokenizer.tokenizer.backend_tokenizer.encode_batch_fast([other_words(text) for text in texts])
    stream = torch.tensor([token for row in rows for token in row.ids])
    windows = zoo_lm.windows(stream, 4, zoo_lm.WINDOW, 0)
    renderer = Renderer(tokenizer)
    questions = [
        renderer.prompt([{"role": "user", "content": text}])
        for _, text in training_questions(options.answers * options.updates)
    ]
    policy = torch.optim.AdamW(target.parameters(), lr=5e-4)
    for update, tokens in zip(range(options.updates), windows, strict=False):
        target.requires_grad_(True)  # the loop's own step
        target(input_ids=tokens, labels=tokens).loss.backward()
        policy.step()
        policy.zero_grad(set_to_none=True)
        target.requires_grad_(False)

        rollouts = answers(target, questions[options.answers * update : options.answers * (update + 1)])
        lengths = (tuner.simulate_acceptance(rollouts).length.mean for tuner in (following, left))
        print("update {}: follows {:.3f}, left as it was {:.3f}".format(update + 1, *lengths), flush=True)
        for _ in range(options.steps):
            following.step(rollouts)
    if options.out:
        print(following.save(options.out))


if __name__ == "__main__":
    main()
