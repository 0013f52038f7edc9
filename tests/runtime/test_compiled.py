"""Rounds as compiled programs: what they give is what rounds give, whatever is drafted, at any size."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fixtures.compiler import compiles
from fixtures.engines.drafter_cases import CASES, Case, Load, eagle3, load, requests, sampled, target

from draftkit.errors import DraftkitError
from draftkit.requests import DraftSampling, Request
from draftkit.runtime import engine as engine_module
from draftkit.runtime.batch import Batch
from draftkit.runtime.compiled import attention, programs, store
from draftkit.runtime.compiled import prompts as prompts_module
from draftkit.runtime.compiled import rounds as rounds_module
from draftkit.runtime.compiled.inventory import Inventory
from draftkit.runtime.compiled.rounds import CompiledRounds
from draftkit.runtime.compiled.trace import Kind, RoundInputs, caches_of, trace
from draftkit.runtime.drafters.ngram import NgramDrafter
from draftkit.runtime.drafters.protocol import Drafter
from draftkit.runtime.engine import Engine
from draftkit.runtime.rounds import Rounds
from draftkit.runtime.tree_kinds import read_tree
from draftkit.targets.target import Target

__all__ = ["load"]

torch.set_num_threads(1)

K = 3


@pytest.fixture(autouse=True)
def own_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One place for all workers of a run."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled"


@pytest.fixture
def shared_programs(own_programs: None, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel and the target's programs are made once for all tests that take this: half a minute each."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(kept))


def engine(
    drafter: Drafter | None, *, compiled: bool = True, slots: int = 3, k: int = K, mode: str = "coupled",
    tree: str | None = None,
) -> Engine:  # fmt: skip
    k = 0 if drafter is None else k
    branching = None if tree is None else read_tree(tree)
    own = Target(target(), drafter.aux_layers if drafter else None)
    drafts = DraftSampling("probabilistic")
    return Engine(
        own, drafter, num_speculative_tokens=k, num_slots=slots, verification=mode, draft_sampling=drafts,
        tree=branching, compile=compiled,
    )  # type: ignore[arg-type]  # fmt: skip


def traced(made: Engine, running: dict[int, Request]) -> torch.export.ExportedProgram:
    """The trace of a round of an engine that has generated."""
    rounds = made._rounds
    assert isinstance(rounds, Rounds)
    batch = Batch.of(running, made.draft_sampling, torch.device("cpu"))
    rounds.run(batch.vacant(), made.k, 20)
    inputs = RoundInputs.of(batch, made._state, caches_of(rounds), torch.empty(20))
    weights = list(Inventory(rounds).weights.values())
    return trace(rounds, batch, inputs, Kind.of(batch, made.k, drafting=True), weights)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("name", CASES)
def test_a_round_of_every_family_can_be_traced_with_its_sizes_left_open(name: str, load: Load) -> None:
    """Greedily and sampled in turn: either trace has all that a family computes but how its drafts are chosen. Of two
    drafts, as a trace's time grows with them; `test_compiled_rounds_generate_the_same` has more."""
    asked = (requests, sampled)[list(CASES).index(name) % 2]
    drafter = CASES[name](load).drafter
    made = engine(drafter, compiled=False, k=2, mode="rejection")
    made.reserve(40)
    program = traced(made, dict(enumerate(asked()[:2])))
    unknown = [name for name in program.constants if not name.startswith("w")]
    assert not unknown  # else it would bring weights of its own


def tokens_of(made: Engine, asked: tuple[Request, ...]) -> list[list[int]]:
    return [generation.tokens for generation in made.generate(asked)]


@compiles
@pytest.mark.long
@pytest.mark.usefixtures("shared_programs")
@pytest.mark.parametrize("asked", [requests, sampled], ids=["greedy", "sampled"])
def test_compiled_rounds_generate_the_same(asked: object, load: Load, caplog: pytest.LogCaptureFixture) -> None:
    """Also where sequences end at different times, and a slot in the middle is free."""
    drafter = eagle3(load).drafter
    many = tuple(replace(one, id=f"{i} {one.id}") for i in range(2) for one in asked())  # type: ignore[operator]
    expected = tokens_of(engine(drafter, compiled=False), many)
    with caplog.at_level(logging.WARNING):
        assert tokens_of(engine(drafter), many) == expected
    told = [record.getMessage() for record in caplog.records]
    assert not [line for line in told if "not compiled" in line]
    made = [line for line in told if line.startswith("compiling")]
    assert {"several sequences" in line for line in made} == {True, False}
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert tokens_of(engine(drafter), many) == expected
    assert not [record for record in caplog.records if "compil" in record.getMessage()]  # they were kept


