"""The embedded drafts that propose all tokens at once or without attention: P-EAGLE, PARD and an MLP speculator.

Distilled from the embedded target as those of `zoo_drafts` are. Mask rows of a window follow a few anchors of it: the
mask row of depth d sees the real tokens up to its anchor and the mask rows of smaller depth of the same anchor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import zoo_corpus  # noqa: F401  (zoo_drafts needs it beside itself)
import zoo_drafts
import zoo_target
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from zoo_drafts import Teaching, soft_cross_entropy

from draftkit.convert.api import convert_checkpoint
from draftkit.layout.dtypes import dtype_name
from draftkit.layout.folder import Draft, write_draft
from draftkit.layout.handles import TensorHandle, raw_memory
from draftkit.layout.provenance import FactOrigin, Provenance
from draftkit.layout.spec import DraftSpec, EagleSpec, MlpSpeculatorSpec, ParallelDrafting
from draftkit.models.eagle import EagleModel
from draftkit.models.mlp_speculator import MlpSpeculatorModel
from draftkit.models.target import load_target
from draftkit.runtime import attention
from draftkit.version import __version__

DEPTHS = 4  # tokens drafted at once while training
ANCHORS = 24  # per window
VOCABULARY = 1024  # of the P-EAGLE head
INNER = 128  # width of the MLP speculator
MASK_TOKEN = "<|reserved_0|>"
# Of the MLP speculator: the file holds tied weights once.
ONCE = FactOrigin(name="tied_copies", value="none", origin="stated", note="")


def masked_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *, scaling: float, mask: Tensor,
    **_: object,
) -> tuple[Tensor, None]:  # fmt: skip
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None


AttentionInterface.register("zoo-masked", masked_attention)


class MaskRows:
    """Mask rows behind the `rows` real rows of a window: where they stand, what they see, what they should say.

    `positions` [R + A·(D−1)]; `mask` bool [rows, rows]; `anchor` and `depth` of each row, depth 0 for real ones.
    """

    def __init__(self, rows: int, anchors: Tensor):
        depths = torch.arange(1, DEPTHS, device=anchors.device)
        real = torch.arange(rows, device=anchors.device)
        self.anchor = torch.cat((real, anchors.repeat_interleave(len(depths))))
        self.depth = torch.cat((torch.zeros_like(real), depths.repeat(len(anchors))))
        self.positions = self.anchor + self.depth
        sees_real = (self.depth == 0) & (self.anchor <= self.anchor[:, None])
        sees_mask = (self.depth > 0) & (self.anchor == self.anchor[:, None]) & (self.depth <= self.depth[:, None])
        self.mask = sees_real | sees_mask


def random_anchors(rows: int, device: torch.device) -> Tensor:
    return torch.randperm(rows, device=device)[:ANCHORS].sort().values


def p_eagle_loss(model: EagleModel, teaching: Teaching, kept: Tensor, mask_token: int) -> Tensor:
    rows = teaching.tokens.shape[1] - 1 - DEPTHS
    layout = MaskRows(rows, random_anchors(rows, teaching.tokens.device))
    batch, extra = len(teaching.tokens), len(layout.anchor) - rows
    tokens = torch.cat((teaching.tokens[:, 1 : 1 + rows], teaching.tokens.new_full((batch, extra), mask_token)), 1)
    masked = model.fuse(model.mask_hidden).expand(batch, extra, -1)
    hidden = torch.cat((model.fuse(teaching.aux[:, :rows]), masked), 1)
    out = model(tokens, hidden, layout.positions[None], mask=layout.mask)
    return soft_cross_entropy(teaching.probs[:, layout.positions + 1][..., kept], model.logits(out.head_input))


def pard_loss(model: LlamaForCausalLM, teaching: Teaching, mask_token: int) -> Tensor:
    rows = teaching.tokens.shape[1] - DEPTHS
    layout = MaskRows(rows, random_anchors(rows, teaching.tokens.device))
    batch, extra = len(teaching.tokens), len(layout.anchor) - rows
    tokens = torch.cat((teaching.tokens[:, :rows], teaching.tokens.new_full((batch, extra), mask_token)), 1)
    logits = model(input_ids=tokens, position_ids=layout.positions[None], use_cache=False, mask=layout.mask).logits
    return soft_cross_entropy(teaching.probs[:, layout.positions], logits)


def mlp_speculator_loss(model: MlpSpeculatorModel, teaching: Teaching) -> Tensor:
    rows = teaching.tokens.shape[1] - 1 - model.spec.num_heads
    state = model.start(teaching.final[:, :rows])
    loss = state.new_zeros(())
    for step in range(model.spec.num_heads):
        ahead = slice(1 + step, 1 + step + rows)
        logits, state = model(step, state, teaching.tokens[:, ahead])
        loss = loss + soft_cross_entropy(teaching.probs[:, ahead], logits)
    return loss


def p_eagle_spec(target: LlamaConfig, aux_layer_ids: tuple[int, ...], mask_token: int) -> EagleSpec:
    return replace(
        zoo_drafts.eagle3_spec(target, aux_layer_ids),
        draft_vocab_size=VOCABULARY,
        embed_tokens="draft",
        parallel=ParallelDrafting(mask_token_id=mask_token, mask_state=True),
    )


def mlp_speculator_spec(target: LlamaConfig) -> MlpSpeculatorSpec:
    return MlpSpeculatorSpec(
        target_hidden_size=target.hidden_size,
        inner_size=INNER,
        vocab_size=target.vocab_size,
        num_heads=DEPTHS,
        tied=True,
        scale_input=True,
        top_k_per_head=(4, 3, 2, 2),
        num_candidates=5,
    )


def new_p_eagle(spec: EagleSpec, target: LlamaForCausalLM) -> EagleModel:
    """Random weights, but the target's embedding to begin with."""
    model = EagleModel(spec, "zoo-masked")
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            nn.init.normal_(parameter, std=0.02)
    assert isinstance(model.embed_tokens, nn.Embedding)
    model.embed_tokens.weight.data.copy_(target.get_input_embeddings().weight)
    return model.to(target.device)


