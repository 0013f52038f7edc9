"""Drafts over fewer tokens: which are kept, that they draft as before, and that nothing else changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import typer
from fixtures.checkpoints import pico
from fixtures.checkpoints.templates import CHATML
from fixtures.checkpoints.vocabularies import byte_level, save, sentencepiece
from fixtures.examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from typer.testing import CliRunner, Result

from draftkit.cli.vocab import prune
from draftkit.convert.api import convert_checkpoint
from draftkit.data.sample_files import write_samples
from draftkit.data.samples import Sample, SamplesOrigin
from draftkit.data.tokenizer import load_tokenizer
from draftkit.data.vocabulary import ceiling, choose_vocabulary, token_counts
from draftkit.errors import DraftkitError, FormatError, LayoutError, TargetError
from draftkit.hub.locate import Located
from draftkit.io.tensors import open_checkpoint
from draftkit.layout.families import families
from draftkit.layout.families.causal_lm import CausalLMSpec
from draftkit.layout.families.eagle import EagleSpec
from draftkit.layout.folder import Draft, read_draft
from draftkit.loading import load_drafter, load_model, open_draft
from draftkit.prepare.head import open_head
from draftkit.prepare.prune import plan_pruning
from draftkit.prepare.vocabulary import open_vocabulary
from draftkit.requests import Request
from draftkit.runtime.drafters.causal_lm import CausalLMDrafter, SharedVocabulary
from draftkit.runtime.drafters.eagle import EagleDrafter
from draftkit.runtime.drafters.protocol import Drafter
from draftkit.runtime.engine import Engine
from draftkit.runtime.records import Generation
from draftkit.targets.target import Target

V, EOS = pico.VOCABULARY, 2
HEAD, D2T = "lm_head.weight", "d2t"


# --- The drafts


def eagle3(folder: Path) -> Path:
    return pico.write_checkpoint(folder, pico.eagle3_config(), pico.eagle3_tensors(dtype=torch.float32))


def eagle(folder: Path) -> Path:
    return pico.write_checkpoint(folder, pico.eagle_config(), pico.eagle_tensors(dtype=torch.float32))


def causal_lm(folder: Path) -> Path:
    """The target itself, which it drafts for without a mistake."""
    return pico.save_tokenizer(pico.save_llama(folder))


def tied(folder: Path) -> Path:
    return pico.save_tokenizer(pico.save_llama(folder, seed=1, num_hidden_layers=2, tie_word_embeddings=True))


def pard(folder: Path) -> Path:
    config = causal_lm(folder) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"pard_token": 300}))
    return folder


KINDS = {"eagle3": eagle3, "eagle": eagle, "causal-lm": causal_lm, "tied": tied, "pard": pard}
Make = Callable[[Path], Path]


@pytest.fixture(scope="module")
def model(running_target: Path) -> PreTrainedModel:
    return load_model(str(running_target), device="cpu", dtype=torch.float32)[0]


@pytest.fixture
def drafter(running_target: Path, model: PreTrainedModel) -> Callable[[Path], Drafter]:
    def load(source: Path) -> Drafter:
        with open_draft(str(source), str(running_target)) as draft:
            return load_drafter(draft, model, AutoTokenizer.from_pretrained(running_target))

    return load


def samples_file(path: Path, tokens: Iterable[int], target: Path) -> Path:
    """A file with one sample, all of it written by the target but its first token."""
    ids = [1, *tokens]
    origin = SamplesOrigin(str(target), load_tokenizer(str(target)).sha256)
    write_samples(path, [Sample.of("one", ids, [(1, len(ids))])], origin, force=True)
    return path


def generate(model: PreTrainedModel, drafter: Drafter | None) -> list[Generation]:
    engine = Engine(
        Target(model, drafter.aux_layers if drafter else None),
        drafter,
        num_speculative_tokens=3 if drafter else 0,
        num_slots=2,
    )
    prompts = torch.randint(3, V, (3, 7), generator=torch.Generator().manual_seed(4)).tolist()
    return engine.generate([Request(str(n), tuple(prompt), 12, ignore_eos=True) for n, prompt in enumerate(prompts)])


def proposals(generations: Iterable[Generation]) -> list[tuple[int, ...]]:
    return [r.proposal for g in generations for r in g.rounds]


def weights(folder: Path) -> dict[str, Tensor]:
    return {name: handle.load() for name, handle in open_checkpoint(folder).items()}


def ids_of(folder: Path) -> list[int]:
    """The tokens that a unified draft proposes."""
    draft = read_draft(folder)
    if isinstance(draft.spec.architecture, CausalLMSpec):
        return list(draft.spec.architecture.head_ids or range(V))
    offsets = draft.tensors[D2T].load()
    return (offsets + torch.arange(len(offsets))).tolist()


def logits(drafter: Drafter, states: Tensor) -> Tensor:
    assert isinstance(drafter, EagleDrafter | CausalLMDrafter)
    if isinstance(drafter, EagleDrafter):
        return drafter.model.logits(states)
    return drafter.model.model.get_output_embeddings()(states)


# --- What is kept


@examples(60)
@given(st.data())
def test_the_most_frequent_tokens_and_the_kept_ones(data: st.DataObject) -> None:
    counts = torch.tensor(data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=20)))
    kept = data.draw(st.sets(st.integers(0, len(counts) - 1)))
    size = data.draw(st.integers(max(1, len(kept)), len(counts)))
    chosen = choose_vocabulary(counts, size, sorted(kept)).tolist()
    order = sorted(range(len(counts)), key=lambda token: (token not in kept, -int(counts[token]), token))
    assert chosen == sorted(order[:size])


def test_tokens_that_end_an_answer_are_kept_by_their_role(tmp_path: Path) -> None:
    """The tokenizer's eos, all of the generation config's, and the template's end of turn; none occurs in the data."""
    tokenizer = byte_level()
    tokenizer.eos_token = "<|endoftext|>"
    source = save(tmp_path / "lm", tokenizer)
    (tmp_path / "lm/generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    data = samples_file(tmp_path / "data.jsonl", [20, 21, 22], Path(source))
    special = {name: tokenizer.convert_tokens_to_ids(name) for name in ("<|endoftext|>", "<|im_end|>", "<|tool|>")}
    assert tokenizer.chat_template == CHATML
    pruning = plan_pruning(source, data, size=6, keep=["21", "the"])
    kept = {token["id"]: token["why"] for token in pruning.to_dict()["kept"]}  # type: ignore[attr-defined, index]
    the = tokenizer.get_vocab()["the"]
    ends = {7: "eos", 9: "eos", special["<|endoftext|>"]: "eos", special["<|im_end|>"]: "end of turn"}
    assert kept == ends | {21: "--keep", the: "--keep"}
    assert ids_of(pruning.write(tmp_path / "out")) == sorted(kept)
    tool = plan_pruning(source, data, size=5, keep=["<|tool|>"]).write(tmp_path / "tool")
    assert ids_of(tool) == sorted([*ends, special["<|tool|>"]])


def test_an_end_that_was_cut_before_is_named(tmp_path: Path, running_target: Path) -> None:
    unified = convert_checkpoint(str(eagle3(tmp_path / "draft")), tmp_path / "out", target=str(running_target))
    assert EOS not in ids_of(unified)
    data = samples_file(tmp_path / "data.jsonl", [5], running_target)
    result = plan_pruning(str(unified), data, size=4, target=str(running_target)).to_dict()
    assert result["absent"] == [{"id": EOS, "token": "</s>", "why": "eos"}]


# --- It drafts as before


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_over_the_tokens_that_it_drafts_nothing_changes(
    make: Make, tmp_path: Path, running_target: Path, model: PreTrainedModel, drafter: Callable[[Path], Drafter]
) -> None:
    source = make(tmp_path / "draft")
    before = generate(model, drafter(source))
    drafted = sorted({token for proposal in proposals(before) for token in proposal})
    data = samples_file(tmp_path / "data.jsonl", drafted, running_target)
    size = len({*drafted, EOS} if make is not eagle3 else drafted)  # eagle3 has no eos
    out = plan_pruning(str(source), data, size=size, target=str(running_target)).write(tmp_path / "out")
    after = generate(model, drafter(out))
    assert set(drafted) <= set(ids_of(out))
    assert proposals(after) == proposals(before)
    assert [g.tokens for g in after] == [g.tokens for g in before]


@pytest.mark.slow
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_logits_of_the_kept_tokens_are_the_same_bits(
    make: Make, tmp_path: Path, running_target: Path, drafter: Callable[[Path], Drafter]
) -> None:
    source = make(tmp_path / "draft")
    data = samples_file(tmp_path / "data.jsonl", range(3, 200, 3), running_target)
    out = plan_pruning(str(source), data, size=40, target=str(running_target)).write(tmp_path / "out")
    whole, pruned = drafter(source), drafter(out)
    states = torch.randn(5, pico.HIDDEN, generator=torch.Generator().manual_seed(0))
    ids = ids_of(out)
    if isinstance(whole, EagleDrafter) and whole.model.target_ids is not None:
        ids = [whole.model.target_ids.tolist().index(token) for token in ids]
    assert logits(pruned, states).shape == (5, 40)
    assert torch.equal(logits(pruned, states), logits(whole, states)[:, ids])


@pytest.mark.slow
@pytest.mark.parametrize("make", [causal_lm, pard])
def test_a_model_drafts_kept_tokens_only_and_the_output_stays(
    make: Make, tmp_path: Path, running_target: Path, model: PreTrainedModel, drafter: Callable[[Path], Drafter]
) -> None:
    source = make(tmp_path / "draft")
    plain = [g.tokens for g in generate(model, None)]
    data = samples_file(tmp_path / "data.jsonl", plain[0], running_target)
    out = plan_pruning(str(source), data, size=8).write(tmp_path / "out")
    generations = generate(model, drafter(out))
    drafted = {token for proposal in proposals(generations) for token in proposal}
    assert drafted <= set(ids_of(out))
    assert len(drafted) > 1
    assert [g.tokens for g in generations] == plain


def test_columns_of_a_pruned_head_with_another_tokenizer() -> None:
    """Head rows are the draft's tokens 1, 3, 4; of the target's tokens it has 0 → 4, 1 → 2 and 2 → 1."""
    vocabulary = SharedVocabulary(torch.tensor([1, 2, 4]), torch.tensor([2, 1, 0]), torch.tensor([4, 2, 1]))
    drafter = CausalLMDrafter(Target(pico.llama(num_hidden_layers=1)), vocabulary, torch.tensor([1, 3, 4]))
    seen: list[tuple[Tensor, Tensor | None]] = []

    def draw(step: int, logits: Tensor, ids: Tensor | None = None) -> Tensor:
        seen.append((logits, ids))
        return torch.zeros(1)

    drafter._draw(draw, 0, torch.tensor([[0.1, 0.3, 0.4]]))
    ((shared, ids),) = seen
    assert ids is not None
    assert dict(zip(ids.tolist(), shared[0].tolist(), strict=True)) == pytest.approx({2: 0.1, 0: 0.4})
    with pytest.raises(TargetError, match="no token that the target has"):
        CausalLMDrafter(drafter.model, vocabulary, torch.tensor([3]))


# --- Tensors and folders


@pytest.mark.parametrize("make", [eagle3, eagle, causal_lm])
def test_two_prunings_are_one(make: Make, tmp_path: Path, running_target: Path) -> None:
    source, target = str(make(tmp_path / "draft")), str(running_target)
    data = samples_file(
        tmp_path / "data.jsonl", [t for n, t in enumerate(range(3, 250, 2)) for _ in range(n % 7)], running_target
    )
    once = plan_pruning(source, data, size=20, target=target).write(tmp_path / "once")
    first = plan_pruning(source, data, size=60, target=target).write(tmp_path / "first")
    twice = plan_pruning(str(first), data, size=20, target=target).write(tmp_path / "twice")
    assert ids_of(once) == ids_of(twice)
    assert read_draft(once).spec == read_draft(twice).spec
    both = weights(once), weights(twice)
    assert both[0].keys() == both[1].keys()
    assert all(torch.equal(both[0][name], both[1][name]) for name in both[0])


def test_a_map_in_another_order_comes_out_in_order(tmp_path: Path, running_target: Path) -> None:
    tensors = pico.eagle3_tensors(dtype=torch.float32)
    ids = torch.randperm(V, generator=torch.Generator().manual_seed(3))[: pico.DRAFT_VOCABULARY]
    tensors[D2T] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)
    source = pico.write_checkpoint(tmp_path / "draft", pico.eagle3_config(), tensors)
    data = samples_file(tmp_path / "data.jsonl", ids[::4].tolist(), running_target)
    size = len(ids[::4]) + (EOS in ids)
    out = plan_pruning(str(source), data, size=size, target=str(running_target)).write(tmp_path / "out")
    rows = {token: tensors[HEAD][row] for row, token in enumerate(ids.tolist())}
    assert ids_of(out) == sorted({*ids[::4].tolist(), *({EOS} & set(ids.tolist()))})
    assert torch.equal(weights(out)[HEAD], torch.stack([rows[token] for token in ids_of(out)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_borrowed_head_are_the_targets(dtype: torch.dtype, tmp_path: Path) -> None:
    target = pico.save_tokenizer(tmp_path / "target")
    pico.llama().to(dtype).save_pretrained(target)
    draft, data = eagle(tmp_path / "draft"), samples_file(tmp_path / "data.jsonl", [9, 5, 9], target)
    out = plan_pruning(str(draft), data, size=3, target=str(target)).write(tmp_path / "out")
    assert ids_of(out) == [EOS, 5, 9]
    assert torch.equal(weights(out)[HEAD], weights(target)[HEAD][ids_of(out)])
    spec = read_draft(out).spec.architecture
    assert isinstance(spec, EagleSpec)
    assert (spec.lm_head, spec.draft_vocab_size) == ("draft", 3)
    whole = convert_checkpoint(str(tmp_path / "draft"), tmp_path / "whole", target=str(target))
    assert all(torch.equal(weights(out)[name], tensor) for name, tensor in weights(whole).items())


@pytest.mark.parametrize("to", ["eagle", "speculators"])
def test_other_layouts_get_map_and_mask(to: str, tmp_path: Path, running_target: Path) -> None:
    source, target = str(eagle3(tmp_path / "draft")), str(running_target)
    data = samples_file(tmp_path / "data.jsonl", range(3, 200, 3), running_target)
    out = plan_pruning(source, data, size=30, target=target).write(tmp_path / "out")
    foreign = convert_checkpoint(str(out), tmp_path / to, to=to, target=target, allow_lossy=True)
    found, ids = weights(foreign), torch.tensor(ids_of(out))
    assert torch.equal(found[D2T], ids - torch.arange(30))
    assert found["t2d"].nonzero().flatten().tolist() == ids.tolist()
    assert len(found["t2d"]) == V
    back = convert_checkpoint(str(foreign), tmp_path / "back", target=target)
    assert ids_of(back) == ids.tolist()


@pytest.mark.parametrize("make", [causal_lm, tied])
def test_transformers_loads_the_folder_of_a_model_unchanged(make: Make, tmp_path: Path, running_target: Path) -> None:
    source = make(tmp_path / "draft")
    data = samples_file(tmp_path / "data.jsonl", [5, 6], running_target)
    out = plan_pruning(str(source), data, size=3).write(tmp_path / "out")
    models = [AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True) for folder in (source, out)]
    for _, info in models:
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
    tokens = torch.tensor([[3, 4, 5]])
    assert torch.equal(*(model.eval()(tokens).logits for model, _ in models))
    configs = [json.loads((folder / "config.json").read_text()) for folder in (source, out)]
    assert {key: configs[1][key] for key in configs[0]} == configs[0]
    assert AutoTokenizer.from_pretrained(out).get_vocab() == AutoTokenizer.from_pretrained(source).get_vocab()


def test_a_folder_from_before_has_no_head_ids(tmp_path: Path) -> None:
    folder = convert_checkpoint(str(causal_lm(tmp_path / "draft")), tmp_path / "out")
    config = json.loads((folder / "config.json").read_text())
    del config["draftkit"]["spec"]["architecture"]["head_ids"]
    (folder / "config.json").write_text(json.dumps(config))
    architecture = read_draft(folder).spec.architecture
    assert isinstance(architecture, CausalLMSpec)
    assert architecture.head_ids is None


@pytest.mark.parametrize("ids", [(), (3, 1), (1, 1), (0, 9), (-1, 2)])
def test_head_ids_are_tokens_in_order(ids: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match="head_ids"):
        CausalLMSpec(config={}, vocab_size=9, parallel=None, target_features=None, head_ids=ids)


def test_the_layout_of_transformers_would_lose_the_vocabulary(tmp_path: Path, running_target: Path) -> None:
    data = samples_file(tmp_path / "data.jsonl", [5, 6], running_target)
    out = plan_pruning(str(causal_lm(tmp_path / "draft")), data, size=3).write(tmp_path / "out")
    with pytest.raises(LayoutError, match="head_ids is a list of 3 tokens"):
        convert_checkpoint(str(out), tmp_path / "hf", to="hf")


# --- The table


def run(*arguments: object) -> Result:
    app = typer.Typer()
    app.command()(prune)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_plan_writes_nothing(tmp_path: Path, running_target: Path) -> None:
    source = eagle3(tmp_path / "draft")
    data = samples_file(tmp_path / "data.jsonl", [*range(3, 200, 3)] * 3, running_target)
    arguments = (source, "--data", data, "--target", running_target, "--size", 30, "--plan")
    shown = run(*arguments, "--out", tmp_path / "out")
    assert shown.exit_code == 0, shown.output
    assert "30" in shown.stdout
    result = json.loads(run(*arguments, "--json").stdout)
    assert not (tmp_path / "out").exists()
    assert result["out"] is None
    thirty, whole = result["sizes"]
    assert (thirty["size"], whole["size"]) == (30, pico.DRAFT_VOCABULARY)
    assert (thirty["head_bytes"], thirty["saved_bytes"]) == (30 * pico.HIDDEN * 4, 98 * pico.HIDDEN * 4)
    assert whole["saved_bytes"] == 0
    assert thirty["coverage"] <= whole["coverage"]
    assert thirty["acceptance_length"] <= whole["acceptance_length"]


def test_a_draft_of_fewer_tokens_is_judged_by_its_own(tmp_path: Path, running_target: Path) -> None:
    """The ceiling of the draft as it is counts what it has lost before."""
    data = samples_file(tmp_path / "data.jsonl", range(3, 200), running_target)
    plan = plan_pruning(str(eagle3(tmp_path / "draft")), data, target=str(running_target), k=2)
    (whole,) = plan.ceilings
    one = [Sample.of("one", [1, *range(3, 200)], [(1, 198)])]
    assert whole == ceiling(one, token_counts(one, [0], V), plan.head.ids, 2)
    assert 0 < whole.coverage < 1
    assert plan.pruned is None


def test_a_draft_is_written_and_says_how_it_was_made(tmp_path: Path, running_target: Path) -> None:
    data = samples_file(tmp_path / "data.jsonl", [5, 6], running_target)
    done = run(
        eagle(tmp_path / "draft"), "--data", data, "--target", running_target, "--size", 9, "--out", tmp_path / "o"
    )
    assert done.exit_code == 0, done.output
    assert "vLLM will refuse the folder" in done.stdout
    fact = read_draft(tmp_path / "o").provenance.facts[-1]
    assert (fact.name, fact.value, fact.origin) == ("draft vocabulary", "9", "overridden")


# --- What is refused


@pytest.mark.parametrize(
    ("size", "keep", "message"),
    [
        (V, [], "fewer than the 320 that the draft has"),
        (V + 1, [], "a draft vocabulary of 321 tokens"),
        (2, ["7", "8"], "at least the 3 that are kept"),
        (9, ["ab"], "--keep 'ab' is 2 tokens"),
        (9, [str(V)], f"--keep '{V}' is none of the {V} tokens"),
    ],
)
def test_impossible_vocabularies(
    size: int, keep: list[str], message: str, tmp_path: Path, running_target: Path
) -> None:
    data = samples_file(tmp_path / "data.jsonl", [5, 6], running_target)
    with pytest.raises(DraftkitError, match=message):
        plan_pruning(str(causal_lm(tmp_path / "draft")), data, size=size, keep=keep)


def test_a_token_that_was_cut_cannot_be_kept(tmp_path: Path, running_target: Path) -> None:
    data = samples_file(tmp_path / "data.jsonl", [5, 6], running_target)
    with pytest.raises(DraftkitError, match="does not propose the token 2\n"):
        plan_pruning(str(eagle3(tmp_path / "d")), data, size=9, keep=["</s>"], target=str(running_target))


def test_data_of_another_tokenizer(tmp_path: Path, running_target: Path) -> None:
    other = save(tmp_path / "other", sentencepiece())
    data = samples_file(tmp_path / "data.jsonl", [5, 6], Path(other))
    with pytest.raises(FormatError, match="another tokenizer"):
        plan_pruning(str(causal_lm(tmp_path / "draft")), data, size=9)


def test_a_model_with_a_tokenizer_of_its_own_is_not_the_targets(tmp_path: Path, running_target: Path) -> None:
    data = samples_file(tmp_path / "data.jsonl", [5, 6], running_target)
    with pytest.raises(TargetError, match="other tokens than those of"):
        plan_pruning(save(tmp_path / "other", sentencepiece()), data, size=9, target=str(running_target))


def test_a_target_is_needed_where_nothing_names_one(tmp_path: Path, running_target: Path) -> None:
    data = samples_file(tmp_path / "data.jsonl", [5, 6], running_target)
    bare = pico.save_llama(tmp_path / "draft", num_hidden_layers=1)
    with pytest.raises(TargetError, match="whose tokens the draft proposes"):
        plan_pruning(str(bare), data, size=9)


def test_heads_that_nothing_runs_pruned(tmp_path: Path, running_target: Path) -> None:
    owner = open_vocabulary(Located(running_target, "target"))
    draft = read_draft(convert_checkpoint("zoo:mlp-speculator", tmp_path / "mlp"))
    with pytest.raises(FormatError, match="MLP speculators"):
        open_head(draft, owner)


def test_a_quantized_head(tmp_path: Path, running_target: Path) -> None:
    draft: Draft = read_draft(convert_checkpoint(str(causal_lm(tmp_path / "draft")), tmp_path / "out"))
    tensors = draft.tensors | {HEAD: replace(draft.tensors[HEAD], dtype="F8_E4M3")}
    with pytest.raises(FormatError, match="the head is quantized: F8_E4M3"):
        open_head(replace(draft, tensors=tensors), open_vocabulary(Located(running_target, "target")))


def test_every_family_has_a_head_to_cut_or_says_why_not() -> None:
    for name, family in families().items():
        cuts = find_spec(f"draftkit.prepare.{name.replace('-', '_')}") is not None
        assert cuts != (family.whole_head is not None), name
