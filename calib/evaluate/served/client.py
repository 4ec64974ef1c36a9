"""A running OpenAI-compatible server, asked for logprobs within a deadline.

Prompts and keys are neither shown nor logged; of an answer, only the names of models are shown.
"""

import multiprocessing
import os
import ssl
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import nan
from multiprocessing.pool import ThreadPool
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

from pydantic import AliasPath, BaseModel, Field, FiniteFloat, NonNegativeInt, ValidationError

from calib.engines.loaded_scales import compare_stored, layers_of_files
from calib.engines.outcome import Place
from calib.errors import Fp8kvError, InputError
from calib.evaluate.served.watch_report import Watched
from calib.files.stored_scales import StoredScales, Values
from calib.files.text import show_layers

try:  # the Hub library's own HTTP library
    from huggingface_hub.utils import httpx
except ImportError:  # before version 2
    import httpx  # type: ignore[import-not-found, no-redef, unused-ignore]

MAX_SECONDS = 120.0
_MAX_BYTES = 64 * 2**20
_KEY, _OPENAI_KEY = "FP8KV_API_KEY", "OPENAI_API_KEY"
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
_EXAMPLE = "give the address of an OpenAI-compatible server, such as http://localhost:8000"

Logprob = Annotated[FiniteFloat, Field(le=0.001)]  # a little more than 0 is rounding
_Expected = TypeVar("_Expected", bound=BaseModel)


class _Answer(BaseModel, strict=True):
    """An answer of the server; a string does not stand for a number."""


class _TokenLogprob(_Answer):
    logprob: Logprob


class _Completion(_Answer):
    prompt: list[dict[int, _TokenLogprob] | None] | None = Field(
        None, validation_alias=AliasPath("choices", 0, "prompt_logprobs")
    )
    generated: Logprob | None = Field(
        None, validation_alias=AliasPath("choices", 0, "logprobs", "token_logprobs", 0)
    )
    tokens: int | None = Field(None, validation_alias=AliasPath("usage", "prompt_tokens"))


class ServedModel(_Answer):
    """A model that a server lists."""

    id: str
    root: str | None = None  # vLLM: where its files are
    max_model_len: NonNegativeInt | None = None


class _ServedLayer(_Answer):
    layer: NonNegativeInt
    cache: str
    k: list[float | None]  # None: not a number
    v: list[float | None]


class ServedScales(_Answer):
    """The scales in force, as our plugin in a server tells them; see `calib.serving.endpoint`."""

    in_use: NonNegativeInt
    total: NonNegativeInt
    fingerprint: str = Field(max_length=32, pattern="[0-9a-f]*")
    problems: list[str]
    fnuz: bool
    server: str = Field(exclude=True)  # a random number of its engine
    layers: list[_ServedLayer] = Field(exclude=True)
    notes: list[str] = Field([], exclude=True)

    def differences(self, scales: StoredScales) -> list[str]:
        """Say in which layers a server does not use a directory's scales."""
        stored: dict[int, tuple[str, Values, Values]] = {}
        for layer in self.layers:
            k, v = (tuple(nan if x is None else x for x in values) for values in (layer.k, layer.v))
            stored[layer.layer] = layer.cache, k, v
        wrong = compare_stored(stored, layers_of_files(scales, stored), Place(fnuz=self.fnuz))
        where = f"does not use the scales of '{scales.directory.path}' in {show_layers(wrong)}"
        return [f"it {where}; if it was started on another directory, give that"] if wrong else []

    def reductions(self, scales: StoredScales) -> list[str]:
        """Say in which layers a server has one value for heads that differ in a directory."""
        files, letters = layers_of_files(scales), ("k", "v")
        reduced = [
            layer.layer
            for layer in self.layers
            if (file := files.get(layer.layer))
            and any(is_reduced(file.values(x), len(getattr(layer, x))) for x in letters)
        ]
        compared = f"was compared with the largest of the heads in '{scales.directory.path}'"
        return [f"one scale of several heads {compared}, in {show_layers(reduced)}"] if reduced else []


def is_reduced(values: Values, count: int) -> bool:
    """Return whether `count` values of a server stand for heads whose `values` differ."""
    size = len(values) // count if count else 0
    return size > 1 and any(len({*values[i : i + size]}) > 1 for i in range(0, len(values), size))


class _ModelList(_Answer):
    data: list[ServedModel]


class _SlowServerError(InputError):
    """The deadline has passed."""


class _UnknownPathError(InputError):
    """The server has no such path."""


class _RefusedRequestError(InputError):
    """The server does not take a request as it is."""


@dataclass(frozen=True)
class Answers:
    """The logprobs of every prompt, asked for twice."""

    prompts: list[list[int]]
    of_prompt: bool  # of the tokens of the prompts; else of the likeliest token after each
    first: list[list[float]]
    again: list[list[float]]
    requests: int
    seconds: float


