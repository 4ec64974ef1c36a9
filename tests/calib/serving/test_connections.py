"""`fp8kv verify --served`: addresses that are none, and what is there instead of a server."""

import socket
import ssl
import threading

import pytest
from command_line import fp8kv, one_line_error
from fake_server import SECRET, running

from calib.errors import InputError
from calib.serving.server import Server


@pytest.mark.parametrize(
    ("url", "phrase"),
    [
        ("http://127.0.0.1:9", "Connection refused; is it running?"),
        ("http://no.such.host.invalid", "no answer from http://no.such.host.invalid/v1/models"),
        ("http://127.0.0.1:70000", "is no URL"),
        ("127.0.0.1:8000", "http or https"),
        ("ftp://host", "http or https"),
        ("http://", "http or https"),
        (f"http://me:{SECRET}@host", "FP8KV_API_KEY"),
        (f"http://host/v1?key={SECRET}", "FP8KV_API_KEY"),
        ("http://ho st", "is no URL"),
        (f"http://{'a' * 64}.example", "is no URL"),
        ("http://127.0.0.1:9/ü", "is no URL"),
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


def test_a_certificate_that_is_not_trusted(directory, monkeypatch):
    def connect(_):
        raise ssl.SSLCertVerificationError(1, "certificate verify failed: self-signed certificate")

    monkeypatch.setattr("http.client.HTTPSConnection.connect", connect)
    done = fp8kv("verify", directory, "--served", "https://localhost:8000")
    one_line_error(done, "self-signed certificate", "the host that it names", "SSL_CERT_FILE")
    assert "is it running" not in done.stderr


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
    one_line_error(done, "no answer in HTTP")
    assert "is it running" not in done.stderr


def test_a_server_that_hangs_up_is_running():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        hang_up = lambda: listening.accept()[0].close()  # noqa: E731
        threading.Thread(target=hang_up, daemon=True).start()
        server = Server(f"http://127.0.0.1:{listening.getsockname()[1]}")
        with pytest.raises(InputError, match="it hung up; does it take http or https") as found:
            server.choose_model(None)
    assert "is it running" not in str(found.value)


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_addresses(ending, fake, directory):
    with running(fake) as url:
        assert fp8kv("verify", directory, "--served", url + ending).exit_code == 0
