"""Trees: the rule against enumeration, and every drafter with every kind of tree against plain decoding."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from fixtures.engines.drafter_cases import Case, V, requests, sampled, target
from fixtures.engines.sampling_statistics import Bigrams, batch, fit, text_fit
from torch import Tensor

from draftkit.errors import SettingError
from draftkit.layout.families.suffix import SuffixSpec
from draftkit.requests import Request, SamplingParameters
from draftkit.runtime.drafters.lookup import LookupDrafter
from draftkit.runtime.drafters.ngram import NgramDrafter
from draftkit.runtime.drafters.protocol import Committed, Drafter, NewSequence
from draftkit.runtime.drafters.suffix import SuffixDrafter
from draftkit.runtime.engine import Engine
from draftkit.runtime.growth import Growth
from draftkit.runtime.records import Generation, Round
from draftkit.runtime.tree import Tree, verify_tree, walk
from draftkit.runtime.tree_kinds import Beam, read_tree
from draftkit.targets.target import Target

# --- The rule, against every outcome that there is (facts: worked examples)

P = (Fraction(5, 10), Fraction(3, 10), Fraction(15, 100), Fraction(5, 100))
Q = (0.2, 0.1, 0.4, 0.3)
P0, Q0 = (Fraction(6, 10), Fraction(3, 10), Fraction(1, 10)), (0.3, 0.5, 0.2)
P1 = tuple(tuple(Fraction(n, 10) for n in row) for row in ((7, 2, 1), (1, 8, 1), (3, 3, 4)))
Q1 = ((0.4, 0.4, 0.2), (0.2, 0.3, 0.5), (0.5, 0.3, 0.2))


def grown(children: Sequence[int], first: Sequence[float], after: Sequence[Sequence[float]] = ()) -> Tree:
    """The tree of a draft of bigrams with so many likeliest children at each level."""
    tokens, parents, level = list[int](), list[int](), [(0, first)]
    for count in children:
        below = []
        for row, chances in level:
            for token in sorted(range(len(chances)), key=lambda token: -chances[token])[:count]:
                tokens.append(token)
                parents.append(row)
                below.append((len(tokens), after[token] if after else ()))
        level = below
    return Tree(torch.tensor([tokens]), torch.tensor([parents]))


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


# --- The distribution of whole texts, over several rounds

TEXTS, LENGTH, LIMIT, NOTICED = 20_000, 3, 1e-5, 1e-12
SHAPES = {
    "dynamic": Beam(2, 2, 3, 6),
    "best first": Beam(5, 5, 2, 5),
}


def drawn_texts(model: Bigrams, shape: Beam, request: SamplingParameters) -> tuple[Tensor, float, float]:
    """The first tokens of texts; and, a round, how many nodes stood and how many were expected to."""
    rules = batch(request, TEXTS)
    text = torch.zeros(TEXTS, LENGTH + shape.depth + 2, dtype=torch.int64)
    filled, unfinished, sums = torch.ones(TEXTS, dtype=torch.int64), torch.arange(TEXTS), torch.zeros(3)
    while len(unfinished):
        start = filled[unfinished]
        root = text[unfinished, start - 1]
        growth = Growth(shape)
        tokens = root[:, None]
        for _ in range(shape.depth):
            tokens = growth(model.draft[tokens]).tokens
        tree = growth.tree()
        logits = model.target[torch.cat((root[:, None], tree.tokens), dim=1)]
        ancestors, active = tree.ancestors(shape.depth), torch.ones_like(root, dtype=torch.bool)
        emitted, path = verify_tree(
            tree, ancestors, logits, rules.take(unfinished), start, active, shape.depth, all_greedy=False
        )
        text[unfinished[:, None], start[:, None] + torch.arange(shape.depth + 1)] = emitted.tokens
        filled[unfinished] = start + emitted.counts
        expected = (emitted.expected * (path[:, :-1] >= 0)).sum()
        sums += torch.stack([torch.tensor(float(len(start))), emitted.accepted.sum(), expected])
        unfinished = unfinished[filled[unfinished] <= LENGTH]
    rounds, stood, wanted = sums.tolist()
    return text[:, 1 : LENGTH + 1], stood / rounds, wanted / rounds


@pytest.mark.slow
@pytest.mark.parametrize("request_", [SamplingParameters(1.0), SamplingParameters(1.3, top_k=4, top_p=0.9)])
@pytest.mark.parametrize("name", SHAPES)
def test_trees_leave_the_targets_distribution(name: str, request_: SamplingParameters) -> None:
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(5, 5, generator=generator) * 1.5
    model = Bigrams(logits, logits + torch.randn(5, 5, generator=generator))
    tokens, stood, expected = drawn_texts(model, SHAPES[name], request_)
    assert text_fit(tokens, model.distribution(request_, LENGTH), 5) > LIMIT
    assert stood == pytest.approx(expected, abs=0.02)
    assert stood > 0.5


def ratio_on_chosen(uniforms: Tensor) -> Tensor:
    """The draft's two likeliest tokens, tried as if they had been drawn from it."""
    return tried(torch.tensor([2, 3]).expand(len(uniforms), -1), uniforms, renormalized=False)


