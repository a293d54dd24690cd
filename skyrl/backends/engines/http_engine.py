"""`Engine` over HTTP, for vLLM's OpenAI server (0.20 and later) and compatible servers.

Every sampling option is sent explicitly (EOS, filters, penalties): `--generation-config` would fill in missing ones,
and vLLM's stopping rules differ from ours. Adapters are never loaded in place: vLLM 0.32 rereads such an adapter from
disk at each step, and keeps prefix cache entries of its old weights.

`SampleStream` parses a sample from vLLM's completions endpoint, as one response or as a stream of pieces.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np

from skyrl.backends.base_id import base_id
from skyrl.backends.engines.config import EngineOptions
from skyrl.backends.engines.continuation import together
from skyrl.backends.engines.protocol import (
    AdapterMissing,
    Draw,
    Drawn,
    Engine,
    EngineDown,
    EngineFacts,
    EngineFailed,
    OwnAddress,
    Refused,
)
from skyrl.types import Origin, TokenTable

TOKEN = "token_id:"
"""Prefix of token ids used as keys."""


class SampleStream:
    """A sample while it is being received.

    Args:
        draw: The request.
        origin: Weights and engine of the request. In the origins of tokens, the model named by the response replaces
            the requested one.
        pieces: List to which received pieces are appended.
    """

    def __init__(self, draw: Draw, origin: Origin, pieces: list[Drawn]):
        self.origin = origin
        self._draw, self._pieces = draw, pieces
        self._reason: str | None = None
        self._cached = 0

    def read(self, chunk: Any, base: str) -> None:
        """Parse a response or a chunk of one. `base` is the base model's name on the engine.

        Raises `EngineFailed` if the engine reports an error or an abort, or omits requested fields.
        """
        name = self.origin.engine
        if "error" in chunk:
            error = chunk["error"]
            raise EngineFailed(f"{name} has failed at a sample: {error.get('message', error)}")
        details = (chunk.get("usage") or {}).get("prompt_tokens_details") or {}
        self._cached = details.get("cached_tokens") or self._cached
        if not chunk["choices"]:
            return
        choice = chunk["choices"][0]
        self._reason = choice["finish_reason"]
        if self._reason not in (None, "stop", "length"):
            raise EngineFailed(f"{name} has given a sample up ({self._reason})")
        tokens, told = choice.get("token_ids"), choice.get("logprobs")
        if not tokens and self._reason is not None and self._pieces:
            return
        if tokens is None or told is None or len(told["token_logprobs"]) != len(tokens):
            raise EngineFailed(
                f"{name} answers without token ids and their log-probabilities; vLLM 0.20 and later has them"
            )
        model = chunk.get("model")
        self._pieces.append(
            Drawn(
                np.asarray(tokens, np.int32),
                np.asarray(told["token_logprobs"], np.float32),
                False,
                _top(told["top_logprobs"], self._draw.top) if self._draw.top else None,
                origins=(Origin(0, None if model == base else model, self.origin.base, name),),
            )
        )

    def drawn(self) -> Drawn:
        """The whole sample. Raises `EngineDown` if the stream ended early."""
        if self._reason is None or not self._pieces:
            raise EngineDown(f"{self.origin.engine} has ended a stream in the middle of a sample")
        whole = together(self._pieces)
        return Drawn(whole.tokens, whole.logprobs, self._reason == "stop", whole.top, self._cached, whole.origins)


def _top(places: list[dict[str, float]], count: int) -> TokenTable:
    """The `count` most likely tokens at each position, and their log-probabilities, `[positions, count]`.

    vLLM may report the sampled token in addition; it is left out unless it is one of the most likely tokens.
    """
    ids, logprobs = np.zeros((len(places), count), np.int32), np.zeros((len(places), count), np.float32)
    for row, place in enumerate(places):
        told = sorted((-logprob, int(token.removeprefix(TOKEN))) for token, logprob in place.items())[:count]
        ids[row], logprobs[row] = [token for _, token in told], [-logprob for logprob, _ in told]
    return ids, logprobs


LONGEST_MESSAGE = 500
IDLE_S = 2.0
"""Seconds after which an idle connection is not reused. Servers such as uvicorn close them after 5 seconds."""
UNCHANGED, UNFINISHED = "default", "unfinished"
"""Weight versions of vLLM: its initial value, and our marker while weights are being replaced."""
REFUSED = (400, 413, 422)
"""Status codes of errors that are the request's fault."""


