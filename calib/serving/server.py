"""Ask a running OpenAI-compatible server for logprobs, in bounded time.

Prompts and keys are neither shown nor logged; of what comes back, only models' names are.
"""

import http.client
import os
import ssl
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

from pydantic import AliasPath, BaseModel, Field, FiniteFloat, NonNegativeInt, ValidationError

from calib.errors import InputError
from calib.files.strict_json import json_text

MAX_SECONDS = 120.0
_KEY = "FP8KV_API_KEY"
_OPENAI_KEY = "OPENAI_API_KEY"
_HERE = ("localhost", "127.0.0.1", "::1")
_MAX_BYTES = 64 * 2**20
_EXAMPLE = "give the address of an OpenAI-compatible server, such as http://localhost:8000"
# what to do where no answer comes; the first that fits
_ADVICE: dict[Any, str] = {
    ssl.SSLCertVerificationError: (
        "give the host that it names, or the certificates to trust in SSL_CERT_FILE"
    ),
    ssl.SSLError: "it gives no answer in TLS; does it take http://?",
    (ConnectionResetError, BrokenPipeError): "it hung up; does it take http or https? see its log",
    OSError: f"is it running? {_EXAMPLE}",
    (http.client.InvalidURL, ValueError): f"--served is no URL; {_EXAMPLE}",
    http.client.HTTPException: f"it gives no answer in HTTP; {_EXAMPLE}",
}
_CONNECTIONS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}

# a little more than 0 is rounding
_Nats = Annotated[FiniteFloat, Field(le=0.001)]


class _Said(BaseModel, strict=True):
    """What a server says: a number is a number, not a word for one."""


class _Logprob(_Said):
    logprob: _Nats


class _Completion(_Said):
    prompt: list[dict[int, _Logprob] | None] | None = Field(
        None, validation_alias=AliasPath("choices", 0, "prompt_logprobs")
    )
    generated: _Nats | None = Field(
        None, validation_alias=AliasPath("choices", 0, "logprobs", "token_logprobs", 0)
    )
    tokens: int | None = Field(None, validation_alias=AliasPath("usage", "prompt_tokens"))


class ServedModel(_Said):
    """A model that a server lists."""

    id: str
    root: str | None = None  # vLLM: where its files are
    max_model_len: NonNegativeInt | None = None


class _Models(_Said):
    data: list[ServedModel]


Document = TypeVar("Document", bound=_Said)


class _TooSlowError(InputError):
    """No answer in time."""