def train_parallel_drafts(
    models: Path, *, steps: int, batch: int, answers: int, lr: float, seed: int, device: str
) -> None:
    """Train the three on the target in `models/target` and save them beside it in their published layouts.

    PARD is a fine-tune of the standalone draft in `models/draft-model`, as its authors make theirs.
    """
    torch.manual_seed(seed)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(models / "target")
    target = load_target(models / "target", device=device, dtype=torch.float32, attention=attention.NAME)
    rows = zoo_drafts.greedy_answers(target, tokenizer, answers, seed)
    answered = torch.tensor([token for row in rows for token in row])
    stream = torch.cat((answered, zoo_target.training_tokens(tokenizer, seed)[: len(answered)]))
    kept = torch.bincount(stream, minlength=target.config.vocab_size).argsort(descending=True, stable=True)
    kept = kept[:VOCABULARY].sort().values.to(device)
    n, mask_token = target.config.num_hidden_layers, tokenizer.convert_tokens_to_ids(MASK_TOKEN)
    aux_layer_ids = (2, n // 2, n - 3)
    p_eagle = new_p_eagle(p_eagle_spec(target.config, aux_layer_ids, mask_token), target)
    pard = LlamaForCausalLM.from_pretrained(models / "draft-model", dtype=torch.float32).to(device).train()
    pard.set_attn_implementation("zoo-masked")
    mlp = MlpSpeculatorModel(mlp_speculator_spec(target.config)).to(device)
    losses: dict[str, Callable[[Teaching], Tensor]] = {
        "p-eagle": lambda t: p_eagle_loss(p_eagle, t, kept, mask_token),
        "pard": lambda t: pard_loss(pard, t, mask_token),
        "mlp-speculator": lambda t: mlp_speculator_loss(mlp, t),
    }
    trained = {name: zoo_drafts.draft_parameters(m) for name, m in zip(losses, (p_eagle, pard, mlp), strict=True)}
    zoo_drafts.fit(target, aux_layer_ids, losses, trained, stream, steps=steps, batch=batch, lr=lr, seed=seed)
    p_eagle.d2t.copy_(kept - torch.arange(len(kept), device=device))
    save(DraftSpec(architecture=p_eagle.spec, dtype="F16"), p_eagle, models / "p-eagle", "speculators")
    save(DraftSpec(architecture=mlp.spec, dtype="F16"), mlp, models / "mlp-speculator", "mlp-speculator")
    pard.config.update({"pard_token": mask_token, "spd_type": "pard"})
    pard.to(torch.bfloat16).save_pretrained(models / "pard")
    tokenizer.save_pretrained(models / "pard")


def save(spec: DraftSpec, model: nn.Module, out: Path, to: str) -> None:
    """Write a draft in fp16 in one of its published layouts."""
    prefix = "speculator." if isinstance(spec.architecture, MlpSpeculatorSpec) else ""
    tensors = {}
    for name, tensor in model.state_dict().items():
        value = tensor.detach().cpu().to(torch.float16 if tensor.is_floating_point() else tensor.dtype).contiguous()
        tensors[prefix + name] = handle(prefix + name, value)
    provenance = Provenance(
        source="scripts/make_zoo.py", source_revision=None, format="trained", files=(), target="zoo:target",
        target_revision=None, facts=(ONCE,), dropped_config={}, losses=(), draftkit_version=__version__,
    )  # fmt: skip
    with TemporaryDirectory() as scratch:
        unified = Path(scratch) / "draft"
        write_draft(unified, Draft(unified, spec, provenance, tensors))
        convert_checkpoint(str(unified), out, to=to, target="zoo:target", force=True)
    (out / "draftkit-provenance.json").unlink()


def handle(name: str, tensor: Tensor) -> TensorHandle:
    """A tensor in memory as a source for writing."""
    shape = tuple(tensor.shape)
    return TensorHandle(name, dtype_name(tensor.dtype), shape, Path(), lambda size: iter([raw_memory(tensor)]))