class HttpEngine(Engine):
    """An engine at a URL.

    Args:
        name: Name for messages. It is also the URL if `own` is None.
        options: Key, limits and timeouts.
        own: Returns the present address of an engine that was launched here. It changes when the engine is restarted,
            and replaces the key in `options`, which is sent only if the engine belongs to this user.
    """

    def __init__(self, name: str, options: EngineOptions, own: Callable[[], OwnAddress] | None = None):
        self.name = name
        self._own = own
        self._url = self._address()
        self.max_requests, self.max_loras = options.max_requests, options.max_loras
        self.max_logprobs = options.max_logprobs
        self._options = options
        self._base: str | None = None
        self._fingerprint: str | None = None
        """Fingerprint of the server's configuration, reported in responses. A different one means another server."""
        self._streams = 0
        """Number of samples that are being streamed."""
        self._heard = 0.0
        """Time of the last chunk of any sample, or of the start of the first stream, on the loop's clock."""
        self._client = httpx.AsyncClient(
            base_url=self._url,
            headers=_authorization(options.key),
            event_hooks={"request": [] if own is None else [_only_to_this_user]},
            timeout=httpx.Timeout(None, connect=options.connect_timeout_s),
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=options.max_requests + 8, keepalive_expiry=IDLE_S
            ),
            trust_env=False,  # engines in the cluster are not behind an outbound proxy
        )

    async def facts(self) -> EngineFacts:
        self._base, self._fingerprint, self.base_id = None, None, ""
        if self._own is not None:
            self._url, key = self._own()
            self._client.base_url = self._url
            self._client.headers.update(_authorization(key))
        served = (await self._call("GET", "/v1/models", self._options.timeout_s))["data"]
        version = (await self._call("GET", "/version", self._options.timeout_s))["version"]
        base = next((card for card in served if card.get("parent") is None), None)
        if base is None:
            raise EngineFailed(f"{self.name} names no base model in /v1/models")
        self._base = base["id"]
        adapters = {card["id"]: card["root"] for card in served if card.get("parent") is not None}
        return EngineFacts(base["id"], base.get("root") or base["id"], base["max_model_len"], version, adapters)

    def _address(self) -> str:
        return self.name if self._own is None else self._own().url

    async def health(self) -> None:
        await self._call("GET", "/health", self._options.connect_timeout_s)
        silent_s = asyncio.get_running_loop().time() - self._heard
        if self._streams and silent_s > self._options.timeout_s:
            raise EngineDown(
                f"{self.name} answers, but has sent no token of {self._streams} samples for {silent_s:.0f} s "
                f"(timeout_s={self._options.timeout_s:g})"
            )

    async def generate(self, draw: Draw, pieces: list[Drawn] | None = None) -> Drawn:
        assert self._base is not None, self.name
        limit_s = self._options.timeout_s + draw.max_tokens * self._options.token_timeout_s
        body = _body(draw) | {"model": draw.adapter or self._base}
        if self._options.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        reading = SampleStream(draw, Origin(0, draw.adapter, self.base_id, self.name), [] if pieces is None else pieces)
        path = "/v1/completions"
        async with (
            self._streaming() if self._options.stream else nullcontext(),
            self._talking(path, limit_s),
            self._client.stream("POST", path, json=body) as answer,
        ):
            if not answer.is_success:
                await answer.aread()
                raise self._failure(path, answer)
            async for chunk in _chunks(answer):
                self._heard = asyncio.get_running_loop().time()
                self._check_server(chunk.get("system_fingerprint"), reading.origin.base)
                reading.read(chunk, self._base)
        return reading.drawn()

    @asynccontextmanager
    async def _streaming(self) -> AsyncIterator[None]:
        """Count a sample that is being streamed, for `health`.

        A sample may wait for the engine's memory, before its first token or later, so the engine counts as hung only if
        no sample receives tokens.
        """
        if not self._streams:
            self._heard = asyncio.get_running_loop().time()
        self._streams += 1
        try:
            yield
        finally:
            self._streams -= 1

    def _check_server(self, fingerprint: str | None, base_id: str) -> None:
        """Raise if the server was restarted or its base weights were replaced while it generated."""
        if fingerprint is not None and self._fingerprint not in (None, fingerprint):
            raise EngineDown(f"{self.name} was started again: its fingerprint is {fingerprint}")
        self._fingerprint = fingerprint or self._fingerprint
        if self.base_id != base_id:
            raise EngineFailed(f"{self.name} was given other base weights while it drew a sample")

    async def load_adapter(self, name: str, path: str) -> None:
        body = {"lora_name": name, "lora_path": path}
        try:
            await self._call("POST", "/v1/load_lora_adapter", self._options.timeout_s, body=body)
        except AdapterMissing as error:
            raise EngineFailed(
                f"{error}: it does not see {path}, or does not load adapters at run time; mount the folder there at "
                "the same path, and start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
            ) from error
        except Refused as error:
            if "already been loaded" not in str(error):
                raise

    async def unload_adapter(self, name: str) -> None:
        try:
            await self._call("POST", "/v1/unload_lora_adapter", self._options.timeout_s, body={"lora_name": name})
        except AdapterMissing:
            return

    async def update_base(self, path: str) -> None:
        self.base_id = ""
        await self._development("/update_weight_version", body={"new_version": UNFINISHED})
        body = {"method": self._options.reload_method, "kwargs": {"weights_path": path}}
        await self._development("/collective_rpc", body=body)
        await self.reset_prefix_cache()
        given = await asyncio.to_thread(base_id, Path(path))
        await self._development("/update_weight_version", body={"new_version": given})
        self.base_id = given

    async def base_version(self) -> str:
        told = (await self._call("GET", "/weight_info", self._options.timeout_s))["weight_version"]
        return "" if told == UNCHANGED else told

    async def pause(self, mode: Literal["abort", "wait", "keep"]) -> None:
        await self._development("/pause", mode=mode)

    async def resume(self) -> None:
        await self._development("/resume")

    async def sleep(self, level: Literal[1, 2] = 1) -> None:
        await self._development("/sleep", level=level)

    async def wake(self) -> None:
        await self._development("/wake_up")

    async def reset_prefix_cache(self) -> None:
        await self._development("/reset_prefix_cache")

    async def close(self) -> None:
        await self._client.aclose()

    async def _development(self, path: str, body: Any = None, **query: str | int) -> None:
        """Call an endpoint that vLLM serves only with VLLM_SERVER_DEV_MODE=1."""
        try:
            await self._call("POST", path, self._options.timeout_s, query=query, body=body)
        except AdapterMissing as error:
            raise EngineFailed(f"{self.name} does not serve {path}; start it with VLLM_SERVER_DEV_MODE=1") from error

    async def _call(
        self, method: str, path: str, limit_s: float, *, query: Mapping[str, str | int] | None = None, body: Any = None
    ) -> Any:
        """The JSON of the response, or None if it is not JSON."""
        async with self._talking(path, limit_s):
            answer = await self._client.request(method, path, params=query, json=body)
        if answer.is_success:
            return _json(answer)
        raise self._failure(path, answer)

    @asynccontextmanager
    async def _talking(self, path: str, limit_s: float) -> AsyncIterator[None]:
        """Convert transport errors and timeouts to `EngineDown`. An engine whose URL has changed is down too."""
        if self._address() != self._url:
            raise EngineDown(f"{self.name} was started again, at {self._address()}")
        try:
            async with asyncio.timeout(limit_s):
                yield
        except TimeoutError:
            raise EngineDown(f"{self.name} has not answered {path} within {limit_s:g} s") from None
        except (EngineDown, EngineFailed, Refused):
            raise
        except Exception as error:  # of httpx, or of its dependencies if a connection ends at a bad moment
            raise EngineDown(f"{self.name} is unreachable ({path}: {str(error) or type(error).__name__})") from error

    def _failure(self, path: str, answer: httpx.Response) -> Exception:
        """Convert an error response to an exception."""
        if answer.status_code in REFUSED:
            return Refused(_message(answer))  # whose message the client may see
        message = f"{self.name} answers {path} with {answer.status_code}: {_message(answer)}"
        if answer.status_code in (401, 403):
            return EngineFailed(f"{message}; give it the key that it was started with (api_key, or VLLM_API_KEY)")
        if answer.status_code == 404:
            return AdapterMissing(message)
        return EngineDown(message) if answer.status_code == 503 else EngineFailed(message)


