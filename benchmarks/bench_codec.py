"""Cost of bodies and results without computation, for a forward_backward of a million tokens, chunked by the SDK.

Run: `python benchmarks/bench_codec.py`. The backend of the server computes nothing (benchmarks/idle.py). Prints one
JSON line per part (processor seconds, measured in this process on the SDK's request bodies), one for the server's
processes while the stock SDK sends them, and one for heartbeats that another process sends in the meantime, which show
how long the event loop is blocked. `codec_s` is the server's processor time plus that of tiles in a real engine, and
`share_at_...` its share of a step at this rate of trained tokens per second.
"""

import argparse
import asyncio
import http.client
import json
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import psutil

from common import API_KEY, emit, peak_flops

RATES = {"tiny, 2 cores": 1_800, "a GPU": 100_000}
"""Trained tokens per second, for comparison."""
PAUSE_S = 0.002
"""Pause between the answer to a heartbeat and the next heartbeat."""


def sequences(tokens: int, length: int) -> list:
    """Data with this many tokens, in sequences of one length."""
    import tinker

    draws = np.random.default_rng(0)
    data = []
    for _ in range(tokens // length):
        ids = draws.integers(100, 500, length + 1)
        inputs = {"target_tokens": ids[1:], "weights": np.ones(length, np.float32)}
        data.append(tinker.Datum(model_input=tinker.ModelInput.from_ints(ids[:-1].tolist()), loss_fn_inputs=inputs))
    return data


@contextmanager
def idle_server() -> Iterator:
    """Run a server whose backend computes nothing."""
    from skyrl.tinker.local_server import LocalServer

    root = str(Path(__file__).parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    with (
        tempfile.TemporaryDirectory(prefix="skyrl-bench-") as scratch,
        LocalServer(Path(scratch), "idle", {"backend": "benchmarks.idle:IdleBackend"}) as server,
    ):
        yield server


# -- part by part -----------------------------------------------------------------------------------------------------


def bodies_of(trainer, data: list) -> list[bytes]:
    """Request bodies as the SDK chunks and encodes them."""
    from tinker import types
    from tinker.proto.request_conv import forward_backward_request_to_proto

    bodies = []
    for number, chunk in enumerate(trainer._chunked_requests_generator(data), 1):
        given = types.ForwardBackwardInput(data=chunk.data, loss_fn="cross_entropy")
        request = types.ForwardBackwardRequest(forward_backward_input=given, model_id=trainer.model_id, seq_id=number)
        bodies.append(forward_backward_request_to_proto(request).SerializeToString())
    return bodies


def parts(bodies: list[bytes], folder: Path) -> dict[str, float]:
    """Processor seconds of each processing step, over all bodies. `folder` is for a database."""
    from skyrl.algorithms.checks.requests import check_pass
    from skyrl.backends.common.packing import TileShape, make_tiles
    from skyrl.backends.operations import ForwardBackward
    from skyrl.tinker.database.database import Database
    from skyrl.tinker.database.log import request_log
    from skyrl.tinker.database.log.log_writer import compressed
    from skyrl.tinker.processes.frames import decode, encode
    from skyrl.tinker.processes.messages import Done, Enqueue
    from skyrl.tinker.results import PROTOBUF, Answer
    from skyrl.tinker.wire import codec
    from skyrl.types import ForwardBackwardOutput

    seconds: dict[str, float] = {}

    def measured(part: str, function: Callable):
        start = time.process_time()
        result = function()
        seconds[part] = seconds.get(part, 0.0) + time.process_time() - start
        return result

    def received(pieces: list) -> list[bytes]:
        header = 8 * (1 + len(pieces))
        return [pieces[0][header:], *map(bytes, pieces[1:])]

    with closing(Database(f"sqlite:///{folder / 'log.db'}")) as database:
        for number, body in enumerate(bodies, 1):
            request = measured(
                "decode", partial(codec.decode_forward_backward, body, codec.PROTOBUF, None, max_bytes=2**30)
            )
            check = partial(check_pass, vocab_size=4096, max_context_length=8192)
            data = measured("check", partial(check, request.data, request.loss_fn, request.loss_fn_config))
            name = str(number)
            entry = request_log.Entry(name, "forward_backward", "t", "m", number, body, PROTOBUF, "", needs_model=False)
            entry = measured("compress for the log", partial(compressed, entry))
            append = partial(request_log.append, entry=entry, refusal=None, on_log=lambda session: None)
            measured("log", lambda append=append: asyncio.run(database.write(append)))
            operation = ForwardBackward(request_id=name, model_id="m", data=data, loss_fn=request.loss_fn)
            pieces = measured("frame to the engine, made", partial(encode, Enqueue(operation, number)))
            frame = measured("frame to the engine, read", partial(decode, received(pieces)))
            measured(
                "tiles", lambda frame=frame: list(make_tiles(frame.operation.data, "cross_entropy", {}, TileShape()))
            )
            outputs = [
                {"logprobs": np.zeros(len(one.tokens), np.float32), "elementwise_loss": np.zeros(len(one.tokens), "f4")}
                for one in data
            ]
            done = Done(name, ForwardBackwardOutput(outputs, {"loss:sum": 0.0}))
            pieces = measured("frame from the engine, made", partial(encode, done))
            frame = measured("frame from the engine, read", partial(decode, received(pieces)))
            answer = Answer(measured("encode", partial(codec.encode_forward_backward, frame.result)), PROTOBUF)
            finish = partial(request_log.finish, request_id=name, outcome=answer, keep_body=True)
            measured("store the result", lambda finish=finish: asyncio.run(database.write(finish)))
    return seconds


# -- through a server -------------------------------------------------------------------------------------------------


def processor_s(pid: int) -> float:
    """Processor seconds of a process so far."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def heartbeats(url: str, session: str, link: Connection) -> None:
    """Send heartbeats, one after the other, until told to stop. Then report the seconds of each."""
    host, port = url.removeprefix("http://").split(":")
    server = http.client.HTTPConnection(host, int(port), timeout=60)
    server.connect()
    server.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    headers, body = {"X-API-Key": API_KEY, "Content-Type": "application/json"}, json.dumps({"session_id": session})
    times = []
    link.send("ready")
    while not link.poll():
        start = time.perf_counter()
        server.request("POST", "/api/v1/session_heartbeat", body, headers)
        assert server.getresponse().read()
        times.append(time.perf_counter() - start)
        time.sleep(PAUSE_S)
    link.send(times)


def heartbeats_during(url: str, session: str, work: Callable[[], object]) -> list[float]:
    """Seconds of each heartbeat that another process sends during `work`."""
    context = multiprocessing.get_context("spawn")
    ours, its = context.Pipe()
    process = context.Process(target=heartbeats, args=(url, session, its))
    process.start()
    assert ours.recv() == "ready"
    work()
    ours.send("stop")
    times = ours.recv()
    process.join()
    return times


def main(tokens: int, length: int, repeats: int) -> None:
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    import tinker

    from skyrl.tinker.local_server import close_client

    data = sequences(tokens, length)
    sent = sum(datum.model_input.length for datum in data)
    case = f"{sent} tokens, sequences of {length}"
    with idle_server() as server:
        client = tinker.ServiceClient(base_url=server.url, api_key=API_KEY)
        trainer = client.create_lora_training_client("idle", rank=8, seed=0).result()
        bodies = bodies_of(trainer, data)

        def step() -> None:
            passed, stepped = trainer.forward_backward(data, "cross_entropy"), trainer.optim_step(tinker.AdamParams())
            passed.result()
            stepped.result()

        step()
        measured = []
        for _ in range(repeats):
            pids = server.pids()
            assert pids.api is not None and pids.engine is not None
            before, start = (processor_s(pids.api), processor_s(pids.engine)), time.perf_counter()
            step()
            wall_s = time.perf_counter() - start
            measured.append((wall_s, processor_s(pids.api) - before[0], processor_s(pids.engine) - before[1]))
        session = trainer.model_id.split(":")[0]
        pulses = {
            "idle": heartbeats_during(server.url, session, partial(time.sleep, 3)),
            "during the passes": heartbeats_during(server.url, session, lambda: [step() for _ in range(repeats)]),
        }
        close_client(client)
    runs = []
    for _ in range(repeats + 1):
        with tempfile.TemporaryDirectory(prefix="skyrl-bench-") as scratch:
            runs.append(parts(bodies, Path(scratch)))
    by_part = {part: statistics.median(run[part] for run in runs[1:]) for part in runs[0]}
    for part, seconds in by_part.items():
        emit(benchmark="codec, parts", case=case, part=part, repeats=repeats, processor_ms=round(1e3 * seconds, 1))
    wall_s, api_s, engine_s = (statistics.median(column) for column in zip(*measured, strict=True))
    codec_s = api_s + engine_s + by_part["tiles"]
    emit(
        benchmark="codec",
        case=case,
        repeats=repeats,
        bodies=len(bodies),
        wall_s=round(wall_s, 3),
        api_s=round(api_s, 3),
        engine_s=round(engine_s, 3),
        tiles_s=round(by_part["tiles"], 3),
        codec_s=round(codec_s, 3),
        **{f"share_at_{rate}_tokens_per_s": round(codec_s / (sent / rate), 4) for rate in RATES.values()},
        peak_gflops=round(peak_flops() / 1e9, 1),
    )
    for when, times in pulses.items():
        quantiles = {f"p{q}_ms": round(1e3 * float(np.percentile(times, q)), 1) for q in (50, 99, 100)}
        emit(benchmark="codec, heartbeats", case=f"{case}: {when}", calls=len(times), **quantiles)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    main(arguments.tokens, arguments.length, arguments.repeats)
