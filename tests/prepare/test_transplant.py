"""A model with another tokenizer: what is copied, what is put together, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fixtures.checkpoints import pico
from fixtures.checkpoints.vocabularies import BYTES, byte_level, save, sentencepiece, unigram, wordpiece
from fixtures.examples import examples
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE, WordLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from draftkit import zoo
from draftkit.cli.vocab import app
from draftkit.errors import DraftkitError, FormatError
from draftkit.hub.local_paths import public_name
from draftkit.hub.locate import Located
from draftkit.io.dtypes import dtype_name
from draftkit.io.handles import TensorHandle
from draftkit.io.tensors import open_checkpoint
from draftkit.layout.folder import read_draft
from draftkit.loading import load_drafter, load_model
from draftkit.prepare.causal_lm_transplant import (
    BLOCK_ROWS,
    evenly_spread,
    parse_layers,
    plan_transplant,
    shares,
    transplanted_rows,
)
from draftkit.prepare.matching import Match, Segmenter, count_kinds, match_vocabularies
from draftkit.prepare.vocabulary import Vocabulary, open_vocabulary
from draftkit.runtime.drafters.causal_lm import CausalLMDrafter
from draftkit.targets.tokens import CHARACTER_OF, same_vocabulary, token_names

Maker = Callable[..., PreTrainedTokenizerFast]
KINDS = {"byte-level": byte_level, "sentencepiece": sentencepiece, "unigram": unigram}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def tensors(folder: str | Path) -> dict[str, torch.Tensor]:
    return {name: handle.load() for name, handle in open_checkpoint(Path(folder)).items()}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def vocabulary(folder: str) -> Vocabulary:
    return open_vocabulary(Located(Path(folder), folder))


def in_memory(tokenizer: PreTrainedTokenizerFast, size: int | None = None) -> Vocabulary:
    """A vocabulary whose config states nothing."""
    folder = zoo.path("eagle3").parent / "none"
    found = Vocabulary("memory", None, folder, tokenizer, len(tokenizer) if size is None else size)
    found.__dict__["token_ids"] = {}
    return found


def handle_of(tensor: torch.Tensor) -> TensorHandle:
    data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return TensorHandle("t", dtype_name(tensor.dtype), tuple(tensor.shape), Path(), lambda size: iter([data]))


# --- Onto its own tokenizer

EXTRA = [AddedToken("the", special=False, normalized=False), AddedToken("<think>", special=False, normalized=False)]


@pytest.mark.parametrize(
    ("make", "options"),
    [
        pytest.param(byte_level, {}, id="byte-level"),
        pytest.param(byte_level, {"tie_word_embeddings": True}, id="tied"),
        pytest.param(byte_level, {"dtype": "bfloat16"}, id="bfloat16"),
        pytest.param(byte_level, {"dtype": "float16", "padding": 37}, id="padded"),
        pytest.param(byte_level, {"padding": -3}, id="tokens beyond the rows"),
        pytest.param(lambda: byte_level(extra=EXTRA), {}, id="duplicate texts"),
        pytest.param(sentencepiece, {}, id="sentencepiece"),
        pytest.param(unigram, {"padding": 5}, id="unigram"),
    ],
)
def test_onto_its_own_tokenizer_nothing_changes(make: Maker, options: dict[str, object], tmp_path: Path) -> None:
    donor = save(tmp_path / "donor", make(), **options)
    out = plan_transplant(donor, donor).write(tmp_path / "out")
    before, after = tensors(donor), tensors(out)
    assert before.keys() == after.keys()
    assert all(same_bits(before[name], after[name]) for name in before)
    assert (out / "tokenizer.json").read_bytes() == (Path(donor) / "tokenizer.json").read_bytes()
    configs = [json.loads((Path(folder) / "config.json").read_text()) for folder in (donor, out)]
    assert {key: configs[1][key] for key in configs[0]} == configs[0]
    assert read_draft(out).spec.method == "draft-model"


def test_the_zoo_onto_itself(tmp_path: Path) -> None:
    out = plan_transplant("zoo:draft-model", "zoo:target").write(tmp_path / "out")
    before, after = tensors(zoo.path("draft-model")), tensors(out)
    assert before.keys() == after.keys()
    assert all(same_bits(before[name], after[name]) for name in before)


def test_negative_zeros_and_nans_are_copied() -> None:
    rows = torch.tensor([[-0.0, 1.0], [float("nan"), -0.0]]).bfloat16()
    handle = handle_of(rows)
    copied = transplanted_rows(handle, [Match("exact", (1,)), Match("exact", (0,))], [1, 1], "mean").load()
    assert same_bits(copied, rows.flip(0))


WORD = st.text(st.sampled_from("abé ▁Ġ0"), min_size=1, max_size=4)


@examples(60)
@given(
    words=st.lists(WORD, unique=True, max_size=12),
    added=st.lists(st.tuples(st.sampled_from(["a", "<s>", "</s>", "b", "ab"]), st.booleans()), max_size=4),
    size=st.integers(-3, 4),
)
def test_every_row_of_a_vocabulary_matches_itself(words: list[str], added: list[tuple[str, bool]], size: int) -> None:
    names = list(dict.fromkeys([*BYTES, "▁", *words]))
    tokenizer = Tokenizer(BPE({word: index for index, word in enumerate(names)}, [], byte_fallback=True))
    for content, special in added:
        add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
        add([AddedToken(content, special=special, normalized=False)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    vocabulary = in_memory(fast, len(fast) + size)
    assert [match.donors for match in match_vocabularies(vocabulary, vocabulary)] == [
        (row,) for row in range(vocabulary.size)
    ]


# --- Onto another


@pytest.mark.slow
@pytest.mark.parametrize("weighting", ["mean", "length"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("own", "theirs"),
    [("byte-level", "sentencepiece"), ("sentencepiece", "byte-level"), ("unigram", "byte-level")],
)
def test_rows_of_another_vocabulary(own: str, theirs: str, tied: bool, weighting: str, tmp_path: Path) -> None:
    """Every row against a reference that knows bytes only; donor and target share some words."""
    donor = save(tmp_path / "donor", KINDS[own](("the", "cat", "naï", "4", "x")), tie_word_embeddings=tied)
    target = save(tmp_path / "target", KINDS[theirs](("the", "cats", "naïve", "42", "y")), padding=11, seed=1)
    plan = plan_transplant(donor, target, weighting=weighting)  # type: ignore[arg-type]
    out = plan.write(tmp_path / "out")
    before, after = tensors(donor), tensors(out)
    assert before.keys() == after.keys()
    known, wanted = plan.donor.named, plan.target.named
    tables = [EMBEDDING] if tied else [EMBEDDING, HEAD]
    for name in before.keys() - tables:
        assert same_bits(before[name], after[name])
    for name in tables:
        average = before[name][sorted(known)].double().mean(0)
        for row, match in enumerate(plan.matches):
            texts = [known[token] for token in match.donors]
            got = after[name][row]
            if match.kind == "exact":
                assert texts == [wanted[row]]
            if len(match.donors) == 1:
                assert same_bits(got, before[name][match.donors[0]])
                continue
            parts = torch.tensor([len(text) if weighting == "length" else 1 for text in texts], dtype=torch.float64)
            expected = average if not texts else (parts / parts.sum()) @ before[name][list(match.donors)].double()
            torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)
            if match.kind == "pieces":
                assert b"".join(texts) == wanted[row]  # type: ignore[arg-type]
                assert wanted[row] not in known.values()
    kinds = count_kinds(plan.matches)
    assert kinds["exact"] > 20
    assert kinds["pieces"] > 2
    assert kinds["unused"] == 11
    assert sum(kinds.values()) == len(plan.matches) == after[EMBEDDING].shape[0]


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
@examples(40)
@given(text=st.binary(min_size=1, max_size=12) | st.text(max_size=6).map(str.encode))
def test_pieces_are_the_bytes_they_stand_for(make: Maker, text: bytes) -> None:
    vocabulary = in_memory(make())
    pieces = Segmenter(vocabulary.tokenizer, "donor").pieces(text)
    if b"\xe2\x96\x81" not in text:  # ▁ itself is a space to SentencePiece
        assert b"".join(vocabulary.named[piece] for piece in pieces) == text  # type: ignore[misc]


def test_no_space_is_put_before_pieces() -> None:
    tokenizer = sentencepiece(("drafting", "ing"))
    pieces = Segmenter(tokenizer, "donor").pieces(b"cat")
    assert b"".join(in_memory(tokenizer).named[piece] for piece in pieces) == b"cat"  # type: ignore[misc]
    assert tokenizer.decode(tokenizer.encode("cat", add_special_tokens=False)[0]) in ("", " ")


def test_special_tokens_go_by_their_purpose(tmp_path: Path) -> None:
    donor = in_memory(byte_level())
    target = in_memory(sentencepiece())
    matches = match_vocabularies(donor, target)
    ids = target.tokenizer.convert_tokens_to_ids
    end, start = ("<|im_end|>", "<|im_start|>")
    assert donor.named[matches[ids("</s>")].donors[0]] == end
    assert donor.named[matches[ids("<s>")].donors[0]] == start  # begins a turn in its template
    assert matches[ids("<unk>")].kind == "average"
    assert [matches[ids(name)].kind for name in ("</s>", "<s>")] == ["role", "role"]
    back = match_vocabularies(target, donor)
    tool = donor.tokenizer.convert_tokens_to_ids("<|tool|>")
    assert back[tool] == Match("average")  # and not the text <|tool|>


def test_a_row_is_given_once() -> None:
    """A byte token beside a word for the same byte is never written, and must not tie with the word."""
    target, donor = in_memory(sentencepiece(("a",))), in_memory(byte_level(("a",)))
    matches = match_vocabularies(donor, target)
    ids = target.tokenizer.convert_tokens_to_ids
    assert matches[ids("a")].kind == "exact"
    assert matches[ids("<0x61>")] == Match("average")
    assert matches[ids("<0x62>")].kind == "exact"  # no word for this one
    assert token_names(target.tokenizer, target.size)[b"a"] == ids("a")
    given = [match.donors[0] for match in matches if match.kind in ("exact", "role")]
    assert len(given) == len(set(given))


def test_a_row_without_a_counterpart_is_never_the_likeliest() -> None:
    torch.manual_seed(0)
    head = torch.randn(300, 16)
    matches = [*(Match("exact", (row,)) for row in range(300)), Match("average"), Match("unused")]
    rows = transplanted_rows(handle_of(head), matches, [1] * 300, "mean").load()
    logits = torch.randn(2000, 16) * 10 @ rows.T
    assert (logits.argmax(1) < 300).all()
    assert (logits.softmax(1)[:, 300:] < 1 / 300).all()


def test_rows_are_made_block_by_block() -> None:
    rows = torch.randn(2 * BLOCK_ROWS + 5, 3)
    matches = [Match("exact", (row,)) for row in range(len(rows))]
    handle = transplanted_rows(handle_of(rows), matches, [1] * len(rows), "mean")
    chunks = list(handle.chunks(1000))
    assert max(map(len, chunks)) <= 1000
    assert b"".join(chunks) == rows.numpy().tobytes()
    assert shares("length", [1, 3]) == [0.25, 0.75]


# --- What the result is good for


def test_the_result_drafts_for_the_target(tmp_path: Path) -> None:
    donor = save(tmp_path / "donor", sentencepiece(), dtype="bfloat16")
    target = save(tmp_path / "target", byte_level(), padding=9, seed=1)
    out = plan_transplant(donor, target).write(tmp_path / "out")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "the naïve cat"}], return_tensors="pt")
    assert model.dtype == torch.bfloat16
    assert model(text["input_ids"]).logits.isfinite().all()
    assert model.config.eos_token_id == tokenizer.eos_token_id
    lm, theirs = load_model(target, device="cpu", dtype=torch.float32)
    assert same_vocabulary(theirs, tokenizer, lm.config.vocab_size)
    drafter = load_drafter(read_draft(out), lm, theirs)
    assert isinstance(drafter, CausalLMDrafter)
    assert drafter.vocabulary is None
    provenance = read_draft(out).provenance
    assert provenance.target == public_name(target)
    assert "pieces" in provenance.facts[-1].note


def test_families_with_other_names(tmp_path: Path) -> None:
    tokenizer = byte_level()
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=1, n_head=2, n_positions=64)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "donor")
    tokenizer.save_pretrained(tmp_path / "donor")
    target = save(tmp_path / "target", sentencepiece())
    out = plan_transplant(str(tmp_path / "donor"), target).write(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.get_input_embeddings().weight.shape[0] == len(sentencepiece())
    assert model(torch.tensor([[1, 5, 300]])).logits.isfinite().all()
    with pytest.raises(FormatError, match="gpt2 cannot be trimmed"):
        plan_transplant(str(tmp_path / "donor"), target, layers="1")


# --- Trimming


@pytest.mark.parametrize(
    ("count", "layers", "expected"), [(3, 9, (0, 4, 8)), (1, 9, (0,)), (9, 9, tuple(range(9))), (12, 9, ())]
)
def test_layers_are_spread_evenly(count: int, layers: int, expected: tuple[int, ...]) -> None:
    assert evenly_spread(count, layers) == expected


@given(layers=st.integers(1, 99), data=st.data())
def test_the_first_and_last_layer_stay(layers: int, data: st.DataObject) -> None:
    chosen = evenly_spread(data.draw(st.integers(1, layers)), layers)
    assert list(chosen) == sorted(set(chosen))
    assert len(chosen) == 1 or (chosen[0], chosen[-1]) == (0, layers - 1)


@pytest.mark.parametrize("text", ["0", "9", "x", "1,1", "2,1", "0,8", "-1,2", ""])
def test_layers_that_there_are_not(text: str) -> None:
    with pytest.raises(DraftkitError, match=f"layers {text}"):
        parse_layers(text, 8)


def test_trimming(tmp_path: Path) -> None:
    """MLP channels that do nothing go first, which changes no logit; the layers that stay are the donor's."""
    donor = save(tmp_path / "donor", byte_level(), num_hidden_layers=4)
    model = AutoModelForCausalLM.from_pretrained(donor)
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.data[:, ::2] = 0
    model.save_pretrained(donor)
    narrow = plan_transplant(donor, donor, intermediate=48).write(tmp_path / "narrow")
    tokens = torch.arange(40)[None]
    result = AutoModelForCausalLM.from_pretrained(narrow)
    assert result.config.intermediate_size == 48
    torch.testing.assert_close(result(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-4)
    short = plan_transplant(donor, donor, layers="0,3", intermediate=96).write(tmp_path / "short")
    before, after = tensors(donor), tensors(short)
    assert same_bits(before["model.layers.3.mlp.up_proj.weight"], after["model.layers.1.mlp.up_proj.weight"])
    assert AutoModelForCausalLM.from_pretrained(short)(tokens).logits.isfinite().all()
    with pytest.raises(DraftkitError, match="intermediate size of 97"):
        plan_transplant(donor, donor, intermediate=97)


# --- What is refused


def marked() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(BPE({"a</w>": 0, "a": 1}, [], end_of_word_suffix="</w>")), eos_token="a"
    )