def _authorization(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


async def _only_to_this_user(request: httpx.Request) -> None:
    """Have httpcore check each new connection before the request is sent."""

    async def check(event: str, info: Mapping[str, Any]) -> None:
        if event == "connection.connect_tcp.complete":
            stream = info["return_value"]
            port = stream.get_extra_info("server_addr")[1]
            if not await asyncio.to_thread(belongs_to_this_user, port):
                await stream.aclose()
                raise EngineDown(f"port {port} of this machine is not of this user; its engine has ended")

    request.extensions["trace"] = check


async def _chunks(answer: httpx.Response) -> AsyncIterator[Any]:
    """JSON objects of an event stream, or the single JSON object of a plain response."""
    if not answer.headers.get("content-type", "").startswith("text/event-stream"):
        yield json.loads(await answer.aread())
        return
    async for line in answer.aiter_lines():
        data = line.removeprefix("data:").strip()
        if line.startswith("data:") and data != "[DONE]":
            yield json.loads(data)


def _body(draw: Draw) -> dict[str, Any]:
    return vars(draw.options) | {  # options have vLLM's names
        "prompt": draw.prompt.tolist(),
        "max_tokens": draw.max_tokens,
        "seed": draw.seed,
        "temperature": draw.temperature,
        "top_k": draw.top_k,
        "top_p": draw.top_p,
        "stop": list(draw.stop_strings),
        "stop_token_ids": list(draw.stop_ids),
        "ignore_eos": True,
        "logprobs": draw.top,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "skip_special_tokens": False,
        "cache_salt": draw.salt,
    }


def _json(answer: httpx.Response) -> Any:
    return answer.json() if answer.headers.get("content-type", "").startswith("application/json") else None


def _message(answer: httpx.Response) -> str:
    """The engine's error message, from any of the error formats."""
    try:
        error = answer.json()
    except ValueError:
        return answer.text[:LONGEST_MESSAGE]
    inner = error.get("error", error) if isinstance(error, dict) else error
    return str(inner.get("message", inner) if isinstance(inner, dict) else inner)[:LONGEST_MESSAGE]


TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
LISTENS = "0A"
"""State of a listening socket in these tables."""


def belongs_to_this_user(port: int) -> bool:
    """Return True if a program of this user, or of root, listens on a port, and no socket there is of anybody else.

    Call it after connecting, so that it is about the program that has accepted, or will accept, the connection.
    """
    owners: set[int] = set()
    listening = False
    for table in TABLES:
        path = Path(table)
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            _, local, _, state, _, _, _, user, *_ = line.split()
            if int(local.rpartition(":")[2], 16) == port:
                owners.add(int(user))
                listening = listening or state == LISTENS
    return listening and owners <= {os.geteuid(), 0}
