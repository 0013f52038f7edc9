"""The embedded drafts: EAGLE-1 with and without `fc.bias`, EAGLE-3, and a two-layer causal LM.

All are distilled at once from the embedded target, on its own greedy answers and on source text: one forward of the
target serves every draft. They are saved in their published layouts.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import zoo_corpus
import zoo_target
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from draftkit.convert.fusion import fusion_spec
from draftkit.layout.spec import Decoder, EagleSpec, Rope
from draftkit.models.eagle import EagleModel
from draftkit.models.target import Target, load_target
from draftkit.runtime import attention
from draftkit.runtime.engine import Engine
from draftkit.runtime.records import Request

WINDOW = 256  # tokens of a training row
DRAFT_VOCABULARY = 2048
ANSWER_TOKENS = 128


def unrolled_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    history: dict,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention of training-time test (EAGLE-3): a row of step t sees the rows of step 0 up to its own, and its own
    rows of the later steps. `history` keeps keys and values of the steps of one unrolled forward, by layer.
    """
    groups = query.shape[1] // key.shape[1]
    steps = history.setdefault(module.layer_idx, [])
    steps.append((key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)))
    first_key, first_value = steps[0]
    rows = query.shape[2]
    causal = torch.ones(rows, rows, dtype=torch.bool, device=query.device).tril()
    scores = (query @ first_key.transpose(2, 3)).masked_fill(~causal, float("-inf"))
    later = [(query * k).sum(-1, keepdim=True) for k, _ in steps[1:]]
    weights = (torch.cat([scores, *later], dim=-1) * scaling).softmax(-1)
    out = weights[..., :rows] @ first_value
    for index, (_, v) in enumerate(steps[1:]):
        out = out + weights[..., rows + index, None] * v
    return out.transpose(1, 2), None


AttentionInterface.register("zoo-unrolled", unrolled_attention)


@dataclass
class Teaching:
    """What the target says about a batch of windows [B, T]: its features and its next-token probabilities."""

    tokens: Tensor
    final: Tensor  # [B, T, H], after the final norm
    aux: Tensor  # [B, T, 3H]
    probs: Tensor  # [B, T, V]


def soft_cross_entropy(teacher: Tensor, student: Tensor) -> Tensor:
    """Mean of −Σ p log q; `teacher` are probabilities and may sum to less than one."""
    return -(teacher * student.log_softmax(-1)).sum(-1).mean()


def eagle_loss(model: EagleModel, teaching: Teaching, steps: int, kept: Tensor | None) -> Tensor:
    """Loss of an EAGLE-style draft unrolled over `steps`; regression on features for those of EAGLE-1."""
    one_step_ahead = model.spec.token_entry == "fusion"
    rows = teaching.tokens.shape[1] - 1 - steps
    features = teaching.final if one_step_ahead else teaching.aux
    noise = (torch.rand_like(features) - 0.5) * 0.2 if one_step_ahead else 0.0  # as EAGLE-1 was trained
    hidden = model.fuse((features + noise)[:, :rows])
    positions = torch.arange(rows, device=hidden.device)[None]
    history: dict = {}
    teacher = teaching.probs if kept is None else teaching.probs[..., kept]
    loss = hidden.new_zeros(())
    for step in range(steps):
        ahead = slice(1 + step, 1 + step + rows)
        out = model(teaching.tokens[:, ahead], hidden, positions + step, history=history)
        loss = loss + soft_cross_entropy(teacher[:, ahead], model.logits(out.head_input)) * 0.8**step
        if one_step_ahead:
            loss = loss + smooth_l1_loss(out.feedback, teaching.final[:, ahead]) * 0.8**step
        hidden = out.feedback
    return loss


def causal_lm_loss(model: LlamaForCausalLM, teaching: Teaching) -> Tensor:
    return soft_cross_entropy(teaching.probs, model(input_ids=teaching.tokens, use_cache=False).logits)


def decoder(target: LlamaConfig, *, kv_heads: int, rope_base: float) -> Decoder:
    """One decoder layer of the target's width."""
    return Decoder(
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=kv_heads,
        head_dim=target.head_dim,
        hidden_act="silu",
        rms_norm_eps=target.rms_norm_eps,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sliding_window=None,
        rope=Rope(base=rope_base, declared_base=None, scaling=None, max_position_embeddings=2048),
    )


def eagle_spec(target: LlamaConfig, *, bias: bool, kv_heads: int, rope_base: float) -> EagleSpec:
    """EAGLE-1 as published."""
    layer = decoder(target, kv_heads=kv_heads, rope_base=rope_base)
    return fusion_spec(layer, target.vocab_size, fusion_bias=bias, embed_tokens="target")