def words_only() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "<unk>": 1}, "<unk>")))


@pytest.mark.parametrize(
    ("make", "message"),
    [(wordpiece, "kind WordPiece"), (words_only, "kind WordLevel"), (marked, "end_of_word_suffix is '</w>'")],
)
def test_tokenizers_whose_tokens_are_no_bytes(make: Maker, message: str, tmp_path: Path) -> None:
    other, good = save(tmp_path / "other", make()), save(tmp_path / "good", byte_level())
    for donor, target in ((other, good), (good, other)):
        with pytest.raises(FormatError, match=message):
            plan_transplant(donor, target)


def test_a_donor_must_be_able_to_write_every_text(tmp_path: Path) -> None:
    partial = save(tmp_path / "partial", sentencepiece(byte_fallback=False))
    good = save(tmp_path / "good", byte_level())
    with pytest.raises(FormatError, match="no tokens for single bytes"):
        plan_transplant(partial, good)
    assert count_kinds(plan_transplant(good, partial).matches)["exact"] > 10  # as a target it is no problem


def test_rare_bytes_that_are_no_tokens_do_not_matter(tmp_path: Path) -> None:
    whole = byte_level()
    state = json.loads(whole.backend_tokenizer.to_str())
    words = state["model"]["vocab"]
    words["never"] = words.pop(CHARACTER_OF[0xF1])  # which SmolLM2's lacks too
    partial = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)), eos_token=whole.eos_token)
    donor, target = save(tmp_path / "donor", partial), save(tmp_path / "target", whole)
    assert count_kinds(plan_transplant(donor, donor).matches)["average"] == 0
    assert count_kinds(plan_transplant(donor, target).matches)["average"] == 1  # the byte itself


