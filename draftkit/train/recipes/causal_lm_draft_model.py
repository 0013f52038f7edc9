"""A small causal language model distilled to draft for a large one (DistillSpec, arXiv 2310.08461).

The draft learns the target's distribution at every position whose next token serving would draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from draftkit.errors import DraftkitError
from draftkit.io.settings import setting
from draftkit.layout.families.causal_lm import CausalLMSpec
from draftkit.layout.spec import DraftSpec
from draftkit.targets.attention import Sight, narrow
from draftkit.targets.states import AuxLayers, decoder_layers, decoder_of
from draftkit.targets.target import load_target
from draftkit.train.attention import MASKED_ATTENTION, masks_of_samples
from draftkit.train.batch import TrainingBatch, shifted
from draftkit.train.losses.linear import LinearLoss, linear_loss
from draftkit.train.losses.table import Loss, LossText, parse_loss
from draftkit.train.losses.teacher import OutputHead, require_plain_logits, target_head
from draftkit.train.losses.weights import Reduction
from draftkit.train.recipes.recipe import Chains, Origin, Recipe, StepOutcome, step_statistics
from draftkit.train.settings import (
    Index,
    Positive,
    RepeatsOrDefault,
    Size,
    SizeOrNone,
    sinks_setting,
    window_setting,
)


def require_causal_lm(origin: Origin, methods: tuple[str, ...]) -> CausalLMSpec:
    """The architecture of the origin's draft. Raises `DraftkitError` where it is none of `methods`, quantized, or of
    another vocabulary than the target."""
    assert origin.draft is not None
    where = origin.draft.path
    if origin.draft.spec.method not in methods:
        raise DraftkitError(
            f"the draft is of the kind {origin.draft.spec.method}", where=where, expected=" or ".join(methods)
        )
    spec = origin.draft.spec.architecture.expect(CausalLMSpec)
    if origin.draft.spec.quantization is not None:
        raise DraftkitError("the draft's weights are quantized", where=where, hint="train the original checkpoint")
    size = origin.target.config.get_text_config().vocab_size
    if spec.vocab_size != size:
        raise DraftkitError(
            f"the draft has {spec.vocab_size} tokens, the target {size}",
            where=where,
            hint="give the draft the target's vocabulary first, or train another draft",
        )
    return spec


def require_own_names(recipe: Recipe) -> None:
    """Raise `DraftkitError` for a model that stores its weights under other names than it trains them."""
    if missing := recipe.stored_names - recipe.draft.state_dict().keys():
        raise DraftkitError(
            f"{type(recipe.draft).__name__} stores its weights under other names than it trains them: {min(missing)}",
            expected="a dense model",
        )


# The sizes of a new draft that the options leave open, for a target that is not itself small.
NUM_LAYERS = 4
WIDTH = 512
HEAD_SIZE = 64


@dataclass(frozen=True)
class DraftModelOptions:
    """The recipe's settings; those of the architecture hold for a new draft only.

    A new draft is a Llama with the target's vocabulary, whose output layer is its embedding.
    """

    loss: LossText = setting("The loss, as ce, kl or 0.1*ce + kl; ce is that of the text's tokens.", "kl")
    temperature: Positive = setting("What divides the logits of draft and target before they are compared.", 1.0)
    num_layers: RepeatsOrDefault = setting("The layers; 0 for at most 4, and at most half of the target's.", 0)
    hidden_size: SizeOrNone = setting(
        "The width; 0 for at most 512, and at most half of the target's.", 0, unit="features"
    )
    intermediate_size: SizeOrNone = setting("The width within the MLP; 0 for 8/3 of the width.", 0, unit="features")
    num_heads: RepeatsOrDefault = setting("The attention heads; 0 for heads of 64 features or a little more.", 0)
    num_key_value_heads: RepeatsOrDefault = setting("The heads of keys and values; 0 for as many as heads.", 0)
    sliding_window: Size | None = window_setting()
    sink_tokens: Index = sinks_setting()


class DraftModel(Recipe):
    """Trains standalone draft models."""

    options_type = DraftModelOptions
    draft: PreTrainedModel

    def __init__(self, origin: Origin, options: DraftModelOptions):
        if origin.draft is None:
            spec = draft_model_spec(origin, options)
            draft = fresh_draft_model(spec).to(origin.target.device)
        else:
            spec = require_causal_lm(origin, (self.name,))
            device = str(origin.target.device)
            draft = load_target(origin.draft.path, device=device, dtype=torch.float32, attention=MASKED_ATTENTION)
        require_plain_logits(draft, "draft")
        narrow(draft, Sight(spec.sliding_window, spec.sink_tokens))
        super().__init__(draft.requires_grad_(True), DraftSpec(architecture=spec, dtype="F32"))
        require_own_names(self)
        self.head = target_head(origin.target, None, options.temperature)
        self.options = options
        self.loss = parse_loss(options.loss)

    @property
    def aux_layers(self) -> AuxLayers | None:
        return None

    @property
    def layers_run_once(self) -> Sequence[nn.Module]:
        return decoder_layers(decoder_of(self.draft))

    def forward(self, batch: TrainingBatch) -> StepOutcome:
        counted = batch.drafted(1).roll(1, -1)  # the row that drafts token i + 2 is that of token i + 1
        found = self.compare(batch, Reduction().weights(counted)[0], self.loss)
        rows = torch.arange(counted.shape[1], device=counted.device)
        return StepOutcome(found.value, step_statistics(found, torch.zeros_like(rows), rows, counted))

    @torch.no_grad()
    def chains(self, batch: TrainingBatch, k: int) -> Chains:
        """The chains, in which a row is always the same with the true tokens as prefix: step t is the row 1 + t
        later."""
        drafted = batch.drafted(k)
        needed = drafted[0].roll(1)
        found = self.compare(batch, needed.float(), parse_loss("tv"))

        def of_steps(values: Tensor | None) -> Tensor:
            assert values is not None
            return torch.stack([shifted(values, 1 + t) for t in range(k)])

        return Chains(drafted, *map(of_steps, (found.agree, found.ratio, found.alpha, found.oov)))

    def compare(self, batch: TrainingBatch, weights: Tensor, loss: Loss) -> LinearLoss:
        """The draft's distribution of every position against the target's of the same; `weights` float32 [N]."""
        layer = self.draft.get_output_embeddings()
        following = shifted(batch.tokens[0], 1)
        return linear_loss(
            self.states(batch)[0],
            OutputHead(layer.weight, layer.bias),
            self.head.teacher(batch.last[0]),
            weights,
            loss,
            labels=following,
            emitted=following,
        )

    def states(self, batch: TrainingBatch) -> Tensor:
        """The draft's states before its output layer, [1, N, H]; no sample sees another."""
        return (
            self.draft.get_decoder()(
                input_ids=batch.tokens,
                position_ids=batch.positions,
                use_cache=False,
                masks=masks_of_samples(batch.sample_ids),
            )
        ).last_hidden_state


