"""Which settings of two results are the same, and what of them must be: what cannot be compared is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from draftkit.errors import DraftkitError
from draftkit.results.cell import OWN_ENGINE, Cell
from draftkit.results.gate import DEAD, TOLERANCE, Gate, drafted_rounds_of, gated, sums_of
from draftkit.results.record import Result
from draftkit.results.statistics import length_over_prompts

# What tells settings apart beside the draft. A server does not say how it draws drafts.
SETTING: dict[str, Callable[[Cell], object]] = {
    "K": lambda cell: cell.num_speculative_tokens,
    "T": lambda cell: cell.temperature,
    "draft sampling": lambda cell: cell.draft_sampling,
    "context": lambda cell: cell.context,
    "tree": lambda cell: cell.tree_name,
    "draft_confidence": lambda cell: cell.min_confidence or 0.0,
}
SAID_BY_NONE = ("context", "tree")  # of what None says: no padding, and a chain
# What must be the same on both sides, where both say it.
SAME: dict[str, Callable[[Cell], object]] = {
    "prompts": lambda cell: cell.prompts_sha256,
    "chat template": lambda cell: cell.template_sha256,
    "target weights": lambda cell: cell.target_sha256,
    "max_new_tokens": lambda cell: cell.max_new_tokens,
    "verification": lambda cell: cell.verification,
    "way of counting": lambda cell: "told from chunks" if cell.estimated else "counted",
}
CUTS: dict[str, Callable[[Cell], object]] = {  # of what is drawn
    "top_k": lambda cell: cell.top_k,
    "top_p": lambda cell: cell.top_p,
    "min_p": lambda cell: cell.min_p,
}
ASKED = ("thinking", "template", "turns", "ignore_eos", "k_by_batch", "disable_above_batch")
MACHINE = ("hardware", "device", "dtype", "torch", "server")


def gate_results(new: Result, old: Result, tolerance: float = TOLERANCE) -> Gate:
    """Whether drafts accept less in a new result than in an old one of the same prompts, by more than a share.

    Raises `DraftkitError` that names what makes the two no comparison.
    """
    pairs, notes = matched(new, old)
    return gated(pairs, tolerance, old.path, notes, [repeats(new, old, pair) for pair in pairs])


def matched(new: Result, old: Result) -> tuple[list[tuple[Cell, Cell]], list[str]]:
    """The pairs of cells, new and old, of the settings that both results have, and notes on what is not compared.

    Settings are those of draft, K or tree, T, draft sampling, context and draft_confidence; where a result has several
    such cells, of engine and concurrency too. Drafts go by their names, unless each result has but one. Raises
    `DraftkitError` that names what differs where no setting is in both, for a pair of other prompts, template, sampling
    or target, and for an old draft that does nothing.
    """
    single = all(len({cell.draft for cell in result.cells}) == 1 for result in (new, old))
    pairs, left = [], []
    for cell in old.cells:
        found = _of_setting(cell, new.cells, old.cells, single)
        pairs += [] if found is None else [(found, cell)]
        left += [] if found is not None else [cell.name]
    if not pairs:
        raise _nothing_in_common(new, old, single)
    for one, other in pairs:
        _require_same(one, other, new, old)
        _require_counts(one, new.path)
        _require_counts(other, old.path)
        require_alive(other, old.path)
    return pairs, [*([f"not in {new.path}, and not compared: {'; '.join(left)}"] if left else []), *_doubts(pairs)]


def repeats(new: Result, old: Result, pair: tuple[Cell, Cell]) -> bool:
    """Whether an unchanged draft would have given the same tokens: T = 0 on one machine and in one engine. On another,
    near-ties fall otherwise, so that its text is a draw of its own."""
    one, other = pair
    same = all(new.provenance.get(name) == old.provenance.get(name) for name in MACHINE)
    return same and one.temperature == 0 and one.engine == other.engine == OWN_ENGINE


def _require_counts(cell: Cell, where: str) -> None:
    """Raise `DraftkitError` unless a cell has the counts of each prompt, of rounds with a draft."""
    if not cell.by_prompt:
        raise DraftkitError(
            f"{cell.name}: there are no counts by prompt",
            where=where,
            expected="a result in which each request was counted by itself",
            hint="of a server that tells totals only: draftkit eval --set one_by_one=true",
        )
    told = sum(map(drafted_rounds_of, cell.by_prompt))
    if cell.num_drafts is not None and told != cell.num_drafts:
        raise DraftkitError(
            f"{cell.name}: {told} rounds are counted by prompt, and {cell.num_drafts} had a draft",
            where=where,
            hint="measure it with this version, which keeps the rounds that had one",
        )


def require_alive(cell: Cell, where: str) -> None:
    """Raise `DraftkitError` for a draft that does nothing: whatever is held against it passes."""
    length = length_over_prompts(sums_of(cell))
    holds_one = length.bounds is not None and length.bounds[0] <= 1
    if holds_one or not length.mean >= DEAD:
        bounds = "" if length.bounds is None else f" [{length.bounds[0]:.3f}, {length.bounds[1]:.3f}]"
        raise DraftkitError(
            f"{cell.name}: an acceptance length of {length.mean:.4f}{bounds} is that of a draft that does nothing",
            where=where,
            expected=f"a reference that accepts something: at least {DEAD}, and an interval above 1",
            hint="draftkit doctor says why a draft is not accepted",
        )


def _of_setting(cell: Cell, new: Sequence[Cell], old: Sequence[Cell], single: bool) -> Cell | None:
    """The new cell of an old one's setting; None where there is none."""
    alike = [one for one in new if not _unlike(one, cell, single)]
    exact = [one for one in alike if (one.engine, one.concurrency) == (cell.engine, cell.concurrency)]
    if exact:
        return exact[0]
    several = sum(not _unlike(other, cell, single) for other in old) > 1
    return alike[0] if len(alike) == 1 and not several else None


