"""An OpenAI-compatible server in a thread, which answers from a model of transformers."""

import json
import sys
import threading
import time
import traceback
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from command_line import fp8kv
from transformers import AutoModelForCausalLM

from calib.capture.directory_scales import open_scales
from calib.generate import unit_scales
from fp8kv_runtime.hf import fp8_attention

SECRET = "sk-very-secret"


@contextmanager
def web_server(reply, tls=None):
    """Serve, with TLS where there is a context of it; yields the URL. `reply` calls `request.answer`."""

    class Request(BaseHTTPRequestHandler):
        def do_GET(self):
            reply(self, self.rfile.read(int(self.headers.get("Content-Length", 0))))

        do_HEAD = do_POST = do_GET

        def answer(self, status, content, headers=None, *, seconds_a_byte=0):
            self.send_response(status)
            for name, value in {"Content-Length": len(content), **(headers or {})}.items():
                if value is not None:
                    self.send_header(name, str(value))
            self.end_headers()
            step = 1 if seconds_a_byte else max(1, len(content))
            for start in range(0, len(content) if self.command != "HEAD" else 0, step):
                self.wfile.write(content[start : start + step])
                time.sleep(seconds_a_byte)

        def log_message(self, *args):
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *args):
            if not isinstance(sys.exc_info()[1], OSError):  # the client has gone
                traceback.print_exc(file=sys.__stderr__)  # not into what a command says in another thread

    with Server(("127.0.0.1", 0), Request) as server:
        if tls:
            server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class FakeServer:
    """Answers as vLLM does, without a model as if all tokens were as likely; tests make it wrong."""

    def __init__(self, model=None, scales=None):
        self.model, self.scales = model, scales
        self.requests, self.headers = [], []
        self.models = [{"id": "m", "root": "/m", "max_model_len": 129}]
        self.prompt_logprobs = "given"  # ignored, refused
        self.in_force = None  # what our plugin says of scales
        self.change = lambda path, answer: answer  # returns (status, bytes) or an answer
        self.wait, self.noise, self.drip = (lambda number: None), 0.0, 0.0  # seconds for each byte

    def answer(self, path, body):
        self.requests.append((path, body))
        self.wait(len(self.requests))
        if path == "/v1/fp8kv/scales" and self.in_force:
            return self.change(path, {"server": str(id(self))} | self.in_force)
        if path not in ("/v1/models", "/v1/completions"):
            return 404, b""
        if path.endswith("/models"):
            return self.change(path, {"data": self.models})
        if "prompt_logprobs" in body and self.prompt_logprobs == "refused":
            return 400, b"extra fields not permitted"
        return self.change(path, self.complete(body))

    @torch.inference_mode()
    def complete(self, body):
        ids, logits = torch.tensor([body["prompt"]]), torch.zeros(len(body["prompt"]), 128)
        with fp8_attention(self.model, self.scales, backend="torch") if self.scales else nullcontext():
            if self.model:
                logits = self.model(input_ids=ids).logits[0].float()
        logprobs = (logits + self.noise * torch.randn_like(logits)).log_softmax(-1)
        choice = {"text": " x", "logprobs": {"tokens": ["x"], "token_logprobs": [logprobs[-1].max().item()]}}
        if "prompt_logprobs" in body and self.prompt_logprobs == "given":
            pairs = zip(body["prompt"][1:], logprobs, strict=False)
            given = [{str(i): {"logprob": row[i].item(), "rank": 1}} for i, row in pairs]
            choice["prompt_logprobs"] = [None, *given]
        return {"choices": [choice], "usage": {"prompt_tokens": len(body["prompt"])}}


def running(fake, tls=None):
    def reply(request, body):
        answer = fake.answer(request.path, json.loads(body) if body else None)
        fake.headers.append(dict(request.headers))
        status, content = answer if isinstance(answer, tuple) else (200, answer)
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        request.answer(status, content, seconds_a_byte=fake.drip)

    return web_server(reply, tls)


def serving(made, name, scales):
    model = AutoModelForCausalLM.from_pretrained(made / name).eval()
    opened = {"1.0": unit_scales, "scales": open_scales(made / f"{name}-fp8kv")}.get(scales)
    return FakeServer(model, opened and opened(model))  # of 16 bits none


def verify(fake, directory, *flags):
    with running(fake) as url:
        return fp8kv("verify", directory, "--served", url, *flags)


def facts(done):
    assert done.exit_code in (0, 1), done.stderr
    return json.loads(done.stdout)