def not_renormalized(uniforms: Tensor) -> Tensor:
    """Drawn without replacement, and tried as if each had been drawn from all."""
    q = torch.tensor(Q).expand(len(uniforms), -1)
    return tried(q.multinomial(2, generator=torch.Generator().manual_seed(1)), uniforms, renormalized=False)


def renormalized(uniforms: Tensor) -> Tensor:
    """Sequoia's rule, which is right."""
    q = torch.tensor(Q).expand(len(uniforms), -1)
    return tried(q.multinomial(2, generator=torch.Generator().manual_seed(1)), uniforms, renormalized=True)


def tried(children: Tensor, uniforms: Tensor, *, renormalized: bool) -> Tensor:
    """Children one after another, by the ratio test; the token that comes out."""
    p = torch.tensor([float(x) for x in P]).expand(len(uniforms), -1)
    q = torch.tensor(Q).expand(len(uniforms), -1)
    out = torch.full_like(children[:, 0], -1)
    for step, child in enumerate(children.unbind(1)):
        stands = uniforms[:, step] * q.gather(1, child[:, None])[:, 0] < p.gather(1, child[:, None])[:, 0]
        out = torch.where((out < 0) & stands, child, out)
        p = (p - q).clamp(min=0)
        p = p / p.sum(1, keepdim=True)
        if renormalized:
            q = q.scatter(1, child[:, None], 0.0)
            q = q / q.sum(1, keepdim=True)
    last = p.multinomial(1, generator=torch.Generator().manual_seed(2))[:, 0]
    return torch.where(out < 0, last, out)


def twice_the_same(uniforms: Tensor) -> Tensor:
    """One coin against the sum over children, of which two are the same token."""
    p = torch.tensor([float(x) for x in P])
    rest = p.clone()
    rest[2] = 0
    other = rest.expand(len(uniforms), -1).multinomial(1, generator=torch.Generator().manual_seed(2))[:, 0]
    return torch.where(uniforms[:, 0] < 2 * p[2], 2, other)


def test_wrong_rules_would_be_noticed() -> None:
    """And a right one of the same kind is not. The second is so close to right that it takes a million draws."""
    uniforms = torch.rand(1_000_000, 2, generator=torch.Generator().manual_seed(0))
    exact = torch.tensor([float(x) for x in P])
    for rule in (ratio_on_chosen, not_renormalized, twice_the_same):
        assert fit(torch.bincount(rule(uniforms), minlength=4), exact) < NOTICED, rule
    assert fit(torch.bincount(renormalized(uniforms), minlength=4), exact) > LIMIT


# --- Shapes as `--tree` takes them


@pytest.mark.parametrize(
    ("text", "name", "note"),
    [
        ("eagle", "eagle:topk=10,depth=8,nodes=59", "EAGLE's top_k=10, depth=7, total_token=60"),
        ("eagle:nodes=60,depth=6", "eagle:topk=10,depth=6,nodes=60", "EAGLE's top_k=10, depth=5, total_token=61"),
        ("best:nodes=32", "best:nodes=32,depth=7", ""),
        ("best:nodes=4", "best:nodes=4,depth=4", ""),
        ("suffix:nodes=16,width=4", "suffix:nodes=16,width=4,depth=8", ""),
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
    ],
)
def test_what_cannot_be_drafted_is_refused(text: str, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        read_tree(text)


# --- Which of equally likely nodes are kept


def test_a_child_that_is_certain_does_not_displace_its_parent() -> None:
    """Its path is as likely as its parent's: the shallower node comes first."""
    growth = Growth(Beam(2, 2, 3, 4))
    certain = torch.tensor([-torch.inf, 0.0, -torch.inf])
    growth(torch.tensor([[[0.5, 0.5, 0.0]]]).log())
    growth(torch.stack([certain, certain])[None])
    growth(torch.stack([certain, certain])[None])
    assert growth.tree().tokens.tolist() == [[0, 1, 1, 1]]
    assert growth.tree().parents.tolist() == [[0, 0, 1, 2]]


def test_of_equal_tokens_the_lowest_are_kept() -> None:
    growth = Growth(Beam(2, 2, 2, 3))
    growth(torch.zeros(1, 1, 5))
    growth(torch.zeros(1, 2, 5))
    assert growth.tree().tokens.tolist() == [[0, 1, 0]]
    assert growth.tree().parents.tolist() == [[0, 0, 1]], "and of equal parents the better one's child"


# --- Trees of what followed in the text

SUFFIX = SuffixSpec(max_depth=24, max_spec_factor=1.0, min_token_prob=0.1)
Paths = dict[tuple[int, ...], float]
TEXTS_OF_THREE = [
    [int(token) for token in torch.randint(3, (length,), generator=torch.Generator().manual_seed(length))]
    for length in (6, 9, 14, 20)
]


def followers(text: list[int], found: list[int], depth: int) -> Paths:
    """What went on after positions `found` of a text: path → product of the shares that went on like that."""
    paths: Paths = {}
    for token in {text[at + 1] for at in found if at + 1 < len(text)} if depth else ():
        going = [at + 1 for at in found if at + 1 < len(text) and text[at + 1] == token]
        share = len(going) / (len(found) + 1)
        paths[(token,)] = share
        paths |= {(token, *path): share * rest for path, rest in followers(text, going, depth - 1).items()}
    return paths


def longest_match(text: list[int], shortest: int, longest: int) -> list[int]:
    """Where the longest end of a text, within these lengths, occurred before: the places of its last token."""
    for length in range(min(longest, len(text) - 1), shortest - 1, -1):
        end = text[-length:]
        if found := [at for at in range(length - 1, len(text) - 1) if text[at - length + 1 : at + 1] == end]:
            return found
    return []


def paths_in(tree: Tree) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens[0].tolist(), tree.parents[0].tolist(), strict=True):
        paths.append((*paths[parent], token) if parent >= 0 else ())
    return [path for path in paths if path]