def eagle3_spec(target: LlamaConfig, aux_layer_ids: tuple[int, ...]) -> EagleSpec:
    """EAGLE-3 as published; its rope base is 10000 whatever the target's."""
    return replace(
        eagle_spec(target, bias=False, kv_heads=target.num_key_value_heads, rope_base=10000.0),
        draft_vocab_size=DRAFT_VOCABULARY,
        aux_layer_ids=aux_layer_ids,
        token_entry="attention",
        embedding_norm=True,
        hidden_norm=True,
        final_norm=True,
        lm_head="draft",
    )


def new_draft(spec: EagleSpec, target: LlamaForCausalLM) -> EagleModel:
    """A draft with random weights, and the target's frozen embedding and head on loan."""
    model = EagleModel(spec, "zoo-unrolled")
    for parameter in model.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.02)
    model.borrow(target.get_input_embeddings(), target.get_output_embeddings())
    return model.to(target.device)


def small_lm(target: LlamaConfig) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=target.vocab_size,
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=2048,
            rms_norm_eps=1e-5,
            rope_theta=10000.0,
            tie_word_embeddings=True,
            bos_token_id=target.bos_token_id,
            eos_token_id=target.eos_token_id,
        )
    )


def greedy_answers(
    target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, count: int, seed: int
) -> list[list[int]]:
    """Conversations with the target's own greedy answers to training questions, as token ids."""
    files = [path for path in zoo_corpus.source_files() if not zoo_corpus.is_held_out(path)]
    questions = [e.question for path in files for e in zoo_corpus.examples_of_file(path)]
    random.Random(seed).shuffle(questions)
    requests = []
    for question in questions:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        if len(prompt) <= WINDOW:
            requests.append(Request(str(len(requests)), tuple(prompt), ANSWER_TOKENS))
        if len(requests) == count:
            break
    engine = Engine(Target(target), None, num_speculative_tokens=0, num_slots=64)
    return [[*g.request.prompt, *g.tokens] for g in engine.generate(requests)]


def train_drafts(models: Path, *, steps: int, batch: int, answers: int, lr: float, seed: int, device: str) -> None:
    """Train all drafts on the target in `models/target` and save them beside it."""
    torch.manual_seed(seed)
    folder = models / "target"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    target = load_target(folder, device=device, dtype=torch.float32, attention=attention.NAME)
    began = time.monotonic()
    rows = greedy_answers(target, tokenizer, answers, seed)
    print(f"  {len(rows)} greedy answers in {time.monotonic() - began:.0f} s", flush=True)
    answered = torch.tensor([token for row in rows for token in row])
    # As many tokens of source text again, so that the drafts have seen what the target was trained on.
    stream = torch.cat((answered, zoo_target.training_tokens(tokenizer, seed)[: len(answered)]))
    kept = torch.bincount(stream, minlength=target.config.vocab_size).argsort(descending=True, stable=True)
    kept = kept[:DRAFT_VOCABULARY].sort().values
    n = target.config.num_hidden_layers
    aux_layer_ids = (2, n // 2, n - 3)
    heads, kv_heads = target.config.num_attention_heads, target.config.num_key_value_heads
    eagle = new_draft(eagle_spec(target.config, bias=False, kv_heads=kv_heads, rope_base=500000.0), target)
    eagle_bias = new_draft(eagle_spec(target.config, bias=True, kv_heads=heads, rope_base=10000.0), target)
    eagle3 = new_draft(eagle3_spec(target.config, aux_layer_ids), target)
    lm = small_lm(target.config).to(device)
    losses: dict[str, Callable[[Teaching], Tensor]] = {
        "eagle": lambda t: eagle_loss(eagle, t, 2, None),
        "eagle-bias": lambda t: eagle_loss(eagle_bias, t, 2, None),
        "eagle3": lambda t: eagle_loss(eagle3, t, 4, kept.to(device)),
        "draft-model": lambda t: causal_lm_loss(lm, t),
    }
    trained = {name: draft_parameters(m) for name, m in zip(losses, (eagle, eagle_bias, eagle3, lm), strict=True)}
    fit(target, aux_layer_ids, losses, trained, stream, steps=steps, batch=batch, lr=lr, seed=seed)
    save_eagle(eagle, models / "eagle", target, bias_key=False, embed=True)
    save_eagle(eagle_bias, models / "eagle-bias", target, bias_key=None, embed=False)
    save_eagle3(eagle3, models / "eagle3", target, kept)
    lm.to(torch.bfloat16).save_pretrained(models / "draft-model")
    tokenizer.save_pretrained(models / "draft-model")


def draft_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The draft's own parameters; borrowed ones are frozen."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def fit(
    target: LlamaForCausalLM,
    aux_layer_ids: tuple[int, ...],
    losses: dict[str, Callable[[Teaching], Tensor]],
    trained: dict[str, list[nn.Parameter]],
    stream: Tensor,
    *,
    steps: int,
    batch: int,
    lr: float,
    seed: int,
) -> None:
    """Optimise every draft on the same batches; each has its own optimiser and gradient clipping."""
    target.set_attn_implementation("sdpa")
    optimizers = {name: zoo_target.adamw(parameters, lr) for name, parameters in trained.items()}
    began = time.monotonic()
    for step, tokens in enumerate(zoo_target.windows(stream, batch, WINDOW, seed)):
        if step >= steps:
            break
        teaching = teach(target, tokens.to(target.device), aux_layer_ids)
        values = {}
        for name, loss_of in losses.items():
            loss = loss_of(teaching)
            loss.backward()
            nn.utils.clip_grad_norm_(trained[name], 1.0)
            for group in optimizers[name].param_groups:
                group["lr"] = lr * zoo_target.cosine_schedule(step / steps)
            optimizers[name].step()
            optimizers[name].zero_grad(set_to_none=True)
            values[name] = loss.item()
        if step % 50 == 0:
            speed = (step + 1) * tokens.numel() / (time.monotonic() - began)
            print(f"  step {step}: {speed:,.0f} tokens/s, loss {json.dumps(values)}", flush=True)


