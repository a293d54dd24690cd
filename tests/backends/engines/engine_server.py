"""`PretendEngine` behind vLLM's HTTP protocol, as a process.

`python -m tests.backends.engines.engine_server FD JSON FD`, or `PORT JSON` with its key in VLLM_API_KEY.

What `/fault` sets is what becomes of the samples that follow: die, hang, refuse, reset (the connection), mixed (with
the weights of another adapter, as the answer says), silent (the same, and it does not).
"""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from skyrl.backends.engines.continuation import together
from skyrl.backends.engines.launcher.vllm import RELOAD
from skyrl.backends.engines.protocol import AdapterMissing, Draw, Drawn, EngineDown, EngineFailed, Refused
from skyrl.types import SamplingOptions
from skyrl.utils.processes import die_with_parent
from tests.backends.engines.numpy_models import MarkerModel, NumpyQwen3
from tests.backends.engines.pretend_engine import PretendEngine, Sizes, facts_of

LONGEST = 64
"""Context length of the engine that tests share, in tokens."""
SECRET = "a secret of this test"
ROOT = Path(__file__).parents[3]


class Pieces(list[Drawn]):
    """Pieces of a sample, and news of more."""

    def __init__(self) -> None:
        super().__init__()
        self.more = asyncio.Event()

    def append(self, piece: Drawn) -> None:
        super().append(piece)
        self.more.set()

    async def wait(self) -> None:
        """Wait for more, or for a moment, after which its client may be gone."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.more.wait(), 0.05)
        self.more.clear()


def app_of(engine: PretendEngine, key: str = SECRET) -> FastAPI:
    app = FastAPI()

    @app.middleware("http")
    async def authenticate(request: Request, call: Any) -> Response:
        if request.url.path.startswith("/v1") and request.headers.get("authorization") != f"Bearer {key}":
            return JSONResponse({"error": "Unauthorized"}, 401)
        return await call(request)

    def error(status: int, problem: Exception | str) -> Response:
        return JSONResponse({"error": {"message": str(problem), "type": "", "param": None, "code": status}}, status)

    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.get("/version")
    async def version() -> Any:
        return {"version": "0.0.0"}

    @app.get("/v1/models")
    async def models() -> Any:
        base = {"id": engine.base, "root": engine.base, "parent": None, "max_model_len": engine.sizes.longest}
        adapters = [
            {"id": name, "root": path, "parent": engine.base, "max_model_len": None}
            for name, path in engine.registered.items()
        ]
        return {"object": "list", "data": [base, *adapters]}

    @app.post("/v1/load_lora_adapter")
    async def load(request: Request) -> Response:
        body = await request.json()
        assert not body.get("load_inplace"), "0.32 reads such an adapter again at each step"
        if body["lora_name"] in engine.registered:
            return error(400, f"The lora adapter '{body['lora_name']}' has already been loaded.")
        try:
            await engine.load_adapter(body["lora_name"], body["lora_path"])
        except EngineFailed as problem:
            return error(404 if "No adapter found" in str(problem) else 500, problem)
        return Response("Success")

    @app.post("/v1/unload_lora_adapter")
    async def unload(request: Request) -> Response:
        name = (await request.json())["lora_name"]
        if name not in engine.registered:
            return error(404, f"The lora adapter '{name}' cannot be found.")
        await engine.unload_adapter(name)
        return Response("Success")

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await request.json()
        body = {"stream": False} | body
        draw = _draw(body, engine.base)
        if engine.fault == "reset":
            os._exit(1)
        pieces = Pieces()
        drawing = asyncio.create_task(engine.generate(draw, pieces))
        drawing.add_done_callback(lambda _: pieces.more.set())
        while not drawing.done() and not (pieces and body["stream"]):
            await pieces.wait()
            if engine.dead and not engine.after:  # else a stream ends it, once it has delivered
                os._exit(1)
            if await request.is_disconnected():
                drawing.cancel()
                return Response()
        if not pieces:
            problem = drawing.exception()
            known = [(AdapterMissing, 404), (Refused, 400), (EngineFailed, 500), (EngineDown, 503)]
            return error(next(status for kind, status in known if isinstance(problem, kind)), str(problem))
        if body["stream"]:
            return StreamingResponse(stream(drawing, pieces), media_type="text/event-stream")
        drawn = drawing.result()
        return JSONResponse({**told(drawn, "stop" if drawn.stopped else "length"), "usage": {}})

    def told(drawn: Drawn, reason: str | None) -> dict[str, Any]:
        names = [f"token_id:{token}" for token in drawn.tokens]
        tops = [{name: float(logprob)} for name, logprob in zip(names, drawn.logprobs, strict=True)]
        if drawn.top:
            for place, ids, logprobs in zip(tops, *drawn.top, strict=True):
                place.update({f"token_id:{token}": float(x) for token, x in zip(ids, logprobs, strict=True)})
        logprobs = {"tokens": names, "token_logprobs": drawn.logprobs.tolist(), "top_logprobs": tops, "text_offset": []}
        choice = {"index": 0, "text": "", "logprobs": logprobs, "finish_reason": reason}
        model = (drawn.origins[0].version if drawn.origins else None) or engine.base
        choice["token_ids"] = drawn.tokens.tolist()
        return {"model": model, "choices": [choice], "system_fingerprint": engine.fingerprint}

    async def stream(drawing: "asyncio.Task[Drawn]", pieces: "Pieces") -> AsyncIterator[str]:
        """Events of a sample, with all tokens that have come meanwhile in each."""
        sent = 0
        try:
            while not (drawing.done() and sent == len(pieces)):
                if sent == len(pieces):
                    await pieces.wait()
                if sent < len(pieces):
                    new = together(pieces[sent:])
                    sent = len(pieces)
                    yield f"data: {json.dumps(told(new, None))}\n\n"
                elif engine.dead and (sent or not engine.after):  # clients have what was drawn until then
                    os._exit(1)
            problem = drawing.exception()
            if problem is not None:
                yield f"data: {json.dumps({'error': {'message': str(problem), 'code': 500}})}\n\n"
                return
            nothing = Drawn(np.zeros(0, np.int32), np.zeros(0, np.float32), False, origins=pieces[0].origins)
            yield f"data: {json.dumps(told(nothing, 'stop' if drawing.result().stopped else 'length'))}\n\n"
            yield f"data: {json.dumps({'choices': [], 'usage': {}})}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            drawing.cancel()

    @app.post("/fault")
    async def fault(request: Request) -> Response:
        body = await request.json()
        engine.fault, engine.after = body["fault"], body.get("after", 0)
        return Response()

    @app.post("/anew")
    async def anew(request: Request) -> Response:
        engine.restart()
        engine.fault, engine.after, engine.most_at_once, engine.most_adapters = None, 0, 0, 0
        engine.sizes = Sizes(**await request.json())
        return Response()

    @app.post("/sizes")
    async def sizes(request: Request) -> Response:
        """Change sizes while it runs, which no client is told."""
        engine.sizes = replace(engine.sizes, **await request.json())
        return Response()

    @app.get("/told")
    async def facts() -> Any:
        return facts_of(engine)

    @app.post("/pause")
    async def pause(mode: str) -> None:
        await engine.pause(mode)  # pyright: ignore[reportArgumentType]

    @app.post("/resume")
    async def resume() -> None:
        await engine.resume()

    @app.post("/sleep")
    async def sleep(level: int) -> Response:
        try:
            await engine.sleep(level)  # pyright: ignore[reportArgumentType]
        except EngineFailed as problem:
            return error(500, problem)
        return Response()

    @app.post("/wake_up")
    async def wake() -> None:
        await engine.wake()

    @app.post("/collective_rpc")
    async def call(request: Request) -> None:
        body = await request.json()
        assert body["method"] in ("reload_weights", RELOAD), body
        await engine.reload(body["kwargs"]["weights_path"])

    @app.get("/weight_info")
    async def weight_info() -> Any:
        return {"weight_version": engine.weight_version}

    @app.post("/update_weight_version")
    async def update_weight_version(request: Request) -> None:
        engine.weight_version = (await request.json())["new_version"]

    @app.post("/reset_prefix_cache")
    async def reset() -> Any:
        return {"success": True}

    return app


def _draw(body: dict[str, Any], base: str) -> Draw:
    assert body["ignore_eos"] and body["return_token_ids"] and body["cache_salt"], body
    return Draw(
        prompt=np.asarray(body["prompt"], np.int32),
        adapter=None if body["model"] == base else body["model"],
        max_tokens=body["max_tokens"],
        seed=body["seed"],
        temperature=body["temperature"],
        top_k=body["top_k"],
        top_p=body["top_p"],
        stop_ids=tuple(body["stop_token_ids"]),
        stop_strings=tuple(body["stop"]),
        options=SamplingOptions(min_p=body["min_p"], min_tokens=body["min_tokens"]),
        top=body["logprobs"],
    )


class EngineProcess:
    """A server that can be killed, and started again at its address."""

    def __init__(self, model: Path | None = None, base: str = "base", **sizes: Any):
        self.arguments = {"model": str(model) if model else None, "base": base, "sizes": sizes}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", self.port))
        listening.listen(1024)
        command = [sys.executable, "-m", __spec__.name, str(listening.fileno()), json.dumps(self.arguments)]
        ours, its = socket.socketpair()
        with listening, its:
            command = [*command, str(its.fileno())]
            handles = [listening.fileno(), its.fileno()]
            alone = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # cores are few
            self.process = subprocess.Popen(command, pass_fds=handles, cwd=ROOT, stdin=subprocess.DEVNULL, env=alone)
        self._link = ours

    def tell(self, path: str, **body: Any) -> None:
        httpx.post(f"{self.url}{path}", json=body, timeout=120, trust_env=False).raise_for_status()

    def ask(self, path: str = "/told") -> Any:
        headers = {"Authorization": f"Bearer {SECRET}"}
        return httpx.get(f"{self.url}{path}", headers=headers, timeout=120, trust_env=False).json()

    def anew(self, **sizes: Any) -> "EngineProcess":
        """The same, running, as if it had just been started."""
        if self.process.poll() is not None:
            self.start()
        self.tell("/anew", **self.arguments["sizes"] | sizes)
        return self

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._link.close()


@contextmanager
def engine_process(model: Path | None = None, **options: Any) -> Iterator[EngineProcess]:
    process = EngineProcess(model, **options)
    try:
        yield process
    finally:
        process.kill()


def serve(listening: socket.socket, arguments: dict[str, Any], key: str) -> None:
    model = MarkerModel() if arguments["model"] is None else NumpyQwen3(Path(arguments["model"]))
    engine = PretendEngine("pretend", model, arguments["base"], Sizes(**arguments["sizes"]))
    config = uvicorn.Config(app_of(engine, key), log_level="error", access_log=False)
    asyncio.run(uvicorn.Server(config).serve([listening]))


def main(first: int, arguments: dict[str, Any], link: int | None = None) -> None:
    if link is not None:
        die_with_parent(socket.socket(fileno=link))
        serve(socket.socket(fileno=first), arguments, SECRET)
        return
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1", first))
    serve(listening, arguments, os.environ["VLLM_API_KEY"])


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]), *map(int, sys.argv[3:]))