class Server:
    """A server at `url`; it has 120 seconds for all its answers together. Other URLs are refused."""

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            _ = parts.port  # raises where it is not a port
        except ValueError:
            raise InputError(f"--served is not a URL; {_EXAMPLE}") from None
        has_extras = parts.username or parts.password or parts.query or parts.fragment
        if parts.scheme not in ("http", "https") or not parts.hostname or has_extras:
            raise InputError(
                f"--served takes http or https, a host, a port and a path, and a key from {_KEY}; {_EXAMPLE}"
            )
        path = parts.path.rstrip("/").removesuffix("/v1")
        self._url = f"{parts.scheme}://{parts.netloc}{path}"
        self.is_local = parts.hostname in (*_LOCAL_HOSTS, "0.0.0.0")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        self.address = "localhost" if self.is_local else parts.hostname, port, path  # one for each server
        name, key = _key(parts.scheme == "https" or parts.hostname in _LOCAL_HOSTS)
        self._headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._key_advice = f"it refuses the key in {name}" if key else f"give its key in {_KEY}"
        self._start, self._requests = 0.0, 0

    def choose_model(self, name: str | None) -> ServedModel:
        """Start the clock. Return the served model of that name; without one, the only model, or refuse."""
        self._start = time.monotonic()
        models = self._send("models", None, _ModelList).data
        candidates = [model for model in models if name in (None, model.id)]
        if len({model.root or model.id for model in candidates}) == 1:
            return candidates[0]
        if not models:
            raise InputError(f"{self._url} serves no model; load one there, or {_EXAMPLE}")
        problem = f"no model {name!r:.80}" if name else f"{len(models)} models"
        names = ", ".join(f"{model.id!r:.80}" for model in models[:8])
        raise InputError(f"{self._url} serves {problem}; give --served-name, one of: {names}")

    def scales(self, files: StoredScales | None) -> ServedScales:
        """Start the clock. Return what the server's plugin says of its scales, and how `files` differ."""
        advice = "serve with vLLM 0.32 or newer and VLLM_PLUGINS=fp8kv, with fp8kv installed there"
        scales = self._ask_plugin("scales", ServedScales, f"does not say which scales it uses; {advice}")
        # what the plugin calls the files are those that the server was started on
        scales.problems = [problem.replace("the files", "the server's files") for problem in scales.problems]
        scales.problems += scales.differences(files) if files else []
        scales.notes = scales.reductions(files) if files else []
        return scales

    def watched(self) -> Watched:
        """Start the clock. Return what the plugin in the server has seen in its cache."""
        advice = "serve with vLLM 0.32 or newer, VLLM_PLUGINS=fp8kv and FP8KV_WATCH=DIR"
        return self._ask_plugin("watch", Watched, f"does not watch its cache; {advice}")

    def _ask_plugin(self, path: str, answer_type: type[_Expected], advice: str) -> _Expected:
        self._start = time.monotonic()
        try:
            return self._send(f"fp8kv/{path}", None, answer_type)
        except _UnknownPathError:
            raise InputError(f"{self._url} {advice}") from None

    def ask(self, model: str, texts: Sequence[list[int]], weights: str) -> Answers:
        """Ask for each text, of the tokens of `weights`, twice; for fewer, but two, where time runs out."""
        try:
            of_prompt = self._complete(model, texts[0], True).prompt is not None
        except _RefusedRequestError:  # perhaps of a field that it does not know
            of_prompt = False
        # without them an answer has one logprob instead of one a token: so three parts of each text
        parts = [ids[: max(1, len(ids) // n)] for ids in texts for n in (4, 2, 1)]
        prompts, pairs = [*texts] if of_prompt else parts, []
        try:
            for ids in prompts:
                pairs.append([self._logprobs(model, ids, of_prompt) for _ in range(2)])
        except _SlowServerError:
            if len(pairs) < 2:
                raise
        except _RefusedRequestError:
            with suppress(_RefusedRequestError):
                self._complete(model, [0] * len(ids), of_prompt)
                raise InputError(
                    f"{self._url} serves another model: {model!r:.80} refuses token ids of '{weights}'; give "
                    "the directory and the scales of the model that it serves"
                ) from None
            raise
        first, again = ([pair[i] for pair in pairs] for i in range(2))
        seconds = time.monotonic() - self._start
        return Answers(prompts[: len(pairs)], of_prompt, first, again, self._requests, seconds)

    def _logprobs(self, model: str, ids: list[int], of_prompt: bool) -> list[float]:
        answer = self._complete(model, ids, of_prompt)
        if of_prompt:
            rows = zip(ids[1:], (answer.prompt or [])[1:], strict=False)
            logprobs = [row[token].logprob for token, row in rows if row and token in row]
            self._check_count(len(logprobs) + 1, len(ids))
            return logprobs
        if answer.generated is None:
            raise InputError(
                f"{self._url} gives no logprobs, of prompts or of generated tokens, so nothing can be "
                "compared; allow them where the server is started, or use `fp8kv stress`"
            )
        return [answer.generated]

    def _complete(self, model: str, ids: list[int], of_prompt: bool) -> _Completion:
        body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0, "logprobs": 1}
        body |= {"prompt_logprobs": 0} if of_prompt else {}
        answer = self._send("completions", body, _Completion)
        self._check_count(len(ids) if answer.tokens is None else answer.tokens, len(ids))
        return answer

    def _check_count(self, count: int, expected: int) -> None:
        if count != expected:
            raise InputError(
                f"{self._url} read {count} tokens where {expected} were sent, or other ones: it has "
                "another tokeniser; give --model the directory that it serves"
            )

    def _send(self, path: str, body: dict[str, Any] | None, answer_type: type[_Expected]) -> _Expected:
        url, time_left = f"{self._url}/v1/{path}", max(0.01, self._start + MAX_SECONDS - time.monotonic())
        self._requests += 1
        try:
            # nothing stops a thread that looks a name up: it is a daemon, so no exit waits for it
            with ThreadPool(1) as pool:
                status, content = pool.apply_async(self._receive, (url, body, time_left)).get(time_left)
        except (multiprocessing.TimeoutError, httpx.TimeoutException):
            raise _SlowServerError(
                f"{url} took more than the {MAX_SECONDS:g} s that there are for all requests; "
                "try again while the server has nothing else to do"
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            raise InputError(f"no answer from {url}: {_explanation(error)}") from None
        if status != 200:
            raise self._refusal(status, url, is_prompt=body is not None)
        try:
            return answer_type.model_validate_json(content)
        except ValidationError:
            problem = f"{url} answers something else than expected"
            if b'"fingerprint"' in content:
                raise Fp8kvError(f"{problem}; install the same fp8kv there as here") from None
            raise InputError(f"{problem}; {_EXAMPLE}") from None

    def _receive(self, url: str, body: dict[str, Any] | None, seconds: float) -> tuple[int, bytearray]:
        """Return the status and the content, not decompressed, of an answer of 64 MiB at most."""
        content, method, end = bytearray(), "GET" if body is None else "POST", time.monotonic() + seconds
        # a proxy of the environment would see the key; the system's certificates are trusted
        options = {"trust_env": False, "verify": ssl.create_default_context(), "timeout": seconds}
        with (
            httpx.Client(**options) as client,
            client.stream(method, url, json=body, headers=self._headers) as response,
        ):
            for chunk in response.iter_raw():
                content += chunk
                if time.monotonic() > end:  # nobody waits any more
                    raise httpx.ReadTimeout(url)
                if len(content) > _MAX_BYTES:
                    break
            return response.status_code, content

    def _refusal(self, status: int, url: str, *, is_prompt: bool) -> InputError:
        problem = f"{url} answers HTTP {status}"
        if status in (401, 403):
            return InputError(f"{problem}; {self._key_advice}")
        if status == 404 and not is_prompt:
            return _UnknownPathError(f"{problem}; see the server's log, or {_EXAMPLE}")
        if status == 425 and url.endswith("/fp8kv/watch"):
            return InputError(
                f"{self._url} has counted nothing: it has read no text yet, or does not watch such a cache, "
                "as its log says then"
            )
        if status in (400, 422) and is_prompt:
            return _RefusedRequestError(
                f"{problem} to token ids as a prompt, with logprobs; serve with an engine that takes "
                "them, such as vLLM, or use `fp8kv stress`"
            )
        return InputError(f"{problem}; see the server's log, or {_EXAMPLE}")


def open_servers(urls: Sequence[str]) -> dict[str, Server]:
    """Return the servers at several addresses; an InputError where two are one."""
    servers: dict[str, Server] = {}
    for url in urls:
        server = Server(url)
        for first, first_server in servers.items():
            if first_server.address == server.address:
                raise InputError(f"--served {first} and {url} are one server; give each server once")
        servers[url] = server
    return servers


def _explanation(error: BaseException) -> str:
    """Return the first cause of `error`, and what to do."""
    visited = {id(error)}  # causes can form a circle
    while (cause := error.__cause__ or error.__context__) and id(cause) not in visited:
        visited.add(id(cause))
        error = cause
    reason = getattr(error, "strerror", None) or type(error).__name__
    if isinstance(error, ConnectionRefusedError):
        reason = "Connection refused"
    if isinstance(error, UnicodeError):  # of a name that is too long to look up
        reason = "no host has this name"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{reason}; give the host that it names, or the certificates to trust in SSL_CERT_FILE"
    if isinstance(error, ssl.SSLError):
        return f"{reason}; it gives no answer in TLS; does it take http://?"
    is_cut_off = isinstance(error, ConnectionResetError | BrokenPipeError)
    if isinstance(error, OSError | UnicodeError) and not is_cut_off:
        return f"{reason}; is it running? {_EXAMPLE}"
    return "it hung up, or gives no answer in HTTP; does it take http or https? see its log"


def _key(is_private: bool) -> tuple[str, str]:
    """Return the variable that holds the key, and the key; OpenAI's own never goes out in the clear."""
    names = (_KEY, _OPENAI_KEY) if is_private else (_KEY,)
    name = next((name for name in names if os.environ.get(name)), _KEY)
    key = os.environ.get(name, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise InputError(f"{name} holds characters that no key has; set it again")
    return name, key
