"""A small causal LM with the tokenizer of a target.

As in Qwama (turboderp, Qwen2-0.5B with the tokenizer of Llama 3): tokens of both vocabularies keep their rows, the
others are put together from the donor's. Everything between embedding and output layer stays as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from draftkit.convert.api import inspect_checkpoint
from draftkit.convert.unified import unify, write_draft
from draftkit.errors import FormatError
from draftkit.hub.locate import Located, locate
from draftkit.io.records import to_dict
from draftkit.layout.families.causal_lm import CausalLMSpec
from draftkit.layout.folder import Draft, tokenizer_files
from draftkit.layout.provenance import FactOrigin
from draftkit.prepare.causal_lm import vocabulary_tensors
from draftkit.prepare.causal_lm_trim import keep_channels, keep_layers
from draftkit.prepare.matching import Match, count_kinds, match_vocabularies
from draftkit.prepare.rows import Weighting, transplanted_rows
from draftkit.prepare.segmenter import check_kind
from draftkit.prepare.vocabulary import TOKEN_KEYS, Vocabulary, open_vocabulary


@dataclass(frozen=True)
class Transplant:
    """A planned transplant; no weight has been read. `matches`: for every row of the target, what it is made of."""

    donor: Vocabulary
    target: Vocabulary
    matches: tuple[Match, ...]
    draft: Draft

    def write(self, out: Path, *, force: bool = False) -> Path:
        """Write the draft, one tensor in memory at a time. Raises `DraftkitError`; then `out` is as it was."""
        write_draft(out, self.draft, force=force)
        return out

    def to_dict(self) -> dict[str, object]:
        """What becomes of the rows, in JSON values."""
        target, donor = self.target, self.donor
        return {
            "schema": 1,
            "donor": donor.name,
            "tokenizer_of": target.name,
            "vocab_size": {"donor": donor.size, "target": target.size},
            "rows": count_kinds(self.matches),
            "roles": [
                {"target": target.named[row], "donor": donor.named[match.donors[0]]}
                for row, match in enumerate(self.matches)
                if match.kind == "role"
            ],
            "tokens_without_a_row": target.tokenizer.convert_ids_to_tokens(target.beyond),
            "facts": [to_dict(fact) for fact in self.draft.provenance.facts],
        }


def transplant_tokenizer(
    donor: str,
    tokenizer_of: str,
    out: Path,
    *,
    weighting: Weighting = "mean",
    layers: str | None = None,
    intermediate: int | None = None,
    force: bool = False,
) -> Path:
    """Write the donor with another model's tokenizer to `out`; see `plan_transplant`."""
    plan = plan_transplant(donor, tokenizer_of, weighting=weighting, layers=layers, intermediate=intermediate)
    return plan.write(out, force=force)


def plan_transplant(
    donor: str,
    tokenizer_of: str,
    *,
    weighting: Weighting = "mean",
    layers: str | None = None,
    intermediate: int | None = None,
) -> Transplant:
    """Match the vocabularies of two models, and plan the draft that has the donor's layers and the target's tokens.

    Both are folders, Hub ids or zoo models; of the target no weights are read. `weighting`: how the row of a token is
    put together that the donor writes as several (`shares`). `layers` (a number, or a list as 0,1,5) and `intermediate`
    (MLP channels) trim the donor. Raises `DraftkitError` for donors that are no plain causal LM or are quantized, and
    for tokenizers whose tokens cannot be compared.
    """
    target = open_vocabulary(locate(tokenizer_of, weights=False))
    check_kind(target.tokenizer, target.name)
    model = _open_donor(donor)
    own = open_vocabulary(Located(model.path, donor))
    matches = match_vocabularies(own, target)
    origin = ", ".join(f"{count} {kind}" for kind, count in count_kinds(matches).items() if count)
    facts = [FactOrigin(name="tokenizer", value=target.name, origin="from target", note=origin)]
    if layers is not None:
        model, kept = keep_layers(model, layers)
        facts.append(_kept("layers", ",".join(map(str, kept))))
    if intermediate is not None:
        model = keep_channels(model, intermediate)
        facts.append(_kept("intermediate_size", str(intermediate)))
    draft = _with_vocabulary(model, own, target, matches, weighting)
    provenance = replace(
        draft.provenance,
        facts=(*draft.provenance.facts, *facts),
        target=target.name,
        target_revision=target.revision,
    )
    return Transplant(own, target, tuple(matches), replace(draft, provenance=provenance))


def _open_donor(source: str) -> Draft:
    """The donor in the layout. Raises `FormatError` for drafts of other kinds and for quantized weights."""
    found = inspect_checkpoint(source)
    draft = found if isinstance(found, Draft) else unify(found.checkpoint, found.plan, None)
    if draft.spec.method != "draft-model":
        raise FormatError(
            f"{source} is a draft of the kind {draft.spec.method}", where=draft.path, expected="a plain causal LM"
        )
    if draft.spec.quantization is not None:
        raise FormatError(f"the weights of {source} are quantized", where=draft.path, hint="pass the original model")
    return draft


def _kept(name: str, value: str) -> FactOrigin:
    return FactOrigin(name=name, value=value, origin="overridden", note="kept of the donor")


def _with_vocabulary(
    model: Draft, donor: Vocabulary, target: Vocabulary, matches: Sequence[Match], weighting: Weighting
) -> Draft:
    """The model with other rows, ids and tokenizer files."""
    lm = model.spec.architecture.expect(CausalLMSpec)
    lengths = [len(donor.named.get(row, "")) for row in range(donor.size)]
    tensors = dict(model.tensors)
    for name in vocabulary_tensors(lm):
        if name in tensors:  # a tied output layer may be stored or not
            tensors[name] = transplanted_rows(tensors[name], matches, lengths, weighting)
    ids = {key: target.token_ids.get(key) for key in TOKEN_KEYS if key in lm.config or key in target.token_ids}
    architecture = replace(
        lm, config=lm.config | ids | {"vocab_size": target.size}, vocab_size=target.size, head_ids=None
    )
    spec = replace(model.spec, architecture=architecture)
    spec.check_tensors({t.name: (t.dtype, t.shape) for t in tensors.values()}, model.path)
    return replace(model, spec=spec, tensors=tensors, files=tokenizer_files(target.folder))