@compiles
@pytest.mark.long
@pytest.mark.usefixtures("shared_programs")
@pytest.mark.parametrize(
    ("name", "tree"), [("n-grams", None), ("DSpark, recurrent", None), ("EAGLE-3", f"eagle:topk=2,depth={K},nodes=6")]
)
def test_other_rounds_are_compiled_too(
    name: str, tree: str | None, load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of a drafter that keeps the text of each slot, and those that draft a tree, among them."""
    if name == "n-grams":
        drafter: Drafter = NgramDrafter(vocab_size=target().config.vocab_size, min_n=1, max_n=3)
    else:
        drafter = CASES[name](load).drafter
    expected = tokens_of(engine(drafter, compiled=False, slots=1, tree=tree), requests())
    with caplog.at_level(logging.WARNING):
        assert tokens_of(engine(drafter, slots=1, tree=tree), requests()) == expected
    assert not [record for record in caplog.records if "not compiled" in record.getMessage()]


@compiles
@pytest.mark.long
def test_a_kept_program_that_is_damaged_is_made_again(caplog: pytest.LogCaptureFixture) -> None:
    expected = tokens_of(engine(None, slots=1), requests()[:1])
    for file in store.kept_folder("programs").glob("*.pt2"):
        file.write_bytes(file.read_bytes()[:1000])
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert tokens_of(engine(None, slots=1), requests()[:1]) == expected
    assert any(record.getMessage().startswith("compiling") for record in caplog.records)


def test_a_kept_kernel_that_is_damaged_is_not_taken(tmp_path: Path) -> None:
    damaged = tmp_path / "kernel.so"
    assert not attention._loaded(damaged)
    damaged.write_bytes(b"\x7fELF")
    assert not attention._loaded(damaged)


def test_what_cannot_be_compiled_runs_as_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise NotImplementedError("an operation without a meaning in a trace")

    monkeypatch.setattr(engine_module, "check_compiler", lambda: None)
    monkeypatch.setattr(programs, "load_kernel", lambda: None)
    monkeypatch.setattr(rounds_module, "trace", fails)
    monkeypatch.setattr(prompts_module, "_trace", fails)
    expected = tokens_of(engine(None, compiled=False), requests())
    made = engine(None)
    with caplog.at_level(logging.WARNING):
        assert tokens_of(made, requests()) == expected
    assert isinstance(made._rounds, CompiledRounds)
    assert any("are not compiled, and slower" in record.getMessage() for record in caplog.records)


def test_without_a_compiler_the_engine_says_so() -> None:
    from torch._inductor import config

    no_compiler = config.patch({"cpp.cxx": ("no-such-compiler",)})
    with no_compiler, pytest.raises(DraftkitError, match=r"no C\+\+ compiler") as refused:
        engine(None)
    assert "--compile" in str(refused.value)


def test_weights_are_found_once_and_whatever_else_decides_is_in_the_digest(load: Load) -> None:
    case: Case = eagle3(load)
    made = engine(case.drafter, compiled=False)
    made.reserve(20)
    found = Inventory(made._rounds)
    assert len({id(weight) for weight in found.weights.values()}) == len(found.weights)
    parameters = {id(parameter) for parameter in vars(target().model.norm)["_parameters"].values()}
    assert parameters <= {id(weight) for weight in found.weights.values()}
    assert Inventory(made._rounds).digest == found.digest
    made._rounds.estimates = True  # type: ignore[union-attr]
    assert Inventory(made._rounds).digest != found.digest


def test_the_programs_made_longest_ago_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MOST", 2)
    folder = tmp_path / "programs"
    folder.mkdir()
    made = tmp_path / "made.pt2"
    made.write_bytes(b"program")
    for age, name in ((3, "oldest"), (2, "older"), (1, "new")):
        kept = store.keep(made, folder / f"{name}.pt2")
        os.utime(kept, (time.time() - age, time.time() - age))
    store.keep(made, folder / "newest.pt2")
    assert {path.stem for path in folder.iterdir()} == {"new", "newest"}


def test_where_nothing_can_be_kept_a_program_is_used_where_it_was_made(tmp_path: Path) -> None:
    made = tmp_path / "made.pt2"
    made.write_bytes(b"program")
    assert store.keep(made, made / "no folder" / "kept.pt2") == made