def draft_model_spec(origin: Origin, options: DraftModelOptions) -> CausalLMSpec:
    """The architecture of a new draft."""
    if origin.d2t_ids is not None:
        raise DraftkitError("a draft vocabulary", expected="none: a draft model has all tokens")
    target = origin.target.config.get_text_config()
    width = options.hidden_size or min(WIDTH, target.hidden_size // 4 * 2)
    heads = options.num_heads or _num_heads(width)
    kv_heads = options.num_key_value_heads or heads
    if width % (2 * heads) or heads % kv_heads:
        raise DraftkitError(
            f"a draft model of hidden_size {width} with {heads} heads and {kv_heads} key-value heads",
            expected="an even number of numbers a head, and a number of heads that the key-value heads divide",
        )
    config = LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=width,
        intermediate_size=options.intermediate_size or width * 8 // 3,
        num_hidden_layers=options.num_layers or min(NUM_LAYERS, max(1, target.num_hidden_layers // 2)),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=target.max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=target.bos_token_id,
        eos_token_id=target.eos_token_id,
        architectures=[LlamaForCausalLM.__name__],
    )
    _require_smaller(config, origin.target)
    return CausalLMSpec(
        config=config.to_dict(), vocab_size=target.vocab_size, parallel=None, target_features=None,
        sliding_window=options.sliding_window, sink_tokens=options.sink_tokens,
    )  # fmt: skip


def _num_heads(width: int) -> int:
    """The largest number of heads of at least `HEAD_SIZE` numbers that divides the width into even parts."""
    return next(heads for heads in range(max(1, width // HEAD_SIZE), 0, -1) if width % (2 * heads) == 0)


def _require_smaller(config: LlamaConfig, target: PreTrainedModel) -> None:
    with torch.device("meta"):
        size = LlamaForCausalLM(config).num_parameters()
    if size >= target.num_parameters():
        raise DraftkitError(
            f"a draft model of {size:,} parameters for a target of {target.num_parameters():,}",
            hint="lower options.hidden_size or options.num_layers, or leave them out",
        )


def fresh_draft_model(spec: CausalLMSpec) -> LlamaForCausalLM:
    """A new draft in float32, initialized as transformers does."""
    config = LlamaConfig.from_dict(spec.config)
    config._attn_implementation = MASKED_ATTENTION
    return LlamaForCausalLM(config)
