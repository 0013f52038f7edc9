"""A draft beside the target that it is to serve: whom and what it was made for. Nothing is run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

from transformers import PreTrainedTokenizerBase

from draftkit.checks.registry import check, check_unless
from draftkit.errors import command
from draftkit.finding import Finding
from draftkit.hub.local_paths import public_name
from draftkit.layout.architecture import Architecture
from draftkit.layout.folder import Draft
from draftkit.layout.quantization import name_of_format
from draftkit.layout.target import TargetFacts
from draftkit.targets.chat import load_tokenizer
from draftkit.targets.tokens import same_vocabulary

TARGET_KEYS = ("name_or_path", "base_model_name_or_path", "verifier_name_or_path")  # under which trainers name theirs


@check
def lost_fc_bias(format: str, config: Mapping[str, object], facts: Mapping[str, object]) -> Iterator[Finding]:
    """EAGLE-1's `bias` is about fc, and true where the config does not say it."""
    if format == "eagle" and facts.get("fusion_bias") is False and config.get("bias", True) is True:
        yield Finding(
            "lost-fc-bias",
            "warning",
            "the config means an fc.bias, and the checkpoint has none",
            fix="get the file that has it, and convert it again",
            source="SafeAILab/EAGLE cnets1.py; vllm-project/vllm #22323",
        )


@check_unless("layer-ids-as-outputs", "layer-ids-as-states")
def moved_layers(architecture: Architecture, target: TargetFacts) -> Iterator[Finding]:
    """The captured layers are the default ones, all moved by one: the two numberings differ by that."""
    numberings = ((-1, "outputs"), (1, "states, counted from one too many"))
    usual = architecture.usual_layers(target.num_hidden_layers)
    for default, (by, numbering) in product(usual, numberings):
        if architecture.aux_layer_ids == tuple(i + by for i in default):
            yield Finding(
                "layer-ids",
                "warning",
                f"the captured layers {list(architecture.aux_layer_ids)} are the default ones, {list(default)}, "
                f"numbered as {numbering}; where layers are alike, acceptance hardly shows it",
                fix="--set aux_layer_ids=" + ",".join(map(str, default)),
                source="vllm-project/vllm #43671, sgl-project/sglang #25454",
            )


@check
def other_target(draft: Draft, target: TargetFacts, draft_name: str) -> Iterator[Finding]:
    """The draft names another target than the one that it is examined with."""
    trained = _stated_target(draft.provenance.dropped_config)
    for other, what in ((trained, "trained for"), (draft.provenance.target, "converted for")):
        if other is not None and not _same(other, target.name):
            yield Finding(
                "other-target",
                "note",
                f"{draft_name or 'the draft'} says that it was {what} {public_name(other)}; "
                f"this target is {public_name(target.name)}",
                cost="fewer tokens are accepted by another target, and by a fine-tune of it",
                fix=command("--target", public_name(other)),
                source="provenance",
            )
            return


@check
def other_precision(draft: Draft, target: TargetFacts) -> Iterator[Finding]:
    """A quantized target, and a draft that says it was made for another: its states are not those of the training."""
    stated = target.config.get("quantization_config")
    made_for = _stated_target(draft.provenance.dropped_config) or draft.provenance.target
    if isinstance(stated, dict) and made_for is not None and not _same(made_for, target.name):
        yield Finding(
            "other-precision",
            "note",
            f"the target is quantized ({name_of_format(stated) or 'in its own way'}), and the draft was trained on "
            f"another precision, {public_name(made_for)}",
            cost="some tokens of acceptance: how many, eval tells with each of the two targets",
            fix=command("draftkit", "adapt", "--target", target.name, "--draft", "DRAFT"),
            source="provenance",
        )


@check_unless("other-target")
def other_revision(draft: Draft, target: TargetFacts) -> Iterator[Finding]:
    made_for = draft.provenance.target_revision
    if None not in (target.revision, made_for) and target.revision != made_for:
        yield Finding(
            "other-revision",
            "note",
            f"the draft was made for revision {made_for} of the target; this is {target.revision}",
            fix=command("draftkit", "doctor", "--target", f"{target.name}@{made_for}"),
            source="provenance",
        )


def _same(one: str, other: str) -> bool:
    """Whether two targets have one name; a folder may have been fetched from the repository of its name."""
    names = [public_name(source).partition("@")[0].casefold() for source in (one, other)]
    return names[0] == names[1] or names[0].rpartition("/")[2] == names[1].rpartition("/")[2]


def _stated_target(config: Mapping[str, object]) -> str | None:
    """The target that a trainer wrote into its config, at whatever depth."""
    for key, value in config.items():
        if key in TARGET_KEYS and isinstance(value, str):
            return value
        found = _stated_target(value) if isinstance(value, dict) else None
        if found is not None:
            return found
    return None


@check
def other_tokenizer(draft: Draft, target: TargetFacts, tokenizer: PreTrainedTokenizerBase) -> Iterator[Finding]:
    """A language model of its own has a tokenizer and a chat template of its own."""
    if not draft.files:
        return
    own = load_tokenizer(draft.path, "draft")
    if not share_vocabulary(draft, own, tokenizer, target.vocab_size):
        yield Finding(
            "other-tokenizer",
            "warning",
            "draft and target have different tokenizers: it proposes only the tokens that both share",
            fix="transplant the target's vocabulary into the draft, or take a draft of the target's family",
            source="arXiv 2502.05202",
        )
    if own.chat_template is not None and own.chat_template != tokenizer.chat_template:
        yield Finding(
            "other-template",
            "note",
            "draft and target have different chat templates; the target's is used",
            fix="train the draft on text in the target's template",
            source="tokenizers of draft and target",
        )


def share_vocabulary(
    draft: Draft, own: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase, vocab_size: int
) -> bool:
    """Whether the draft's tokens are those of a target of this vocabulary."""
    return draft.spec.architecture.vocab_size == vocab_size and same_vocabulary(theirs, own, vocab_size)