class _RefusedError(InputError):
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
    """A server at `url`; it has 120 seconds for all its answers together."""

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            self._address = parts.hostname or "", parts.port
        except ValueError:
            raise InputError(f"--served is no URL; {_EXAMPLE}") from None
        is_plain = not (parts.username or parts.password or parts.query or parts.fragment)
        if parts.scheme not in _CONNECTIONS or not parts.hostname or not is_plain:
            raise InputError(
                f"--served takes http or https, a host, a port and a path alone, and a key from "
                f"{_KEY}; {_EXAMPLE}"
            )
        self._connect = _CONNECTIONS[parts.scheme]
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1/"
        self._name = f"{parts.scheme}://{parts.netloc}{self._path}"
        name, key = _key(parts.scheme == "https" or parts.hostname in _HERE)
        self._headers = {"Content-Type": "application/json"}
        self._headers |= {"Authorization": f"Bearer {key}"} if key else {}
        self._unauthorised = f"it refuses the key in {name}" if key else f"give its key in {_KEY}"
        self._start, self._requests = 0.0, 0

    def choose_model(self, name: str | None) -> ServedModel:
        """Start the clock. Return the served model of that name; without one, the only model."""
        self._start = time.monotonic()
        models = self._send("models", None, _Models).data
        named = [model for model in models if name in (None, model.id)]
        if len({model.root or model.id for model in named}) == 1:
            return named[0]
        if not models:
            raise InputError(f"{self._name} serves no model; load one there, or {_EXAMPLE}")
        found = f"no model {name!r:.80}" if name else f"{len(models)} models"
        names = ", ".join(f"{model.id!r:.80}" for model in models[:8])
        raise InputError(f"{self._name} serves {found}; give --served-name, one of: {names}")

    def ask(self, model: str, texts: Sequence[list[int]]) -> Answers:
        """Ask for each text twice; for fewer, but two at least, where time runs out."""
        try:
            of_prompt = self._complete(model, texts[0], True).prompt is not None
        except _RefusedError:  # of a field that it does not know, perhaps
            of_prompt = False
        # one logprob an answer instead of one a token: so three parts of each text
        parts = [ids[: max(1, len(ids) // n)] for ids in texts for n in (4, 2, 1)]
        prompts, pairs = [*texts] if of_prompt else parts, []
        try:
            for ids in prompts:
                pairs.append([self._logprobs(model, ids, of_prompt) for _ in range(2)])
        except _TooSlowError:
            if len(pairs) < 2:
                raise
        first, again = ([pair[i] for pair in pairs] for i in range(2))
        seconds = time.monotonic() - self._start
        return Answers(prompts[: len(pairs)], of_prompt, first, again, self._requests, seconds)

    def _logprobs(self, model: str, ids: list[int], of_prompt: bool) -> list[float]:
        answer = self._complete(model, ids, of_prompt)
        if of_prompt:
            rows = [*zip(ids, answer.prompt or [], strict=False)][1:]
            found = [row[token].logprob for token, row in rows if row and token in row]
            self._check_count(len(found) + 1, len(ids))
            return found
        if answer.generated is None:
            raise InputError(
                f"{self._name} gives no logprobs, of prompts or of generated tokens, so nothing "
                "can be compared; allow them where the server is started, or use `fp8kv stress`"
            )
        return [answer.generated]

    def _complete(self, model: str, ids: list[int], of_prompt: bool) -> _Completion:
        body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0, "logprobs": 1}
        body |= {"prompt_logprobs": 0} if of_prompt else {}
        answer = self._send("completions", body, _Completion)
        self._check_count(len(ids) if answer.tokens is None else answer.tokens, len(ids))
        return answer

    def _check_count(self, found: int, sent: int) -> None:
        if found != sent:
            raise InputError(
                f"{self._name} read {found} tokens where {sent} were sent, or other ones: it has "
                "another tokeniser; give --model the directory that it serves"
            )

    def _send(self, what: str, body: dict[str, Any] | None, expected: type[Document]) -> Document:
        """Ask and check; a thread of its own bounds everything that a server can be slow with."""
        outcome: list[tuple[int, bytes] | Exception] = []
        thread = threading.Thread(target=self._exchange, args=(what, body, outcome), daemon=True)
        self._requests += 1
        thread.start()
        thread.join(self._left)
        got, where = (outcome or [TimeoutError()])[0], self._name + what
        if isinstance(got, TimeoutError):
            raise _TooSlowError(
                f"{where} took more than the {MAX_SECONDS:g} s that there are for all requests; "
                "try again while the server has nothing else to do"
            )
        if isinstance(got, Exception):
            reason = getattr(got, "strerror", None) or type(got).__name__
            advice = next(said for kind, said in _ADVICE.items() if isinstance(got, kind))
            raise InputError(f"no answer from {where}: {reason}; {advice}")
        status, content = got
        self._check_status(status, where, body is not None)
        try:
            return expected.model_validate_json(content)
        except ValidationError:
            raise InputError(f"{where} answers something else than expected; {_EXAMPLE}") from None

    def _exchange(self, what: str, body: dict[str, Any] | None, outcome: list[Any]) -> None:
        content = json_text(body) if body else None
        try:
            with closing(self._connect(*self._address, timeout=self._left)) as connection:
                path, method = self._path + what, "POST" if body else "GET"
                connection.request(method, path, content, self._headers)
                with connection.getresponse() as response:
                    outcome.append((response.status, response.read(_MAX_BYTES)))
        except (OSError, http.client.HTTPException, ValueError) as error:
            outcome.append(error)

    def _check_status(self, status: int, where: str, is_prompt: bool) -> None:
        said = f"{where} answers HTTP {status}"
        if status in (401, 403):
            raise InputError(f"{said}; {self._unauthorised}")
        if status in (400, 422) and is_prompt:
            raise _RefusedError(
                f"{said} to token ids as a prompt, with logprobs; serve with an engine that takes "
                "them, such as vLLM, or use `fp8kv stress`"
            )
        if status != 200:
            raise InputError(f"{said}; see the server's log, or {_EXAMPLE}")

    @property
    def _left(self) -> float:
        return max(0.01, self._start + MAX_SECONDS - time.monotonic())


def _key(is_private: bool) -> tuple[str, str]:
    """The variable that holds the key, and the key; OpenAI's own never goes out in the clear."""
    names = (_KEY, _OPENAI_KEY) if is_private else (_KEY,)
    name = next((name for name in names if os.environ.get(name)), _KEY)
    key = os.environ.get(name, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise InputError(f"{name} holds characters that no key has; set it again")
    return name, key
