"""What the recipes of block drafters share: blocks at sampled anchors, their loss, and their chains.

Serving drafts a block after every round: its rows read the target's states up to the last token but one, and the newest
token. So a block here stands at an anchor i, where the state of position i is known and token i + 1 is the newest, and
drafts tokens i + 2 … (`TrainingBatch.drafted`). N positions, M blocks, K drafts of a block, H draft width.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from draftkit.errors import DraftkitError
from draftkit.io.settings import setting
from draftkit.layout.architecture import ParallelDrafting
from draftkit.layout.block import BlockConvolution
from draftkit.layout.families.dflash import CandidateSelector, DFlashSpec, MarkovHead
from draftkit.layout.spec import DraftSpec
from draftkit.models.decoder import CosSin
from draftkit.models.dflash import DFlashModel, GroupedConvolution, load_dflash
from draftkit.targets.states import FINAL, AuxLayers
from draftkit.train.attention import BLOCK_ATTENTION, Blocks
from draftkit.train.batch import TrainingBatch, shifted
from draftkit.train.losses.candidates import Candidates
from draftkit.train.losses.linear import LinearLoss, joined, linear_loss
from draftkit.train.losses.table import Loss, LossText, parse_loss
from draftkit.train.losses.teacher import OutputHead, Teacher, target_head
from draftkit.train.losses.weights import Reach, marginal
from draftkit.train.parallel import SMALLEST_SUM, check_mask_token, default_mask_token
from draftkit.train.recipes.bases.initialization import INITIAL_STD, check_layers, fresh_decoder
from draftkit.train.recipes.recipe import Chains, Origin, Recipe, StepOutcome, step_statistics
from draftkit.train.settings import Index, Positive, Repeats, Share, Size, sinks_setting

DPACE = "The α of D-PACE: instead of the decay, draft t counts its marginal effect on the expected acceptance length."
ROWS_AT_ONCE = 2048  # how many rows of blocks a pass has that covers every anchor


@dataclass(frozen=True, kw_only=True)
class BlockOptions:
    """Settings of all block drafters; those of the architecture, from `slots` on, hold for a new draft only.

    The loss is the weighted mean over all rows. `dpace` takes the draft's own probabilities p ← (1 − α)·p + α.
    """

    max_anchors: Size | None = setting(
        "The blocks of a batch, at random places of those where serving could draft; none for all.", 256, unit="blocks"
    )
    loss: LossText = setting("The loss of each row, as ce, kl or 0.1*ce + kl.", "ce")
    decay_length: Positive = setting(
        "The γ of the weights: draft t counts exp(−t/γ) (DFlash: 4).",
        4.0,
        needs="no dpace",
    )
    dpace: Share | None = setting(DPACE, None)
    temperature: Positive = setting("What divides the logits of draft and target before they are compared.", 1.0)
    train_head: bool = setting("Whether an output layer of the draft's own is trained.", False)
    slots: Literal["fill-in", "anchor-first"] = setting(
        "What the rows of a block predict. fill-in: each mask the token in its own place; anchor-first: each "
        "row the token after it.",
        "fill-in",
    )
    block_size: Repeats = setting("The rows of a block.", 8, unit="rows")
    mask_token_id: Index | None = setting(
        "The token in the place of masks; none for the last one that the target's tokenizer does not use.", None
    )
    layers: tuple[Index, ...] = setting(
        "The target's layers whose states are read, ascending: i is after i decoder layers; empty for the reference's.",
        (),
    )
    num_layers: Repeats = setting("The layers of the draft.", 2)
    sliding_window: Size | None = setting("The window of all layers but the last, none for none.", None, unit="tokens")
    sink_tokens: Index = sinks_setting()
    causal: bool | None = setting("Whether all layers are causal within the block; none: those with a window.", None)


class BlockHeads(NamedTuple):
    """What kinds of drafts add to DFlash's body, as in `DFlashSpec`."""

    markov: MarkovHead | None = None
    confidence: Literal["none", "hidden", "hidden_and_token"] = "none"
    convolution: BlockConvolution | None = None
    selector: CandidateSelector | None = None


class BlockRows(NamedTuple):
    """The drafting rows of all blocks: `steps` and `anchors` int64 [R], `output` and `latent` [R, H] and [R, r].

    `latent` is what the Markov head's second table reads, of width 0 without one. `confidence` [R]: the logit of the
    confidence head, None without one.
    """

    steps: Tensor
    anchors: Tensor
    output: Tensor
    latent: Tensor
    confidence: Tensor | None


