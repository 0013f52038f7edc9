"""A tiny Gemma-4 and its assistant: made, and told to draft as llama.cpp does.

The target is random, and the assistant knows some of its answers by heart, so that drafts stand; no recipe trains one.
"""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from fixtures.checkpoints import pico
from fixtures.checkpoints.gemma4_assistants import FULL, SLIDING, SUPPRESSED, TARGET
from fixtures.checkpoints.published.gemma4_assistant import PLAIN, assistant
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from draftkit.convert.api import plan_conversion
from draftkit.doctor.patient import changed
from draftkit.layout.families.gemma4_assistant import Gemma4AssistantSpec
from draftkit.layout.folder import Draft
from draftkit.loading import load_model
from draftkit.models.gemma4_assistant import Gemma4AssistantModel, load_gemma4_assistant
from draftkit.requests import Request
from scripts.check.llama_cpp.heads import plain

STEPS, LR = 25, 3e-3


def save_pair(folder: Path, asked: Sequence[Request]) -> tuple[Path, Path]:
    """The folders of a target with a tokenizer and of its assistant, which has learnt the target's answers."""
    torch.manual_seed(0)
    own, draft = folder / "target", folder / "assistant"
    config = CONFIG_MAPPING["gemma4_text"](**TARGET | {"eos_token_id": 2})
    AutoModelForCausalLM.from_config(config).save_pretrained(own)
    letters = string.ascii_letters + string.digits[:-1]  # as many merges as there is room for: the converter cuts the
    pico.save_tokenizer(own, *(("a", letter) for letter in letters))  # table to the tokens that it finds
    draft.mkdir()
    (draft / "config.json").write_text(json.dumps(PLAIN))
    weights = assistant(torch.float32)
    save_file({n: t for n, t in weights.items() if not n.startswith("masked")}, draft / "model.safetensors")
    target, _ = load_model(str(own), device="cpu", dtype=torch.float32)
    target.set_attn_implementation("sdpa")
    model = load_gemma4_assistant(plan_conversion(str(draft)).require_draft(), target, attention="sdpa")
    learn(model, target, [torch.tensor([*request.prompt, *plain(target, request)]) for request in asked])
    learnt = {name: tensor for name, tensor in model.state_dict().items() if name in weights}
    save_file(learnt, draft / "model.safetensors")
    (draft / "generation_config.json").write_text(json.dumps({"suppress_tokens": list(SUPPRESSED)}))
    return own, draft


def learn(model: Gemma4AssistantModel, target: PreTrainedModel, texts: Sequence[Tensor]) -> None:
    """Train on first drafts after every token."""
    model.model.requires_grad_(True)
    for projection in (model.pre_projection, model.post_projection):
        projection.requires_grad_(True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)
    with torch.no_grad():
        seen = [target.model(input_ids=t[None, :-1], use_cache=False, return_shared_kv_states=True) for t in texts]
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses = [cross_entropy(drafted(model, *pair)[:-1], pair[0][2:]) for pair in zip(texts, seen, strict=True)]
        torch.stack(losses).mean().backward()
        optimizer.step()


def drafted(model: Gemma4AssistantModel, tokens: Tensor, seen: Any) -> Tensor:
    """The logits [n - 1, V] of the first draft after each of `tokens` [n] but the first, with llama.cpp's positions."""
    at = torch.arange(len(tokens) - 1)  # of the state; the newest token is one later
    causal = at <= at[:, None]
    near = causal & (at > at[:, None] + 1 - model.model.config.sliding_window)
    assert model.embed_tokens is not None
    state = model.model(
        inputs_embeds=model.pre_projection(
            torch.cat((model.embed_tokens(tokens[None, 1:]), seen.last_hidden_state), -1)
        ),
        attention_mask={FULL: causal[None, None], SLIDING: near[None, None]},
        position_ids=at[None] + 1,
        shared_kv_states=seen.shared_kv_states,
        use_cache=False,
    ).last_hidden_state
    return model.logits(state[0])


def as_in_llama_cpp(draft: Draft) -> Draft:
    """The assistant with its queries at the newest token, and windows that begin there (`common/speculative.cpp`)."""
    spec = draft.spec.architecture.expect(Gemma4AssistantSpec)
    text: Any = spec.config["text_config"]
    narrower = spec.config | {"text_config": text | {"sliding_window": text["sliding_window"] - 1}}
    return changed(draft, replace(spec, position="token", config=narrower))
