"""A draft over fewer tokens: the most frequent ones, so that each of its steps reads fewer rows of the head.

As FR-Spec (arXiv 2502.14856) and EAGLE-3 do it. An EAGLE-style draft loses rows of its head, which engines load with
`d2t`. A causal language model keeps its tensors and says which tokens it proposes, so that its folder stays one that
engines load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from draftkit.convert.api import inspect_checkpoint
from draftkit.convert.unified import unify, write_draft
from draftkit.data.columns import SampleTable
from draftkit.data.sample_files import read_origin, read_training_samples
from draftkit.data.tokenizer import TargetTokenizer, served_with
from draftkit.data.vocabulary import SIZES, Ceiling, ceiling, token_counts
from draftkit.engines.vllm.accepts import refusal_by_vllm
from draftkit.errors import DraftkitError, FormatError, TargetError, command
from draftkit.hub.local_paths import reachable
from draftkit.hub.locate import Located, locate
from draftkit.layout.folder import Draft
from draftkit.layout.provenance import FactOrigin
from draftkit.loading import OpenedTarget
from draftkit.prepare.head import Head, open_head, with_rows
from draftkit.prepare.vocabulary import Vocabulary, open_vocabulary
from draftkit.targets.chat import load_tokenizer
from draftkit.targets.tokens import TOKENIZERS, same_vocabulary

ASKED = "--keep"  # why a token is kept, where no role keeps it


@dataclass(frozen=True)
class Pruning:
    """What vocabularies of several sizes allow and save, and the draft of one of them, which is not written yet.

    `head`: that of the source. `kept`: the tokens that every size has, and why; `absent`: those that would be kept, but
    that the source does not propose. `ceilings`: of each size, the last one of the source. `pruned`: the draft over
    `size` tokens, None where only the ceilings were asked for.
    """

    source: Draft
    name: str
    owner: Vocabulary
    num_samples: int
    k: int
    head: Head
    kept: Mapping[int, str]
    absent: Mapping[int, str]
    ceilings: tuple[Ceiling, ...]
    size: int | None
    pruned: Draft | None

    def write(self, out: Path, *, force: bool = False) -> Path:
        """Write the draft. Raises `DraftkitError`; then `out` is as it was."""
        assert self.pruned is not None, "a size comes first"
        write_draft(out, self.pruned, force=force)
        return out

    def to_dict(self) -> dict[str, object]:
        """The table and what was chosen, in JSON values; bytes are those of the head that a draft step reads."""
        return {
            "schema": 1,
            "draft": self.name,
            "tokenizer_of": self.owner.name,
            "documents": self.num_samples,
            "num_speculative_tokens": self.k,
            "draft_vocab_size": len(self.head),
            "kept": self._tokens(self.kept),
            "absent": self._tokens(self.absent),
            "sizes": [c.to_dict() | self._bytes(c.size) for c in self.ceilings],
            "size": self.size,
            "refused_by_vllm": self._new_refusal(),
        }

    def _bytes(self, size: int) -> dict[str, int]:
        return {
            "head_bytes": self.head.bytes_of(size),
            "saved_bytes": self.head.bytes_of(len(self.head) - size),
        }

    def _tokens(self, ids: Mapping[int, str]) -> list[dict[str, object]]:
        texts = self.owner.tokenizer.convert_ids_to_tokens(list(ids))
        return [{"id": i, "token": text, "why": why} for (i, why), text in zip(ids.items(), texts, strict=True)]

    def _new_refusal(self) -> str | None:
        """Why vLLM must not load the pruned draft, where it could load the source."""
        if self.pruned is None or refusal_by_vllm(self.source.spec) is not None:
            return None
        return refusal_by_vllm(self.pruned.spec)


def plan_pruning(
    draft: str,
    data: Path,
    *,
    size: int | None = None,
    target: str | None = None,
    keep: Sequence[str] = (),
    k: int = 4,
    sizes: Sequence[int] = SIZES,
) -> Pruning:
    """Find the `size` tokens of a draft that are the most frequent in what the target wrote, and what others allow.

    `draft` and `target` are folders, Hub ids or zoo models. Without `target`, a causal language model has its own
    tokenizer, and another draft the target that it was made for. `data`: samples that `draftkit data prepare` wrote.
    What ends an answer is always kept, and so is `keep`: ids, or texts of tokens. `sizes` are judged beside `size`, by
    their ceilings at `k` draft tokens a round. Raises `DraftkitError`.
    """
    source = _open(draft, target)
    owner = _owner(draft, source, target)
    head = open_head(source, owner)
    samples = _read_samples(data, owner)
    wanted = _end_tokens(owner) | {_token(text, owner): ASKED for text in keep}
    has = set(head.ids.tolist())
    kept = {token: why for token, why in wanted.items() if token in has}
    absent = {token: why for token, why in wanted.items() if token not in has}
    _check_kept(size, kept, absent, len(head))
    counts = token_counts(samples, range(len(samples)), owner.size)
    judged = [*sorted({n for n in (*sizes, size or 0) if max(1, len(kept)) <= n < len(head)}), len(head)]
    rows = {n: head.choose(counts, n, list(kept)) for n in judged}
    pruned = None
    if size is not None:
        note = f"of {len(head)}: the most frequent in {len(samples)} samples of {data.name}"
        pruned = _noted(with_rows(source, head, rows[size]), size, note)
    return Pruning(
        source=source,
        name=draft,
        owner=owner,
        num_samples=len(samples),
        k=k,
        head=head,
        kept=kept,
        absent=absent,
        ceilings=tuple(ceiling(samples, counts, head.ids[rows[n]], k) for n in judged),
        size=size,
        pruned=pruned,
    )


def _open(source: str, target: str | None) -> Draft:
    found = inspect_checkpoint(source, target=target)
    return found if isinstance(found, Draft) else unify(found.checkpoint, found.plan, found.target)


def _owner(name: str, draft: Draft, target: str | None) -> Vocabulary:
    """The model whose tokens the draft proposes. Raises `TargetError` where none is known, or it is another."""
    own = any(path.name.startswith(TOKENIZERS) for path in draft.files)
    made_for = draft.provenance.target
    target = target or (None if own else reachable(made_for))
    if target is None and not own:
        known = "is not known" if made_for is None else f"{made_for} has, which is not found here"
        raise TargetError(f"whose tokens the draft proposes {known}", where=draft.path, hint="pass --target")
    owner = open_vocabulary(Located(draft.path, name) if target is None else locate(target, weights=False))
    size = draft.spec.architecture.vocab_size
    if own and target is not None:
        fits = same_vocabulary(owner.tokenizer, load_tokenizer(draft.path, "draft"), size)
    else:
        fits = owner.size == size
    if not fits:
        raise TargetError(
            f"the draft proposes other tokens than those of {owner.name}",
            where=draft.path,
            hint="pass its own target; a model with its own tokenizer is pruned without one",
        )
    return replace(owner, size=size)  # of the same tokens, one may have more rows without a token


def _read_samples(data: Path, owner: Vocabulary) -> SampleTable:
    """The samples. Raises `FormatError` where their ids are those of another tokenizer."""
    if read_origin(data).tokenizer_sha256 != _target_of(owner).sha256:
        raise FormatError(
            f"the samples were made with another tokenizer than that of {owner.name}",
            where=data,
            hint=command("draftkit", "data", "prepare", "SOURCE", "OUT", "--target", owner.name),
        )
    return read_training_samples(data)


def _target_of(owner: Vocabulary) -> TargetTokenizer:
    return served_with(OpenedTarget(owner.name, Located(owner.folder, owner.name)), owner.tokenizer)


def _end_tokens(owner: Vocabulary) -> dict[int, str]:
    """What ends an answer, as generation config, tokenizer and chat template say."""
    ends = dict.fromkeys(sorted(_target_of(owner).end_ids), "eos")
    turn = owner.roles.get("turn end")
    return ends if turn is None else {turn: "end of turn"} | ends


def _token(text: str, owner: Vocabulary) -> int:
    """The token of an id, or of a text that is one token. Raises `DraftkitError`."""
    pieces = owner.tokenizer.encode(text, add_special_tokens=False)
    token = int(text) if text.isdecimal() else owner.tokenizer.get_vocab().get(text)
    if token is None and len(pieces) == 1:
        token = pieces[0]
    if token is None or token >= owner.size:
        found = f"{len(pieces)} tokens" if token is None else f"none of the {owner.size} tokens of {owner.name}"
        raise DraftkitError(f"--keep {text!r} is {found}", expected="the id of a token, or a text that is one token")
    return token


def _check_kept(size: int | None, kept: Mapping[int, str], absent: Mapping[int, str], whole: int) -> None:
    """Raise `DraftkitError` for tokens to keep that are not there or are too many, and where nothing is cut."""
    if missing := [token for token, why in absent.items() if why == ASKED]:
        raise DraftkitError(
            f"the draft does not propose the token {missing[0]}", hint="prune the draft that this one was made from"
        )
    if size is not None and not max(1, len(kept)) <= size < whole:
        raise DraftkitError(
            f"a draft vocabulary of {size:,} tokens",
            expected=f"at least the {max(1, len(kept))} that are kept, and fewer than the {whole:,} that the draft has",
        )


def _noted(draft: Draft, size: int, note: str) -> Draft:
    """The draft with its new vocabulary among the facts of its provenance."""
    fact = FactOrigin(name="draft vocabulary", value=str(size), origin="overridden", note=note)
    facts = (*draft.provenance.facts, fact)
    return replace(draft, provenance=replace(draft.provenance, facts=facts))
