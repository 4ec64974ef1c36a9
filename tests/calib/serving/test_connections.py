"""Addresses that lead nowhere, and what is there instead of a server."""

import socket
import ssl
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from fake_server import SECRET, FakeServer, running

from calib.errors import InputError
from calib.serving.client import Server, _explanation

CERTIFICATE = Path(__file__).parents[2] / "support" / "self_signed.pem"


@pytest.fixture
def fake():
    return FakeServer()


def refuses(url, *phrases):
    with pytest.raises(InputError) as found:
        Server(url).choose_model(None)
    for phrase in phrases:
        assert phrase in str(found.value)
    return str(found.value)


@pytest.mark.parametrize(
    ("url", "phrase"),
    [
        ("http://no.such.host.invalid", "no answer from http://no.such.host.invalid/v1/models"),
        ("http://127.0.0.1:70000", "--served is not a URL"),
        ("127.0.0.1:8000", "--served takes http or https"),
        ("ftp://host", "http or https"),
        ("http://", "http or https"),
        (f"http://me:{SECRET}@host", "FP8KV_API_KEY"),
        (f"http://host/v1?key={SECRET}", "FP8KV_API_KEY"),
        ("http://ho st", "is it running?"),
        (f"http://{'a' * 64}.example", "no host has this name; is it running?"),
        ("http://127.0.0.1:9/ü", "Connection refused; is it running?"),
    ],
)
def test_no_server_there(url, phrase):
    said = refuses(url, phrase, "such as http://localhost:8000")
    assert "\n" not in said
    assert SECRET not in said


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_an_address_may_end_in_v1(ending, fake):
    with running(fake) as url:
        assert Server(url + ending).choose_model(None).id == "m"


def test_https_where_http_is_spoken(fake):
    with running(fake) as url:
        said = refuses(url.replace("http", "https"), "it gives no answer in TLS; does it take http://?")
    assert "is it running" not in said


def test_certificates_are_checked(fake, monkeypatch):
    """That of this server, for localhost, is signed by itself."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    with running(fake, context) as url:
        by_number = url.replace("http", "https")
        by_name = by_number.replace("127.0.0.1", "localhost")
        said = refuses(by_name, "self-signed certificate", "; give the host that it names", "SSL_CERT_FILE")
        assert "is it running" not in said
        monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
        assert Server(by_name).choose_model(None).id == "m"
        refuses(by_number, "certificate is not valid for '127.0.0.1'", "give the host that it names")


def test_no_proxy_sees_the_key(fake, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("FP8KV_API_KEY", SECRET)
    with running(fake) as url:
        Server(url).choose_model(None)
    assert [headers["Authorization"] for headers in fake.headers] == [f"Bearer {SECRET}"]


@contextmanager
def listening(answer):
    """Something that answers one connection; yields its URL."""

    def accept(server):
        with server.accept()[0] as connection, suppress(OSError):  # the client has gone
            answer(connection)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, args=[server], daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def speak_ssh(connection):
    connection.recv(4096)
    connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")


@pytest.mark.parametrize("answer", [speak_ssh, lambda connection: None], ids=["other words", "hangs up"])
def test_something_that_speaks_no_http_is_running(answer):
    with listening(answer) as url:
        said = refuses(url, "it hung up, or gives no answer in HTTP; does it take http or https? see its log")
    assert "is it running" not in said


def test_a_server_that_never_ends_its_headers(monkeypatch):
    monkeypatch.setattr("calib.serving.client.MAX_SECONDS", 0.6)

    def drip(connection):
        connection.sendall(b"HTTP/1.1 200 OK\r\nx: ")
        while True:
            connection.sendall(b"y")
            time.sleep(0.2)

    start = time.monotonic()
    with listening(drip) as url:
        refuses(url, "took more than the 0.6 s")
    assert time.monotonic() - start < 3


def test_a_name_that_is_looked_up_for_long(monkeypatch):
    monkeypatch.setattr("calib.serving.client.MAX_SECONDS", 0.5)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: time.sleep(4))
    before, start = {*threading.enumerate()}, time.monotonic()
    refuses("http://slow.example", "took more than the 0.5 s that there are for all requests")
    assert time.monotonic() - start < 3
    # Python waits for all other threads when it ends
    assert all(thread.daemon for thread in {*threading.enumerate()} - before)


def test_causes_that_form_a_circle():
    error, cause = OSError(5, "Input/output error"), ConnectionRefusedError()
    error.__cause__, cause.__context__ = cause, error
    assert _explanation(error).startswith("Connection refused; is it running?")
