"""`fp8kv verify --served`: addresses that lead nowhere, and what is there instead of a server."""

import socket
import ssl
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from command_line import fp8kv, one_line_error
from fake_server import SECRET, running, verify

from calib.errors import InputError
from calib.serving.client import Server, _explanation

CERTIFICATE = Path(__file__).parents[2] / "support" / "self_signed.pem"


@pytest.mark.parametrize(
    ("url", "phrase"),
    [
        ("http://127.0.0.1:9", "Connection refused; is it running?"),
        ("http://no.such.host.invalid", "no answer from http://no.such.host.invalid/v1/models"),
        ("http://127.0.0.1:70000", "is not a URL"),
        ("127.0.0.1:8000", "http or https"),
        ("ftp://host", "http or https"),
        ("http://", "http or https"),
        (f"http://me:{SECRET}@host", "FP8KV_API_KEY"),
        (f"http://host/v1?key={SECRET}", "FP8KV_API_KEY"),
        ("http://ho st", "is it running?"),
        (f"http://{'a' * 64}.example", "no host has this name; is it running?"),
        ("http://127.0.0.1:9/ü", "Connection refused; is it running?"),
    ],
)
def test_no_server_there(url, phrase, directory):
    done = fp8kv("verify", directory, "--served", url)
    one_line_error(done, phrase, "such as http://localhost:8000")
    assert SECRET not in done.output


def test_https_where_http_is_spoken(fake, directory):
    with running(fake) as url:
        done = fp8kv("verify", directory, "--served", url.replace("http", "https"))
    one_line_error(done, "no answer in TLS", "http://")
    assert "is it running" not in done.stderr


@pytest.fixture
def secure(fake):
    """The URL of a server whose certificate, for localhost, is signed by itself."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    with running(fake, context) as url:
        yield url.replace("http", "https").replace("127.0.0.1", "localhost")


def test_a_certificate_that_is_not_trusted(directory, secure):
    done = fp8kv("verify", directory, "--served", secure)
    one_line_error(done, "self-signed certificate", "the host that it names", "SSL_CERT_FILE")
    assert "is it running" not in done.stderr


def test_a_certificate_that_is_trusted(directory, secure, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    assert fp8kv("verify", directory, "--served", secure).exit_code == 0
    done = fp8kv("verify", directory, "--served", secure.replace("localhost", "127.0.0.1"))
    one_line_error(done, "certificate is not valid for '127.0.0.1'", "the host that it names")


def test_no_proxy_sees_the_key(fake, directory, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("FP8KV_API_KEY", SECRET)
    assert verify(fake, directory).exit_code == 0
    assert {headers["Authorization"] for headers in fake.headers} == {f"Bearer {SECRET}"}


def test_something_that_speaks_no_http(directory):
    def answer(listening):
        connection = listening.accept()[0]
        connection.recv(4096)
        connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=answer, args=[listening], daemon=True).start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        done = fp8kv("verify", directory, "--served", url)
    one_line_error(done, "gives no answer in HTTP")
    assert "is it running" not in done.stderr


def test_a_server_that_hangs_up_is_running():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        hang_up = lambda: listening.accept()[0].close()  # noqa: E731
        threading.Thread(target=hang_up, daemon=True).start()
        server = Server(f"http://127.0.0.1:{listening.getsockname()[1]}")
        with pytest.raises(InputError, match="it hung up, or .*; does it take http or https") as found:
            server.choose_model(None)
    assert "is it running" not in str(found.value)


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_addresses(ending, fake, directory):
    with running(fake) as url:
        assert fp8kv("verify", directory, "--served", url + ending).exit_code == 0


def test_a_server_that_never_ends_its_headers(monkeypatch):
    monkeypatch.setattr("calib.serving.client.MAX_SECONDS", 1.0)

    def drip(listening):
        with listening.accept()[0] as connection, suppress(OSError):  # the client has gone
            connection.sendall(b"HTTP/1.1 200 OK\r\nx: ")
            while True:
                connection.sendall(b"y")
                time.sleep(0.2)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=drip, args=[listening], daemon=True).start()
        start = time.monotonic()
        with pytest.raises(InputError, match="took more than the 1 s"):
            Server(f"http://127.0.0.1:{listening.getsockname()[1]}").choose_model(None)
    assert time.monotonic() - start < 3


def test_a_name_that_is_looked_up_for_long(monkeypatch):
    monkeypatch.setattr("calib.serving.client.MAX_SECONDS", 0.5)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: time.sleep(4))
    before, start = {*threading.enumerate()}, time.monotonic()
    with pytest.raises(InputError, match=r"took more than the 0\.5 s that there are for all requests"):
        Server("http://slow.example").choose_model(None)
    assert time.monotonic() - start < 3
    # Python waits for all other threads when it ends
    assert all(thread.daemon for thread in {*threading.enumerate()} - before)


def test_causes_that_form_a_circle():
    error, cause = OSError(5, "Input/output error"), ConnectionRefusedError()
    error.__cause__, cause.__context__ = cause, error
    assert _explanation(error).startswith("Connection refused; is it running?")
