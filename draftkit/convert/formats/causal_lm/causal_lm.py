"""A plain causal language model as draft, in the layout of transformers; its config is kept verbatim.

PARD and PARD-2 are causal language models too, and read as this is.
"""

from __future__ import annotations

from collections.abc import Mapping

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.export import Export, Outgoing
from draftkit.convert.facts import Facts
from draftkit.convert.formats.mtp.heads import find_heads
from draftkit.convert.plan import Plan, common_dtype, make_plan, rename
from draftkit.errors import FormatError
from draftkit.io.handles import TensorHandle
from draftkit.layout.architecture import ParallelDrafting
from draftkit.layout.families.causal_lm import WINDOWED, CausalLMSpec, TargetFeatures
from draftkit.layout.folder import Draft, tokenizer_files
from draftkit.layout.quantization import name_of_format
from draftkit.layout.spec import DraftSpec
from draftkit.layout.target import TargetFacts

NAME = "causal-lm"
TITLE = "causal language model (transformers layout)"

DESTINATION = "hf"
METHODS = ("draft-model",)
# The embedding tables of families that do not follow Llama's names: OPT, GPT-2, GPT-NeoX, BLOOM and Falcon.
EMBEDDINGS = {
    "model.decoder.embed_tokens.weight",
    "transformer.wte.weight",
    "gpt_neox.embed_in.weight",
    "transformer.word_embeddings.weight",
}
# Files of models without a head, whose names lack the module that a causal LM has around them: embedding → that module.
BASE_MODELS = {
    "wte.weight": "transformer.",  # GPT-2
    "word_embeddings.weight": "transformer.",  # BLOOM
    "decoder.embed_tokens.weight": "model.",  # OPT
    "embed_in.weight": "gpt_neox.",
}
OWN_HEADS = "its own multi-token prediction heads, which --part mtp takes out: a model that drafts does not use them"
NO_TOKEN = -1  # what PARD's trainer writes when it was given no mask token


def recognize(checkpoint: Checkpoint) -> int:
    embeddings = EMBEDDINGS | BASE_MODELS.keys()
    return int(checkpoint.is_causal_lm or bool(embeddings & checkpoint.tensors.keys()))


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    return plan_causal_lm(NAME, checkpoint, facts, target)


def export(outgoing: Outgoing) -> Export:
    draft = outgoing.draft
    return Export(config=exported_config(draft), moves=tuple(outgoing.renamed({})), losses=exported_losses(draft))


def plan_causal_lm(
    name: str,
    checkpoint: Checkpoint,
    facts: Facts,
    target: TargetFacts | None,
    parallel: ParallelDrafting | None = None,
    target_features: TargetFeatures | None = None,
    dropped: Mapping[str, str] | None = None,
) -> Plan:
    """Plan the conversion of a causal LM; `name` is the format's. There is no spec while `facts` lack something."""
    vocab_size = facts.size("vocab_size")
    if target is not None and target.vocab_size != vocab_size:
        note = f"{target.name} has {target.vocab_size}: the draft proposes the tokens that both tokenizers share"
        facts.record("vocabulary", "another", "from target", note)
    facts.record("config", str(checkpoint.config.get("model_type")), "stated", "kept verbatim")
    _check_quantizer(checkpoint, facts)
    facts.keep_config()
    spec = None
    if not facts.missing:
        architecture = CausalLMSpec(
            config=checkpoint.config, vocab_size=vocab_size, parallel=parallel, target_features=target_features,
            sliding_window=_window(checkpoint.config, facts),
        )  # fmt: skip
        spec = DraftSpec(architecture=architecture, dtype=common_dtype(checkpoint))
    heads = find_heads(checkpoint)
    left = {} if heads is None else dict.fromkeys([*heads.tensors, *heads.unexpected], OWN_HEADS)
    moves = rename(checkpoint, full_names(checkpoint.tensors), left | dict(dropped or {}))
    return make_plan(name, checkpoint, facts, spec, moves, tokenizer_files(checkpoint.source.path))


def _window(config: Mapping[str, object], facts: Facts) -> int | None:
    """The window of all layers that the config says to vLLM, and transformers' class does not read."""
    kinds, window = config.get("layer_types"), config.get("sliding_window")
    slides = isinstance(kinds, list) and set(kinds) == {"sliding_attention"}
    if not (slides and isinstance(window, int) and config.get("model_type") == WINDOWED):
        return None
    return facts.record("sliding_window", window, "stated", "by layer_types, which vLLM reads")


def full_names(tensors: Mapping[str, TensorHandle]) -> dict[str, str]:
    """Renames that give the tensors of a base model their names in the causal LM, as transformers does on loading."""
    module = next((module for name, module in BASE_MODELS.items() if name in tensors), None)
    return {} if module is None else {"lm_head.": "lm_head.", "": module}


def read_mask_token(checkpoint: Checkpoint, facts: Facts) -> ParallelDrafting | None:
    """PARD's mask token; None while it is missing, which `facts` then say."""
    token = facts.optional("pard_token", int)
    if token in (None, NO_TOKEN):
        given = facts.require("mask_token_id", "ask the author for PARD's mask token and pass --set mask_token_id=…")
        token = None if given is None else facts.as_integers("mask_token_id", [given])[0]
    else:
        facts.record("mask_token_id", token, "stated", "pard_token")
    if token is None:
        return None
    vocab_size = checkpoint.config.get("vocab_size")
    if not isinstance(vocab_size, int) or not 0 <= token < vocab_size:
        raise FormatError(
            f"PARD's mask token is {token}, and the vocabulary has {vocab_size} tokens", where=checkpoint.config_path
        )
    return ParallelDrafting(mask_token_id=token, mask_state=False)


def exported_config(draft: Draft) -> dict[str, object]:
    """The config that came, with what a file beside it said about quantized weights."""
    said = {} if draft.spec.quantization is None else {"quantization_config": draft.spec.quantization}
    return draft.spec.architecture.expect(CausalLMSpec).config | said


def exported_losses(draft: Draft) -> tuple[str, ...]:
    """What the layout of transformers has no place for."""
    model = draft.spec.architecture.expect(CausalLMSpec)
    ids, window = model.head_ids, model.sliding_window
    found = [] if ids is None else [f"head_ids is a list of {len(ids)} tokens, and engines propose any token"]
    if window is not None:
        found.append(f"sliding_window is {window}, and a model runs with the windows of its own config there")
    return tuple(found)


def _check_quantizer(checkpoint: Checkpoint, facts: Facts) -> None:
    """The config is kept verbatim: raise `FormatError` where it says that plain weights are quantized."""
    stated = facts.mapping("quantization_config")
    if stated is not None and not checkpoint.quantized:
        raise FormatError(
            f"the config says that the weights are quantized ({name_of_format(stated)}), and they are plain",
            where=checkpoint.config_path,
            hint="take quantization_config out of a copy of it, if the weights are the right ones",
        )
