"""The Python interface: prompts as text, ids or requests; tokens, text and statistics; streaming."""

from __future__ import annotations

import pytest
from fixtures.checkpoints.zoo_models import requests, zoo_drafter, zoo_target
from hypothesis import given
from hypothesis import strategies as st

from draftkit.errors import DraftkitError
from draftkit.requests import Request, SamplingParameters
from draftkit.runtime.engine import Engine
from draftkit.runtime.records import Generation, TextStream
from draftkit.targets.chat import load_tokenizer
from draftkit.targets.target import Target
from draftkit.zoo import path

TOKENIZER = load_tokenizer(path("target"), "target")


def engine(**options: object) -> Engine:
    drafter = zoo_drafter("eagle3")
    return Engine(Target(zoo_target(), drafter.aux_layers), drafter, num_speculative_tokens=4, num_slots=2, **options)


def test_prompts_of_every_kind() -> None:
    text = "def add(a, b):"
    ids = TOKENIZER.encode(text)
    sampling = SamplingParameters(temperature=1.0, seed=3)
    own = Request("mine", tuple(ids), 8, SamplingParameters(temperature=1.0, seed=5))
    first, second, third = engine(tokenizer=TOKENIZER).generate([text, ids, own], sampling, max_new_tokens=12)
    assert first.request == Request("0", tuple(ids), 12, sampling)
    assert second.request.sampling.seed == 4
    assert third.request is own
    assert third.tokens[:8] == engine().generate([own])[0].tokens
    assert first.text == TOKENIZER.decode(first.tokens, skip_special_tokens=True)
    assert first.acceptance_length == 1 + sum(r.accepted for r in first.rounds) / len(first.rounds)


def test_text_streams_as_it_is_made() -> None:
    pieces: dict[str, list[str]] = {}
    lengths = []

    def on_text(generation: Generation, piece: str) -> None:
        pieces.setdefault(generation.request.id, []).append(piece)
        lengths.append(len(generation.tokens))

    generations = engine(tokenizer=TOKENIZER).generate(requests()[:4], on_text=on_text)
    assert {g.request.id: "".join(pieces[g.request.id]) for g in generations} == {
        g.request.id: g.text for g in generations
    }
    assert max(len(parts) for parts in pieces.values()) > 2
    assert min(lengths) <= 5


@given(st.lists(st.integers(0, len(TOKENIZER) - 1), min_size=1, max_size=40), st.data())
def test_pieces_make_the_text(tokens: list[int], data: st.DataObject) -> None:
    """Whatever the tokens and the rounds that they come in, incomplete characters included."""
    stream, text, known = TextStream(TOKENIZER), "", 0
    while known < len(tokens):
        known = data.draw(st.integers(known + 1, len(tokens)))
        text += stream.next(tokens[:known], last=known == len(tokens))
    assert text == TOKENIZER.decode(tokens, skip_special_tokens=True)


def test_text_needs_a_tokenizer() -> None:
    for prompts, options in ((["text"], {}), ([[5, 6]], {"on_text": lambda *_: None})):
        with pytest.raises(DraftkitError, match=r"no tokenizer|needs a tokenizer"):
            engine().generate(prompts, **options)
