"""A small hybrid target with its own multi-token prediction head, trained as the embedded one was; for `mtp.py`.

Of the shape of Qwen3.5: three layers of gated delta net to one of attention, and a head of one layer. What the
embedded target has too (embedding, norms, MLPs, projections of attention) starts from there; gated delta net and head
are new. Both are trained together for one step ahead, as makers of targets do it, on the embedded target's text.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from draftkit.data.tokenizer import load_tokenizer
from draftkit.loading import load_model
from scripts.check.parts.mtp_heads import add_head, new_head
from scripts.zoo._lm import fit, training_tokens

HEAD_LOSS = 0.3  # what the head's loss counts beside the target's, as in DeepSeek-V3's first ten trillion tokens
LINEAR, FULL = "linear_attention", "full_attention"
CONFIG: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 10,
    "layer_types": [*[LINEAR, LINEAR, LINEAR, FULL] * 2, LINEAR, FULL],
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 1.0},
    "tie_word_embeddings": True,
}


class TargetWithHead(nn.Module):
    """Both, and the loss of their next tokens. B rows of T tokens."""

    def __init__(self, config: Qwen3_5TextConfig):
        super().__init__()
        self.target = Qwen3_5ForCausalLM(config)
        self.head = new_head(config)
        self.head.borrow(self.target.get_input_embeddings(), self.target.get_output_embeddings())

    def forward(self, tokens: Tensor) -> Tensor:
        states = self.target.model(input_ids=tokens, use_cache=False).last_hidden_state  # [B, T, H]
        ahead = self.target.lm_head(states[:, :-1])
        positions = torch.arange(tokens.shape[1] - 1)[None]
        drafted = self.head.logits(self.head(tokens[:, 1:], states[:, :-1], positions).head_input[:, :-1])
        return _loss(ahead, tokens[:, 1:]) + HEAD_LOSS * _loss(drafted, tokens[:, 2:])


def _loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


@torch.no_grad()
def start_from_embedded(model: Qwen3_5ForCausalLM) -> None:
    """The weights that the embedded target has too. Norms multiply by 1 + w here; a gate of zero halves an output."""
    source = load_model("zoo:target", device="cpu", dtype=torch.float32)[0].state_dict()
    for name, own in model.state_dict().items():
        if name not in source:
            continue
        if name.endswith("q_proj.weight"):
            own.zero_()
            queries = own.view(CONFIG["num_attention_heads"], 2, CONFIG["head_dim"], -1)[:, 0]
            queries.copy_(source[name].view_as(queries))
        elif name.endswith("norm.weight"):
            own.copy_(source[name] - 1)
        else:
            own.copy_(source[name] * (2 if name.endswith("o_proj.weight") else 1))


def train_hybrid(out: Path, *, steps: int, batch: int, lr: float, seed: int) -> None:
    """Train and save under `out`, once; a checkpoint every 100 steps lets it continue."""
    if out.exists():
        return
    torch.manual_seed(seed)
    tokenizer = load_tokenizer("zoo:target").tokenizer
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    model = TargetWithHead(Qwen3_5TextConfig(**CONFIG, **ends))
    start_from_embedded(model.target)

    def loss(rows: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(rows)

    training = out.with_name(f"{out.name}-training")
    stream = training_tokens(tokenizer, seed)
    fit(model, loss, stream, training, steps=steps, batch=batch, lr=lr, seed=seed, device="cpu")
    whole = training / "whole"
    model.target.to(torch.bfloat16).save_pretrained(whole)
    add_head(model.head, whole)
    tokenizer.save_pretrained(whole)
    whole.rename(out)
    shutil.rmtree(training)
