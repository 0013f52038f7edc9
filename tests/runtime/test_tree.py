"""Trees: the rule against enumeration, and every drafter with every kind of tree against plain decoding."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from fixtures.engines.drafter_cases import Case, requests, sampled, target

from draftkit.errors import SettingError
from draftkit.requests import Request
from draftkit.runtime.drafters.protocol import Drafter
from draftkit.runtime.engine import Engine
from draftkit.runtime.growth import Growth
from draftkit.runtime.records import Generation, Round
from draftkit.runtime.tree import Tree, walk
from draftkit.runtime.tree_kinds import Choices, read_tree
from draftkit.targets.target import Target

# --- The rule, against every outcome that there is (facts: worked examples)

P = (Fraction(5, 10), Fraction(3, 10), Fraction(15, 100), Fraction(5, 100))
Q = (0.2, 0.1, 0.4, 0.3)
P0, Q0 = (Fraction(6, 10), Fraction(3, 10), Fraction(1, 10)), (0.3, 0.5, 0.2)
P1 = tuple(tuple(Fraction(n, 10) for n in row) for row in ((7, 2, 1), (1, 8, 1), (3, 3, 4)))
Q1 = ((0.4, 0.4, 0.2), (0.2, 0.3, 0.5), (0.5, 0.3, 0.2))


def grown(children: Sequence[int], first: Sequence[float], after: Sequence[Sequence[float]] = ()) -> Tree:
    """The tree of a draft of bigrams with so many likeliest children at each level."""
    paths = list(itertools.chain(*(itertools.product(*map(range, children[:d])) for d in range(1, len(children) + 1))))
    growth = Growth.of(Choices(tuple(paths)))
    frontier = growth(torch.tensor([[first]]).log())
    for _ in children[1:]:
        frontier = growth(torch.tensor(after)[frontier.tokens].log())
    return growth.tree()


def accepted(tree: Tree, rows: Sequence[Sequence[Fraction]], levels: int) -> Fraction:
    """The expected number of nodes that stand, where the token after each row has these probabilities: summed over
    every token that could be drawn there."""
    total = Fraction(0)
    for chosen in itertools.product(*(range(len(row)) for row in rows)):
        chance = Fraction(1)
        for row, token in zip(rows, chosen, strict=True):
            chance *= row[token]
        path = walk(tree, torch.tensor([chosen]), torch.tensor([True]), levels)
        total += chance * (int((path >= 0).sum()) - 1)
    return total


@pytest.mark.parametrize(("k", "stands"), [(1, Fraction(3, 20)), (2, Fraction(1, 5)), (3, Fraction(7, 10))])
def test_the_likeliest_tokens_stand_with_their_probability(k: int, stands: Fraction) -> None:
    tree = grown([k], Q)
    assert accepted(tree, [P] + [(Fraction(1),)] * k, 1) == stands


@pytest.mark.parametrize(
    ("children", "length"), [((1, 1), Fraction(33, 100)), ((2, 1), Fraction(135, 100)), ((2, 2), Fraction(171, 100))]
)
def test_a_tree_of_two_levels_stands_with_the_probabilities_of_its_paths(
    children: tuple[int, int], length: Fraction
) -> None:
    tree = grown(children, Q0, Q1)
    inner = children[0]
    rows = [P0, *(P1[int(token)] for token in tree.tokens[0, :inner])]
    assert accepted(tree, rows + [(Fraction(1),)] * (tree.tokens.shape[1] - inner), 2) == length


# --- Shapes as `--tree` takes them


@pytest.mark.parametrize(
    ("text", "name", "note"),
    [
        ("eagle", "eagle:topk=10,depth=8,nodes=59", "EAGLE's top_k=10, depth=7, total_token=60"),
        ("eagle:nodes=60,depth=6", "eagle:topk=10,depth=6,nodes=60", "EAGLE's top_k=10, depth=5, total_token=61"),
        ("best:nodes=32", "best:nodes=32,depth=7", ""),
        ("best:nodes=4", "best:nodes=4,depth=4", ""),
        ("suffix:nodes=16,width=4", "suffix:nodes=16,width=4,depth=8", ""),
        (
            "sglang:steps=5,topk=4,tokens=8",
            "sglang:steps=5,topk=4,tokens=8",
            "SGLang's --speculative-num-steps 5 --speculative-eagle-topk 4 --speculative-num-draft-tokens 8",
        ),
    ],
)
def test_a_name_says_all_numbers(text: str, name: str, note: str) -> None:
    tree = read_tree(text)
    assert (tree.name, tree.note) == (name, note)
    assert read_tree(tree.name) == tree


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("oak:nodes=3", "tree is oak:nodes=3"),
        ("eagle:leaves=3", "tree is eagle:leaves=3"),
        ("eagle:topk=0", "tree is eagle:topk=0"),
        ("eagle:topk=²", "tree is eagle:topk=²"),
        ("best:nodes=64", "64 nodes"),
        ("eagle:depth=17", "17 levels"),
        ("eagle:topk=64", "64 children a node"),
        ("eagle:topk=2,depth=2,nodes=7", "drafting it finds 6"),
        ("sglang:tokens=1", "0 nodes"),
        ("choices:no-such-file", "cannot be read"),
    ],
)
def test_what_cannot_be_drafted_is_refused(text: str, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        read_tree(text)


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        ("[[0], [1, 0]]", "no parent"), ("[[]]", "no parent"), ("[]", "no list of choices"), ("[[-1]]", "no list"),
        ("[0, 1]", "no list"), ("[[0], [0.5]]", "no list"), ("{", "no list"), ("[" * 9999, "no list"), ("", "no list"),
    ],
)  # fmt: skip
def test_a_file_without_a_tree_is_one_message(listed: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "list").write_text(listed)
    with pytest.raises(SettingError, match=words):
        read_tree(f"choices:{tmp_path / 'list'}")


# --- Every drafter, every kind

KINDS = ("eagle:topk=3,depth=3,nodes=9", "best:nodes=7,depth=3", "sglang:steps=3,topk=2,tokens=6", "choices")
LISTED = Choices(((0,), (1,), (3,), (0, 0), (1, 0), (1, 2), (1, 2, 1)))


def tree_of(kind: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    if kind != "choices":
        return kind
    path = tmp_path_factory.mktemp("choices") / "list"
    path.write_text(str([list(node) for node in LISTED.paths]))
    return f"choices:{path}"


def decoded(drafter: Drafter | None, wanted: Sequence[Request], tree: str | None = None) -> list[Generation]:
    """With a tree, a chain of three, or no draft."""
    shape = None if tree is None else read_tree(tree)
    k = 0 if drafter is None else 3 if shape is None else shape.depth
    reads = None if drafter is None else drafter.aux_layers
    engine = Engine(
        Target(target(), reads), drafter, num_speculative_tokens=k, num_slots=3, tree=shape, verification="coupled"
    )
    return engine.generate(wanted)


@pytest.mark.slow
@pytest.mark.few(3)
def test_every_drafter_leaves_the_output_as_it_is(case: Case, tmp_path_factory: pytest.TempPathFactory) -> None:
    for wanted, kinds in ((requests()[:3], KINDS[::2]), (sampled()[1:], KINDS[1::2])):
        plain = [g.tokens for g in decoded(None, wanted)]
        for kind in kinds:
            found = decoded(case.drafter, wanted, tree_of(kind, tmp_path_factory))
            assert [g.tokens for g in found] == plain, kind


@pytest.mark.slow
@pytest.mark.few(4)
def test_a_chain_is_the_tree_with_one_child_everywhere(case: Case) -> None:
    chain = decoded(case.drafter, requests())
    tree = decoded(case.drafter, requests(), "eagle:topk=1,depth=3,nodes=3")
    for one, other in zip(chain, tree, strict=True):
        assert [told(r) for r in one.rounds] == [told(r) for r in other.rounds]
        assert all(r.parents == (0, 1, 2) for r in other.rounds)


def told(round: Round) -> tuple[object, ...]:
    return round.position, round.drafted, round.accepted, round.emitted, round.proposal
