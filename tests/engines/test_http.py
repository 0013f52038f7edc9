"""What is read of a server, for how long and how much; what it is sent, and where that goes."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from fixtures.servers.hostile_servers import Exchange, HostileServer, Spoil, at

from draftkit.engines.connections import Limits
from draftkit.engines.http import Api
from draftkit.errors import SourceError

STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
SHORT = Limits(silence=0.3, page=0.5, answer=0.6, bytes=100_000, events=50)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")


def asked(spoil: Spoil, limits: Limits = SHORT) -> object:
    with HostileServer("http://127.0.0.1:9", spoil) as server:
        return Api(server.url, limits=limits, hint="").ask("/answer", {"prompt": [1]}, stream=True)


def forever(begin: bytes, part: bytes, pause: float = 0.0) -> Spoil:
    def speak(exchange: Exchange) -> None:
        exchange.write(begin)
        exchange.endlessly(part, pause)

    return at("", speak)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (forever(STREAM, b"x", 0.05), r"does not end: it has taken 0\.6 s"),
        (forever(b"HTTP/1.1 200 OK\r\nX: ", b"x", 0.05), r"does not end: it has taken 0\.6 s"),
        (forever(STREAM, b"data: {}\n"), "more than 50 events"),
        (forever(STREAM, b": ping\n" * 999), "more than 100,000 bytes"),
        (
            forever(b"HTTP/1.1 200 OK\r\n", b"X: " + b"x" * 9999 + b"\r\n"),
            "100,000 bytes|100 headers",
        ),
        (forever(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), "more than 100,000 bytes"),
        (forever(STREAM, b"", 1), "timed out"),
        (forever(b"HTTP/1.1 500 No\r\n\r\n", b"x", 0.05), r"does not end: it has taken 0\.6 s"),
    ],
)
def test_an_answer_has_an_end(spoil: Spoil, words: str) -> None:
    began = time.monotonic()
    with pytest.raises(SourceError, match=words):
        asked(spoil)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "sent",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000000\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n38D7EA4C68000\r\n{}",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n{}\r\n0\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"",
    ],
)
def test_a_page_that_is_cut_is_none(sent: bytes) -> None:
    """Half of a page of counters would be believed."""
    with (
        HostileServer("http://127.0.0.1:9", at("", lambda exchange: exchange.write(sent))) as server,
        pytest.raises(SourceError, match=r"the server (has gone away|does not answer)"),
    ):
        Api(server.url, limits=SHORT, hint="").page("/metrics")


def redirect(code: int, place: str) -> Callable[[Exchange], None]:
    head = f"HTTP/1.1 {code} Elsewhere\r\nLocation: {place}\r\nContent-Length: 0\r\n\r\n"
    return lambda exchange: exchange.write(head.encode("latin-1"))


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_neither_the_key_nor_the_prompt_follow_a_redirect(code: int) -> None:
    with HostileServer("http://127.0.0.1:9", at("", lambda exchange: exchange.send(200, b"{}"))) as other:
        for place in (f"{other.url}/x", other.url.removeprefix("http:") + "/x"):
            with HostileServer("http://127.0.0.1:9", at("", redirect(code, place))) as server:
                api = Api(server.url, limits=SHORT, hint="")
                with pytest.raises(SourceError, match=f"redirects to {other.url}/x"):
                    api.page("/metrics")
                with pytest.raises(
                    SourceError, match=f"redirects to {other.url}/x" if code > 303 else f"{code} Elsewhere"
                ):
                    api.ask("/answer", {"prompt": [1]}, stream=False)
            assert server.asked[0][2] == "Bearer sk-secret"
        assert not other.asked


@pytest.mark.parametrize(
    "place",
    ["http://[::1", "http://127.0.0.1:port/", "http://127.0.0.1:99999/", "file:///etc/passwd", "http://\xe4..b/"],
)
def test_a_redirect_to_what_is_no_address_is_refused(place: str) -> None:
    with (
        HostileServer("http://127.0.0.1:9", at("", redirect(302, place))) as server,
        pytest.raises(SourceError, match="the server redirects to"),
    ):
        Api(server.url, limits=SHORT, hint="").page("/metrics")


def test_a_redirect_on_the_same_server_is_followed() -> None:
    def moved(exchange: Exchange) -> None:
        if exchange.path == "/there/%E4":
            exchange.send(200, b'{"said": "%s"}' % exchange.command.encode())
        else:
            redirect(307, "/there/\xe4" if exchange.path != "/round" else "/round")(exchange)

    with HostileServer("http://127.0.0.1:9", at("", moved)) as server:
        api = Api(server.url, limits=SHORT, hint="")
        assert api.read("/here") == {"said": "GET"}
        ((_, said),) = api.ask("/here", {"prompt": [1]}, stream=False)
        assert said == {"said": "POST"}
        with pytest.raises(SourceError, match="more than 5 times"):
            api.page("/round")


def test_who_leaves_ends_what_others_wait_for() -> None:
    with HostileServer("http://127.0.0.1:9", forever(STREAM, b"data: {}\n", 0.05)) as server:
        api = Api(server.url, pauses=(60.0,), hint="")
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(api.ask, "/answer", {}, stream=True)
            time.sleep(0.2)
            api.leave()
            with pytest.raises(SourceError):
                waiting.result(timeout=5)
            with pytest.raises(SourceError):
                pool.submit(api.page, "/metrics").result(timeout=5)


@pytest.mark.parametrize("url", ["http://[::1", "http://", "http://host:port/v1", "localhost:8000", "ftp://host/"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(SourceError, match="HOST:PORT"):
        Api(url, hint="")


@pytest.mark.parametrize("secret", ["sk-se\ncret", "sk-sé"])
def test_a_key_that_cannot_be_sent_is_not_shown(secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", secret)
    with pytest.raises(SourceError, match="OPENAI_API_KEY holds") as caught:
        Api("http://127.0.0.1:9", hint="")
    assert "sk-" not in str(caught.value)


def test_what_a_terminal_would_obey_is_not_printed() -> None:
    said = b'{"error": {"message": "\\u001b[2J' + b"x" * 10_000 + b'"}}'
    with pytest.raises(SourceError, match="500") as caught:
        asked(at("", lambda exchange: exchange.send(500, said)))
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_connection_is_used_again_until_it_ends() -> None:
    """A server may end one that waits; what is then asked goes through another."""
    ports = []

    def speak(exchange: Exchange) -> None:
        ports.append(exchange.client_address[1])
        exchange.protocol_version = "HTTP/1.1"
        exchange.close_connection = exchange.path == "/last"
        if exchange.path == "/cut":
            exchange.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}")
            exchange.close_connection = True
        else:
            exchange.send(500 if exchange.path == "/fails" else 200, b'{"said": 1}')

    with HostileServer("http://127.0.0.1:9", at("", speak)) as server:
        api = Api(server.url, limits=SHORT, hint="")
        for path, connections in (("/a", 1), ("/b", 1), ("/last", 1), ("/a", 2), ("/fails", 2), ("/cut", 2), ("/b", 3)):
            if path in ("/fails", "/cut"):
                with pytest.raises(SourceError):
                    api.read(path)
            else:
                assert api.read(path) == {"said": 1}
            assert len(set(ports)) == connections, path
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(api.read, ["/a"] * 40)) == [{"said": 1}] * 40
        assert len(set(ports)) <= 3 + 4
        api.leave()
        with pytest.raises(SourceError):
            api.read("/a")


def test_another_variable_may_hold_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER_KEY", "sk-other")
    with HostileServer("http://127.0.0.1:9", at("", lambda exchange: exchange.send(200, b"{}"))) as server:
        Api(server.url, limits=SHORT, hint="", key="OTHER_KEY").read("/a")
    assert server.asked[0][2] == "Bearer sk-other"