@pytest.mark.parametrize(
    ("source", "message"), [("zoo:pard", "kind pard"), ("zoo:eagle3", "kind eagle3"), ("zoo:medusa", "no model")]
)
def test_donors_that_are_no_plain_language_model(source: str, message: str) -> None:
    with pytest.raises(DraftkitError, match=message):
        plan_transplant(source, "zoo:target")


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(DraftkitError, match="there is no tokenizer"):
        plan_transplant("zoo:draft-model", str(pico.save_llama(tmp_path / "bare")))


# --- The command


def prepare(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)


def test_the_command(tmp_path: Path) -> None:
    donor = save(tmp_path / "donor", sentencepiece())
    target = save(tmp_path / "target", byte_level(), padding=-1)
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("the cat sat on the mat\nÿ the\n")
    command = ("transplant", donor, "--tokenizer-of", target, "--out", tmp_path / "out", "--corpus", corpus)
    planned = json.loads(prepare(*command, "--dry-run", "--json").stdout)
    assert not (tmp_path / "out").exists()
    assert planned["tokens_without_a_row"] == ["<|tool|>"]
    assert planned["roles"] == [
        {"target": "<|im_start|>", "donor": "<s>"},
        {"target": "<|im_end|>", "donor": "</s>"},
    ]
    coverage = planned["coverage"]
    assert coverage["tokens"] == len(AutoTokenizer.from_pretrained(target).encode(corpus.read_text()))
    assert sum(coverage["counts"].values()) == coverage["tokens"]
    done = prepare(*command)
    assert "of the text" in done.stdout
    assert "draftkit train" in done.stderr
    with pytest.raises(DraftkitError, match="already there"):
        prepare(*command)
    assert prepare(*command, "--force").exit_code == 0
    with pytest.raises(DraftkitError, match="corpus cannot be read"):
        prepare(*command[:-1], tmp_path / "none.txt", "--dry-run")