@pytest.mark.parametrize("text", TEXTS_OF_THREE, ids=len)
@pytest.mark.parametrize(
    ("drafter", "shortest", "longest"),
    [(NgramDrafter(3, min_n=2, max_n=4), 2, 4), (SuffixDrafter(3, SUFFIX), 1, 23)],
    ids=["ngram", "suffix"],
)
def test_trees_of_a_text_are_its_likeliest_followers(
    text: list[int], drafter: LookupDrafter, shortest: int, longest: int
) -> None:
    """All of them where there is room, else those with the largest shares."""
    drafter.allocate(1, len(text) + 4, 3)
    drafter.prefill([NewSequence(0, torch.tensor(text[:-1]), None)])
    one = torch.tensor([1])
    committed = Committed(one - 1, torch.tensor([text[-1:]]), one, one * (len(text) - 1), None, len(text) + 4)
    wanted = followers(text, longest_match(text, shortest, longest), 3)
    for nodes in (4, 39):  # of three levels with three tokens there are no more
        growth = Growth(Beam(39, 39, 3, nodes))
        drafter.expand(committed, 3, growth)
        found = paths_in(growth.tree())
        assert len(set(found)) == len(found) == min(nodes, len(wanted))
        assert set(found) <= set(wanted)
        least = min((wanted[path] for path in found), default=0.0)
        assert all(share <= least + 1e-6 for path, share in wanted.items() if path not in found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ngram", "suffix"])
def test_lookup_with_trees_leaves_the_output_as_it_is(name: str) -> None:
    drafter = NgramDrafter(V, min_n=1, max_n=3) if name == "ngram" else SuffixDrafter(V, SUFFIX)
    for wanted in (requests(), sampled()):
        found = decoded(drafter, wanted, "suffix:nodes=8,width=3,depth=4")
        assert [g.tokens for g in found] == [g.tokens for g in decoded(None, wanted)]
        assert any(r.drafted > 1 for g in found for r in g.rounds)


# --- Every drafter, every kind

KINDS = ("eagle:topk=3,depth=3,nodes=9", "best:nodes=7,depth=3")


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
@pytest.mark.few(1)
def test_every_drafter_leaves_the_output_as_it_is(case: Case) -> None:
    for wanted, kind in zip((requests()[:3], sampled()[1:]), KINDS, strict=True):
        plain = [g.tokens for g in decoded(None, wanted)]
        assert [g.tokens for g in decoded(case.drafter, wanted, kind)] == plain, kind


@pytest.mark.slow
@pytest.mark.few(2)
def test_a_chain_is_the_tree_with_one_child_everywhere(case: Case) -> None:
    chain = decoded(case.drafter, requests())
    tree = decoded(case.drafter, requests(), "eagle:topk=1,depth=3,nodes=3")
    for one, other in zip(chain, tree, strict=True):
        assert [told(r) for r in one.rounds] == [told(r) for r in other.rounds]
        assert all(r.parents == (0, 1, 2) for r in other.rounds)


def told(round: Round) -> tuple[object, ...]:
    return round.position, round.drafted, round.accepted, round.emitted, round.proposal
