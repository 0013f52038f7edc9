"""Which models could draft for a target, judged by their configs and tokenizers; no weights are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from draftkit.errors import DraftkitError, FormatError, SourceError
from draftkit.hub.locate import Located, locate
from draftkit.io.records import to_dict
from draftkit.prepare.matching import check_kind
from draftkit.prepare.vocabulary import Vocabulary, open_vocabulary
from draftkit.targets.cost import Cost, read_cost
from draftkit.targets.tokens import Name, same_vocabulary

Likeness = Literal["same", "same, other padding", "other"]


@dataclass(frozen=True)
class Candidate:
    """A model that is smaller than the target.

    `tokenizer`: whether both give the same ids to the same text, compared token by token. `overlap`: the share of the
    target's tokens that the candidate has too. `cost`: what it reads for one token over what the target reads, which is
    the ratio of their times at small batches in the same dtype.
    """

    name: str
    path: Path
    vocab_size: int
    parameters: int
    tokenizer: Likeness
    overlap: float
    cost: float
    speed_up: SpeedUp

    def to_dict(self) -> dict[str, object]:
        return {
            "name": self.name,
            "path": str(self.path),
            "vocab_size": self.vocab_size,
            "parameters": self.parameters,
            "tokenizer": self.tokenizer,
            "overlap": self.overlap,
            "cost": self.cost,
            "num_speculative_tokens": self.speed_up.k,
            "acceptance_length": self.speed_up.acceptance_length,
            "speedup": self.speed_up.factor,
        }


@dataclass(frozen=True)
class LeftOut:
    """A model that cannot draft for the target, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Survey:
    """What was found for a target: candidates by their speed-up, those with its tokenizer first."""

    target: str
    parameters: int
    acceptance: float
    candidates: tuple[Candidate, ...]
    left_out: tuple[LeftOut, ...]

    def to_dict(self) -> dict[str, object]:
        return {
            "schema": 1,
            "target": self.target,
            "parameters": self.parameters,
            "acceptance": self.acceptance,
            "candidates": [candidate.to_dict() for candidate in self.candidates],
            "left_out": [to_dict(model) for model in self.left_out],
        }


def find_candidates(
    target: str,
    sources: Sequence[str] = (),
    folders: Sequence[Path] = (),
    *,
    acceptance: float,
) -> Survey:
    """Judge the models in `sources` (folders, Hub ids, zoo models) and those anywhere below `folders`.

    From the Hub, only configs and tokenizers are downloaded. `acceptance`: the chance that a draft token is accepted,
    for which speed-ups are stated. Raises `DraftkitError` for a target that cannot be read; other models that cannot be
    are left out with the reason.
    """
    if not 0 <= acceptance < 1:
        raise DraftkitError(f"an acceptance of {acceptance}", expected="from 0 to less than 1")
    wanted = open_vocabulary(locate(target, weights=False))
    check_kind(wanted.tokenizer, wanted.name)
    whole = read_cost(wanted.folder)
    candidates, left_out = [], []
    for name, source in [*((source, source) for source in sources), *_models_below(folders, wanted.folder)]:
        try:
            located = replace(locate(source, weights=False), name=name)
            candidates.append(_judge(located, wanted, whole, acceptance))
        except DraftkitError as error:
            left_out.append(LeftOut(name, str(error).partition("\n")[0]))
    candidates.sort(key=lambda c: (c.tokenizer == "other", -c.speed_up.factor, c.name))
    return Survey(wanted.name, whole.parameters, acceptance, tuple(candidates), tuple(left_out))


def _models_below(folders: Sequence[Path], target: Path) -> Iterator[tuple[str, str]]:
    """Name and path of every model but the target itself. Raises `SourceError` for a folder that is none."""
    for folder in folders:
        if not folder.is_dir():
            raise SourceError(f"there is no folder {folder}", where=folder, expected="a folder with models below it")
        for config in sorted(folder.rglob("config.json")):
            if config.parent.resolve() != target.resolve():
                yield _name_of(config.parent, folder), str(config.parent.absolute())


def _name_of(model: Path, folder: Path) -> str:
    """The id of a repository in the Hub's cache, else the path below the folder."""
    if model.parent.name == "snapshots" and (repo := model.parent.parent.name).startswith("models--"):
        return f"{repo.removeprefix('models--').replace('--', '/')}@{model.name[:7]}"
    return str(model.relative_to(folder)) if model != folder else folder.name


def _judge(model: Located, target: Vocabulary, whole: Cost, acceptance: float) -> Candidate:
    """The candidate in a folder. Raises `DraftkitError` for a model that cannot draft for the target."""
    vocabulary = open_vocabulary(model)
    check_kind(vocabulary.tokenizer, model.name)
    cost = read_cost(model.path)
    if cost.per_token >= whole.per_token:
        raise FormatError("a token costs as much as one of the target")
    ratio = cost.per_token / whole.per_token
    return Candidate(
        name=model.name,
        path=model.path,
        vocab_size=vocabulary.size,
        parameters=cost.parameters,
        tokenizer=_likeness(vocabulary, target),
        overlap=overlap(vocabulary.named.values(), target.named.values()),
        cost=ratio,
        speed_up=best_speed_up(acceptance, ratio),
    )


def _likeness(own: Vocabulary, target: Vocabulary) -> Likeness:
    if not same_vocabulary(target.tokenizer, own.tokenizer, max(own.size, target.size)):
        return "other"
    return "same" if own.size == target.size else "same, other padding"


def overlap(own: Iterable[Name], target: Iterable[Name]) -> float:
    """The share of the target's tokens, without special ones, that stand for the same bytes as one of the others."""
    wanted = {name for name in target if isinstance(name, bytes)}
    return len(wanted.intersection(own)) / max(len(wanted), 1)


MAX_K = 16


class SpeedUp(NamedTuple):
    """`factor`: tokens per second over those without a draft, at `k` draft tokens a round."""

    k: int
    acceptance_length: float
    factor: float


def best_speed_up(acceptance: float, cost: float) -> SpeedUp:
    """The K of 1 to 16 with the largest S = AL / (1 + cK), where AL = (1 − α^(K+1)) / (1 − α).

    α `acceptance`: the chance that a draft token is accepted after accepted ones. c `cost`: one draft step over one
    target step. The target verifies K + 1 tokens in the time of one, which holds while its weights are what takes time
    (small batches), and the host costs nothing: a bound, not a forecast.
    """
    options = (_speed_up(k, acceptance, cost) for k in range(1, MAX_K + 1))
    return max(options, key=lambda option: option.factor)


def _speed_up(k: int, acceptance: float, cost: float) -> SpeedUp:
    length = sum(acceptance**place for place in range(k + 1))
    return SpeedUp(k, length, length / (1 + cost * k))
