"""Several servers answer as one: all are kept busy, a dead one is left out, and each gets its own key."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from fixtures.servers.completions_server import Answer, CompletionsServer
from fixtures.servers.slots_server import SlotsServer, lognormal

from draftkit.data import endpoints
from draftkit.data.endpoints import EndpointResponder
from draftkit.data.responses import Refusal, RowPrompt, Sampling
from draftkit.errors import SourceError
from draftkit.requests import SamplingParameters

SAMPLING = Sampling(SamplingParameters(0.7), 4096, frozenset({7}))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "PAUSES", (0.0,))


def respond(responder: EndpointResponder, count: int) -> dict[str, tuple[int, ...] | Refusal]:
    left: Iterator[RowPrompt] = (RowPrompt(str(n), (1, 2, n), n) for n in range(count))
    found = [(prompt.id, answer) for prompt, answer in responder.respond(lambda: next(left, None))]
    assert len(dict(found)) == len(found) == count
    return dict(found)


def echo(body: dict[str, object]) -> Answer:
    prompt = body["prompt"]
    assert isinstance(prompt, list)
    return 200, {"choices": [{"text": "x", "token_ids": [prompt[-1], 7], "prompt_token_ids": prompt}]}


def test_all_slots_are_kept_full_whatever_the_lengths() -> None:
    """From the first request until the last, of answers some of which take many times as long as others."""
    with SlotsServer(16, 0.0002, lognormal) as server:
        answers = respond(EndpointResponder(server.endpoint, SAMPLING, 16), 200)
    found = server.presence
    assert (found.requests, found.most) == (200, 16)
    assert found.to_dict()["mean"] > 0.6 * 16  # 95 % on a quiet machine
    assert all(len(answer) == min(lognormal(int(id)) or 1, 4096) for id, answer in answers.items())  # type: ignore[arg-type]


def test_requests_go_to_all_endpoints_alike() -> None:
    with SlotsServer(4, 0.0001, lognormal) as one, SlotsServer(4, 0.0001, lognormal) as two:
        respond(EndpointResponder([one.endpoint, two.endpoint, one.endpoint], SAMPLING, 8), 80)
        assert one.presence.most == two.presence.most == 4
    assert one.presence.requests + two.presence.requests == 80


def test_an_endpoint_that_dies_is_left_out_and_others_are_asked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    left = iter(range(5))

    def dying(body: dict[str, object]) -> Answer:
        return echo(body) if next(left, None) is not None else (503, {})

    with CompletionsServer(dying) as one, CompletionsServer(echo) as two:
        responder = EndpointResponder([one.endpoint, two.endpoint], SAMPLING, 6)
        answers = respond(responder, 40)
        assert answers == {str(n): (n, 7) for n in range(40)}
        (said,) = (record.message for record in caplog.records)
        assert said.startswith(f"{one.endpoint.removesuffix('/v1')} is left out, 1 left of the servers: ")
        assert "503" in said
        assert "\n" not in said
        asked = len(one.requests)
        respond(responder, 5)
        assert len(one.requests) == asked
        two.answer = dying
        with pytest.raises(SourceError, match="503"):
            respond(responder, 5)


def test_what_a_dead_server_has_not_answered_does_not_wait_for_it(caplog: pytest.LogCaptureFixture) -> None:
    """One request fails there; another hangs, which ends as well."""
    over = threading.Event()

    def hanging(body: dict[str, object]) -> Answer:
        if body["prompt"][-1] % 4:  # type: ignore[index]
            over.wait(20)
        return 503, {}

    began = time.monotonic()
    with CompletionsServer(hanging) as one, CompletionsServer(echo) as two:
        answers = respond(EndpointResponder([one.endpoint, two.endpoint], SAMPLING, 8), 30)
        took = time.monotonic() - began
        over.set()
    assert len(answers) == 30
    assert took < 15


def test_a_server_that_is_not_there_is_left_out_from_the_beginning(caplog: pytest.LogCaptureFixture) -> None:
    with CompletionsServer(echo) as gone:
        pass
    with CompletionsServer(echo) as there:
        answers = respond(EndpointResponder([gone.endpoint, there.endpoint], SAMPLING, 2), 4)
    assert len(answers) == 4
    assert f"{gone.endpoint.removesuffix('/v1')} is left out" in caplog.text
    with pytest.raises(SourceError, match="does not answer"):
        EndpointResponder([gone.endpoint, there.endpoint], SAMPLING, 2)


def test_servers_of_different_models_are_refused() -> None:
    with CompletionsServer(echo, models=("a", "b")) as both, CompletionsServer(echo, models=("b",)) as one:
        named = [both.endpoint, one.endpoint]
        with pytest.raises(SourceError, match=r"different models:\n    .*: a, b\n    .*: b"):
            EndpointResponder(named, SAMPLING, 2)
        with pytest.raises(SourceError, match="different models"):
            EndpointResponder(named, SAMPLING, 2, "a")
        with pytest.raises(SourceError, match="serves a, b"):
            EndpointResponder([both.endpoint, both.endpoint], SAMPLING, 2)
        assert EndpointResponder(named, SAMPLING, 2, "b").model == "b"
        respond(EndpointResponder(named, SAMPLING, 2, "b"), 4)
        assert {body["model"] for body in both.requests + one.requests} == {"b"}


def test_each_endpoint_gets_its_own_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-usual")
    monkeypatch.setenv("OTHER_KEY", "sk-other")
    with CompletionsServer(echo) as one, CompletionsServer(echo) as two:
        respond(EndpointResponder([one.endpoint, f"{two.endpoint}=OTHER_KEY"], SAMPLING, 4), 20)
        with pytest.raises(SourceError, match="NO_SUCH_KEY is not set"):
            EndpointResponder(f"{two.endpoint}=NO_SUCH_KEY", SAMPLING, 1)
    assert (one.authorizations, two.authorizations) == ({"Bearer sk-usual"}, {"Bearer sk-other"})