@torch.no_grad()
def teach(target: LlamaForCausalLM, tokens: Tensor, aux_layer_ids: tuple[int, ...]) -> Teaching:
    out = target(input_ids=tokens, output_hidden_states=True, use_cache=False)
    aux = torch.cat([out.hidden_states[i] for i in aux_layer_ids], dim=-1)
    return Teaching(tokens, out.hidden_states[-1], aux, out.logits.softmax(-1))


def published_config(model: EagleModel, target: LlamaForCausalLM) -> dict[str, object]:
    """The keys that SafeAILab's files share; rope_theta, bias and draft_vocab_size differ between them."""
    d = model.spec.decoder
    return {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": target.config.bos_token_id,
        "eos_token_id": target.config.eos_token_id,
        "hidden_act": "silu",
        "hidden_size": d.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": d.intermediate_size,
        "max_position_embeddings": 2048,
        "model_type": "llama",
        "num_attention_heads": d.num_attention_heads,
        "num_key_value_heads": d.num_key_value_heads,
        "num_hidden_layers": 1,
        "pad_token_id": 0,
        "rms_norm_eps": d.rms_norm_eps,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.28.1",
        "use_cache": True,
        "vocab_size": model.spec.vocab_size,
    }


def draft_weights(model: EagleModel) -> dict[str, Tensor]:
    """The draft's own tensors in fp16, without what it borrows."""
    borrowed = ("embed_tokens.", "lm_head.") if model.spec.lm_head == "target" else ("embed_tokens.",)
    state = {name: t for name, t in model.state_dict().items() if not name.startswith(borrowed) and name != "d2t"}
    return {name: t.detach().to("cpu", torch.float16) for name, t in state.items()}


def save_eagle(model: EagleModel, out: Path, target: LlamaForCausalLM, *, bias_key: bool | None, embed: bool) -> None:
    """EAGLE-1 as published. With `bias_key` None: as the Vicuna files, without `bias`, kv heads and rope base."""
    config = published_config(model, target)
    weights = draft_weights(model)
    if bias_key is None:
        del config["num_key_value_heads"]
    else:
        config |= {"bias": bias_key, "rope_theta": model.spec.decoder.rope.base}
    if embed:
        weights["embed_tokens.weight"] = target.get_input_embeddings().weight.detach().to("cpu", torch.float16)
    write(out, config, weights)


def save_eagle3(model: EagleModel, out: Path, target: LlamaForCausalLM, kept: Tensor) -> None:
    """EAGLE-3 as published: `midlayer`, d2t and t2d, and no rope_theta."""
    weights = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in draft_weights(model).items()}
    weights["d2t"] = kept - torch.arange(len(kept))
    weights["t2d"] = torch.zeros(model.spec.vocab_size, dtype=torch.bool).index_fill(0, kept, True)
    write(out, published_config(model, target) | {"draft_vocab_size": len(kept)}, weights)


def write(out: Path, config: dict[str, object], weights: dict[str, Tensor]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    torch.save({name: tensor.contiguous() for name, tensor in weights.items()}, out / "pytorch_model.bin")