def _unlike(one: Cell, other: Cell, single: bool) -> list[str]:
    """What tells two settings apart, in words."""
    found = [] if single or one.draft == other.draft else [f"draft {one.draft} against {other.draft}"]
    return found + _differing(SETTING, one, other)


def _differing(what: dict[str, Callable[[Cell], object]], one: Cell, other: Cell) -> list[str]:
    values = {name: (value(one), value(other)) for name, value in what.items()}
    unknown = {name for name in values if name not in SAID_BY_NONE and None in values[name]}
    return [
        f"{name} {_shown(a)} against {_shown(b)}" for name, (a, b) in values.items() if a != b and name not in unknown
    ]


def _shown(value: object) -> str:
    return value[:12] if isinstance(value, str) and len(value) == 64 else str(value)


def _nothing_in_common(new: Result, old: Result, single: bool) -> DraftkitError:
    """Names what differs between the two cells that are most alike."""
    differing = min((_unlike(one, other, single) for one in new.cells for other in old.cells), key=len)
    what = ", ".join(differing) or "several engines or batch sizes, of which none is in both"
    return DraftkitError(
        f"{new.path} has no setting of {old.path}: {what}", hint="measure it with the settings of the reference"
    )


def _require_same(one: Cell, other: Cell, new: Result, old: Result) -> None:
    differing = _differing(SAME | (CUTS if one.temperature else {}), one, other)
    asked = [{**_part(result, "settings"), **_part(result, "dataset")} for result in (new, old)]
    differing += [
        f"{name} {a[name]} against {b[name]}"
        for a, b in [asked]
        for name in ASKED
        if name in a and name in b and a[name] != b[name]
    ]
    weighed = one.target_sha256 is not None and other.target_sha256 is not None
    if not weighed and one.engine == other.engine and one.target != other.target:
        differing.append(f"target {one.target} against {other.target}")
    ids = [{record.id for record in cell.by_prompt or ()} for cell in (one, other)]
    if one.prompts_sha256 == other.prompts_sha256 and all(ids) and ids[0] != ids[1]:
        differing.append(f"prompts: {len(ids[0] ^ ids[1])} are in one result only")
    if differing:
        raise DraftkitError(
            f"{one.name}: {new.path} was not measured as {old.path}: {', '.join(differing)}",
            hint="measure both in the same way: draftkit gate --against OLD.json --target T --draft D does",
        )


def _part(result: Result, name: str) -> dict[str, object]:
    part = result.provenance.get(name)
    return part if isinstance(part, dict) else {}


def _doubts(pairs: Sequence[tuple[Cell, Cell]]) -> list[str]:
    """What could not be held against each other, as one of the results does not say it."""
    unsaid = [
        name
        for name in ("prompts", "chat template", "target weights")
        if any(None in (SAME[name](one), SAME[name](other)) for one, other in pairs)
    ]
    doubts = [f"not said by both results, and not compared: {', '.join(unsaid)}"] if unsaid else []
    if any(one.estimated for one, _ in pairs):
        doubts.append("what was accepted is told from the sizes of chunks, on both sides")
    return doubts