@dataclass(frozen=True)
class LayerContexts:
    """The keys and values of the target's states for each layer, made where the layer asks for them: its weights may be
    there only while it runs."""

    draft: DFlashModel
    states: Tensor
    cos_sin: CosSin

    def __getitem__(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.draft.context(layer, self.states, self.cos_sin)


class BlockRecipe(Recipe):
    """A recipe for a `DFlashModel`; `head` is the target's output layer, restricted to the draft vocabulary."""

    draft: DFlashModel

    def __init__(self, draft: DFlashModel, origin: Origin, options: BlockOptions):
        super().__init__(draft, DraftSpec(architecture=draft.spec, dtype="F32"))
        if draft.spec.logit_softcap:
            raise DraftkitError(
                f"the draft caps its logits at {draft.spec.logit_softcap}", expected="a draft with plain logits"
            )
        self.options = options
        self.loss = parse_loss(options.loss)
        self.head = target_head(origin.target, draft.target_ids, options.temperature)
        self.num_target_layers = origin.target.config.get_text_config().num_hidden_layers
        if draft.spec.lm_head == "draft":
            assert draft.lm_head is not None
            draft.lm_head.requires_grad_(options.train_head)
        if draft.spec.embed_tokens == "draft":
            assert draft.embed_tokens is not None
            draft.embed_tokens.requires_grad_(False)  # a copy of the target's

    @property
    def aux_layers(self) -> AuxLayers:
        spec = self.draft.spec
        last = FINAL if spec.last_state == "after_norm" else self.num_target_layers
        return AuxLayers(tuple(last if i == self.num_target_layers else i for i in spec.aux_layer_ids))

    @property
    def layers_run_once(self) -> Sequence[nn.Module]:
        return list(self.draft.layers)

    @property
    @abstractmethod
    def confidence_weight(self) -> float:
        """The weight of the confidence head's loss."""

    def forward(self, batch: TrainingBatch) -> StepOutcome:
        drafted = batch.drafted(self.draft.spec.draft_tokens)
        anchors = _some(drafted[0].nonzero()[:, 0], self.options.max_anchors)
        teacher = self.head.teacher(batch.last[0])
        counted = torch.zeros_like(drafted)
        counted[:, anchors] = drafted[:, anchors]
        rows = self.rows(batch, anchors, len(drafted))
        found = self.compare(batch, rows, teacher, self._weights(counted), self.loss, self._reach(rows, counted))
        total = found.weights.sum().clamp(min=SMALLEST_SUM)
        value, statistics = found.value / total, step_statistics(found, rows.steps, rows.anchors, counted)
        if rows.confidence is not None and self.confidence_weight:
            alpha = found.alpha
            assert alpha is not None
            each = binary_cross_entropy_with_logits(rows.confidence.float(), alpha.float(), reduction="none")
            confidence = (each * found.weights).sum() / total
            value = value + self.confidence_weight * confidence
            statistics["confidence"] = confidence.detach()
        return StepOutcome(value, statistics)

    def rows(self, batch: TrainingBatch, anchors: Tensor, k: int) -> BlockRows:
        """The rows that draft `k` tokens at each of `anchors` int64 [M], with the true tokens as their prefix."""
        draft, spec = self.draft, self.draft.spec
        features = batch.last if batch.features is None else batch.features
        context = draft.fuse(features.float())  # the draft's parameters are, whatever the target's
        cos_sin = draft.rotary(context, batch.positions)
        fill_in = spec.slots == "fill-in"
        size = k + 1 if fill_in else k
        blocks = Blocks(anchors, size, batch.sample_ids, LayerContexts(draft, context, cos_sin))
        following = torch.stack([shifted(batch.tokens[0], 1 + t)[anchors] for t in range(k)], dim=1)  # [M, K]
        masks = anchors.new_full((len(anchors), size - 1), spec.parallel.mask_token_id)
        hidden = draft.embed(torch.cat((following[:, :1], masks), dim=1), context.dtype)
        positions = batch.positions[0, anchors, None] + 1 + torch.arange(size, device=anchors.device)
        output = draft(hidden, positions, blocks=blocks)[:, size - k :]
        latent = self._latents(following, output)
        confidence = None
        if draft.confidence_head is not None:
            reads_token = spec.confidence == "hidden_and_token"
            known = self._embedded(following) if reads_token else None
            confidence = draft.confidence_head.logits(output.detach(), known).flatten()
        step = torch.arange(k, device=anchors.device)
        return BlockRows(
            steps=step.repeat(len(anchors)),
            anchors=anchors.repeat_interleave(k),
            output=output.flatten(0, 1),
            latent=latent.flatten(0, 1),
            confidence=confidence,
        )

    def _embedded(self, previous: Tensor) -> Tensor:
        assert self.draft.markov_head is not None
        return self.draft.markov_head.markov_w1(previous).detach()

    def _latents(self, previous: Tensor, output: Tensor) -> Tensor:
        """The latents that the Markov head's second table reads, [M, K, r], of the tokens before each row int64 [M, K]
        and the rows' outputs; of width 0 without such a head."""
        head = self.draft.markov_head
        if head is None:
            return output[..., :0]
        state, latents = head.start(output), []
        for step in range(output.shape[1]):
            latent, state = head.latent(previous[:, step], output[:, step], state)
            latents.append(latent)
        return torch.stack(latents, dim=1)

    def compare(
        self,
        batch: TrainingBatch,
        rows: BlockRows,
        teacher: Teacher,
        weights: Tensor,
        loss: Loss,
        reach: Reach | None = None,
        candidates: Candidates | None = None,
    ) -> LinearLoss:
        """The draft's distribution of every row against the target's; `weights` float32 [K, N]. The likeliest tokens of
        each row are put into `candidates`."""
        taught, emitted = self.taught(batch, rows)
        layer, markov = self.draft.lm_head, self.draft.markov_head
        assert isinstance(layer, nn.Linear)
        hidden, table = rows.output, layer.weight
        frozen = 0 if table.requires_grad else table.shape[1]
        if markov is not None:  # both products at once: the bias is one more part of the same sum
            hidden = torch.cat((hidden, rows.latent.to(hidden.dtype)), dim=1)
            table = torch.cat((table, markov.markov_w2.weight.to(table.dtype)), dim=1)
        scale = self.draft.spec.logit_scale
        return linear_loss(
            hidden if scale == 1 else hidden * scale,
            OutputHead(table, layer.bias),
            teacher.at(taught),
            weights[rows.steps, rows.anchors],
            loss,
            emitted=emitted,
            frozen=frozen,
            reach=reach,
            candidates=candidates,
        )

    def taught(self, batch: TrainingBatch, rows: BlockRows) -> tuple[Tensor, Tensor]:
        """The position of the token before each row, whose state teaches it, and the token that the target emitted
        there: int64 [R] each."""
        taught = (rows.anchors + 1 + rows.steps) % batch.tokens.shape[1]
        return taught, shifted(batch.tokens[0], 1)[taught]

    def _weights(self, counted: Tensor) -> Tensor:
        """float32 [K, N]: what each draft counts, but for what `_reach` says."""
        weights = counted.float()
        if self.options.dpace is not None:
            return weights
        step = torch.arange(len(counted), device=counted.device)[:, None]
        return weights * torch.exp(-step / self.options.decay_length)

    def _reach(self, rows: BlockRows, counted: Tensor) -> Reach | None:
        if self.options.dpace is None:
            return None
        k = len(counted)
        places = torch.arange(len(rows.steps), device=counted.device)  # block by block
        return Reach(places, (len(places) // k, k), marginal, together=k, alpha=self.options.dpace)

    @torch.no_grad()
    def chains(self, batch: TrainingBatch, k: int) -> Chains:
        drafted = batch.drafted(k)
        teacher, loss = self.head.teacher(batch.last[0]), parse_loss("tv")
        parts = list(self._parts(batch, drafted[0].nonzero()[:, 0], k))
        found = joined([self.compare(batch, rows, teacher, drafted.float(), loss) for rows in parts])
        steps, anchors = torch.cat([rows.steps for rows in parts]), torch.cat([rows.anchors for rows in parts])
        return Chains.of(drafted, found, steps, anchors)

    def _parts(self, batch: TrainingBatch, anchors: Tensor, k: int) -> Iterator[BlockRows]:
        """The rows of all anchors, some at a time; of none, once."""
        for some in anchors.split(max(ROWS_AT_ONCE // (k + 1), 1)):
            yield self.rows(batch, some, k)


def _some(anchors: Tensor, most: int | None) -> Tensor:
    """A random choice of at most so many of the anchors, ascending. It is drawn by torch's own generator, whose state
    the Trainer saves."""
    if most is None or len(anchors) <= most:
        return anchors
    order = torch.randperm(len(anchors)).to(anchors.device)
    return anchors[order[:most].sort().values]


def block_draft(
    origin: Origin, recipe: str, methods: tuple[str, ...], options: BlockOptions, heads: BlockHeads
) -> DFlashModel:
    """The origin's draft in float32, ready to be trained further, with the heads that it lacks; where there is none, a
    fresh one.

    Heads that are added to a draft change nothing to begin with. Raises `DraftkitError` for a draft of other `methods`.
    """
    if origin.draft is None:
        return fresh_block_draft(block_spec(origin, options, heads), origin)
    architecture = origin.draft.spec.architecture
    if architecture.method not in methods:
        raise DraftkitError(
            f"the draft is of the kind {architecture.method}",
            where=origin.draft.path,
            hint=f"recipe {recipe} goes on with {' or '.join(methods)}",
        )
    older = load_dflash(origin.draft, origin.target, attention=BLOCK_ATTENTION, dtype=torch.float32)
    spec = older.spec
    own = BlockHeads(spec.markov, spec.confidence, spec.convolution, spec.selector)
    wanted = replace(spec, **heads._asdict()) if own == BlockHeads() else spec
    draft = fresh_block_draft(wanted, replace(origin, draft=None, d2t_ids=older.target_ids))
    draft.load_state_dict(older.state_dict(), strict=False)  # what is not in it keeps its beginning
    return draft


def block_spec(origin: Origin, options: BlockOptions, heads: BlockHeads) -> DFlashSpec:
    """The facts of a new draft: the target's sizes, and its embedding and head where it has the whole vocabulary."""
    target = origin.target
    config = target.config.get_text_config()
    window, full = options.sliding_window, options.num_layers - 1
    decoder = replace(
        fresh_decoder(target, options.num_layers),
        qk_norm=True,
        sliding_window=window,
        full_attention_layers=(full,) if window is not None and full else (),
        sink_tokens=options.sink_tokens,
    )
    layers = options.layers or default_layers(config.num_hidden_layers, options.num_layers)
    check_layers(layers, target)
    token = options.mask_token_id
    if token is None:
        token = default_mask_token(target.name_or_path, config.vocab_size)
    check_mask_token(token, config.vocab_size)
    sliding = tuple(layer for layer, own in enumerate(decoder.windows) if own is not None)
    causal = sliding if options.causal is None else tuple(range(options.num_layers)) if options.causal else ()
    return DFlashSpec(
        decoder=decoder,
        vocab_size=config.vocab_size,
        draft_vocab_size=config.vocab_size if origin.d2t_ids is None else len(origin.d2t_ids),
        target_hidden_size=config.hidden_size,
        aux_layer_ids=layers,
        last_state="before_norm",
        slots=options.slots,
        block_size=options.block_size,
        parallel=ParallelDrafting(mask_token_id=token, mask_state=False),
        mask_embedding=False,
        causal_layers=causal,
        window_rule="row",
        attention_sinks=False,
        value_scale=1.0,
        **heads._asdict(),
        embedding_scale=1.0,
        logit_scale=1.0,
        logit_softcap=0.0,
        embed_tokens="target",
        lm_head="target" if origin.d2t_ids is None else "draft",
    )


def default_layers(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """The states that z-lab's drafts read, five at most: evenly from after layer 1 to after layer N − 3 (z-lab/dflash
    `build_target_layer_ids`); fewer of a shallow target."""
    last = max(num_target_layers - 3, 1)
    count = max(min(num_draft_layers, last), 1)
    if count == 1:
        return (num_target_layers // 2 + 1,)
    step = (last - 1) / (count - 1)
    return tuple(sorted({2 + round(i * step) for i in range(count)}))


def fresh_block_draft(spec: DFlashSpec, origin: Origin) -> DFlashModel:
    """A new draft in float32. A head of its own starts as the target's rows, parts of DSpark and DFlash2 as nothing."""
    target = origin.target
    model = DFlashModel(spec, BLOCK_ATTENTION)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=INITIAL_STD)
    if model.markov_head is not None:
        nn.init.zeros_(model.markov_head.markov_w2.weight)
    if model.candidate_selector is not None:
        model.candidate_selector.say_nothing()
    for module in model.modules():
        if isinstance(module, GroupedConvolution):
            module.pass_through()
    embeddings, output = target.get_input_embeddings(), target.get_output_embeddings()
    with torch.no_grad():
        if spec.reduced_vocabulary:
            assert origin.d2t_ids is not None
            model.d2t.copy_(origin.d2t_ids.cpu() - torch.arange(len(origin.d2t_ids)))
        if isinstance(model.lm_head, nn.Linear):
            rows = output.weight if origin.d2t_ids is None else output.weight[origin.d2t_ids.to(output.weight.device)]
            model.lm_head.weight.copy_(rows)
        if isinstance(model.embed_tokens, nn.Embedding):
            model.embed_tokens.weight.copy_(embeddings.weight)
    model = model.to(target.device)
    model.borrow(embeddings.requires_grad_(False), output.requires_grad_(False))
    return model
