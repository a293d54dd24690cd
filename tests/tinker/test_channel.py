"""The channel to the engine: order and turns of frames, over a real pair of sockets."""

import asyncio
import socket
import threading
from collections.abc import Sequence

import numpy as np
import uvloop

from skyrl.backends.operations import ForwardBackward, OptimStep
from skyrl.tinker.processes.channel import LARGE_TOKENS, ApiChannel, EngineChannel
from skyrl.tinker.processes.messages import Cancel, Done, Enqueue, Metrics, ToEngine
from skyrl.types import AdamParams, Datum, SampleOutput
from tests.waiting import BOUND_S, until

LARGE = LARGE_TOKENS + 1


def a_pass(tenant: str, number: int, tokens: int = LARGE) -> Enqueue:
    datum = Datum(np.zeros(tokens, np.int32), {"target_tokens": np.zeros(tokens, np.int64)})
    request_id = f"{tenant}{number}"
    return Enqueue(
        ForwardBackward(request_id=request_id, tenant=tenant, model_id="m", data=[datum], loss_fn="cross_entropy")
    )


def a_step(tenant: str, number: int) -> Enqueue:
    return Enqueue(OptimStep(request_id=f"{tenant}{number}", tenant=tenant, model_id="m", adam_params=AdamParams()))


def name(frame: ToEngine) -> str:
    if isinstance(frame, Cancel):
        return frame.request_id
    assert isinstance(frame, Enqueue)
    return frame.operation.request_id


def arrived(frames: Sequence[ToEngine]) -> list[str]:
    """Request ids of frames that are sent at once, in the order in which the engine receives them."""

    async def main() -> list[str]:
        ours, theirs = socket.socketpair()
        api, engine = await ApiChannel.open(ours), EngineChannel(theirs)
        for frame in frames:
            api.send(frame)
        received = [await asyncio.to_thread(engine.receive) for _ in frames]
        await api.close()
        engine.close()
        return [name(frame) for frame in received]

    return uvloop.run(main())


def test_a_tenants_frames_arrive_in_order_whatever_their_size():
    frames = [a_pass("a", 0), a_step("a", 1), a_pass("a", 2), Cancel("a3", "a"), a_pass("a", 4, 1), a_pass("a", 5)]
    assert arrived(frames) == ["a0", "a1", "a2", "a3", "a4", "a5"]


def test_a_small_frame_does_not_wait_for_the_large_ones_of_another_tenant():
    assert arrived([*[a_pass("a", number) for number in range(8)], a_step("b", 0)])[0] == "b0"


def test_tenants_with_large_frames_take_turns():
    frames = [*[a_pass("a", number) for number in range(8)], a_pass("b", 0), a_pass("b", 1)]
    order = arrived(frames)
    assert order.index("b0") <= 1 and order.index("b1") <= 3
    assert [request for request in order if request[0] == "a"] == [f"a{number}" for number in range(8)]


def test_closing_ends_a_write_that_nobody_reads():
    async def main() -> None:
        ours, theirs = socket.socketpair()
        api = await ApiChannel.open(ours)
        api.send(a_pass("a", 0, 2**22))
        await asyncio.to_thread(until, lambda: api._writing, "the frame is being written")
        await api.close()
        theirs.close()
        again, other = socket.socketpair()
        api, engine = await ApiChannel.open(again), EngineChannel(other)
        api.send(a_pass("a", 1))
        await asyncio.to_thread(engine.receive)
        await api.close()
        engine.close()

    uvloop.run(asyncio.wait_for(main(), BOUND_S))


def test_small_frames_of_the_engine_go_between_the_pieces_of_a_large_one():
    async def main() -> list[object]:
        ours, theirs = socket.socketpair()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 0)  # the least: a piece or a few small frames fill it
        api, engine = await ApiChannel.open(ours), EngineChannel(theirs)
        table = (np.arange(2**20, dtype=np.int32)[None], np.ones((1, 2**20), np.float32))
        large = SampleOutput([], prompt_logprobs=np.ones(2**21, np.float32), topk_prompt_logprobs=table)
        ended: list[str] = []
        engine.send_apart(Done("large", large), lambda: ended.append("large"))
        until(engine._sending.locked, "the large frame is being written to a socket that nobody reads")

        def send_small() -> None:
            for number in range(20):
                engine.send(Metrics({"number": number}, {}))

        sending = threading.Thread(target=send_small)
        sending.start()
        until(engine._next.locked, "a frame waits for a piece of another")
        frames = api.frames()
        received = [await anext(frames) for _ in range(21)]
        await asyncio.to_thread(sending.join, BOUND_S)
        await asyncio.to_thread(until, lambda: ended == ["large"], "its sender is told")
        await api.close()
        engine.close()
        return received

    received = uvloop.run(asyncio.wait_for(main(), BOUND_S))
    assert [frame.values["number"] for frame in received if isinstance(frame, Metrics)] == list(range(20))
    (place,) = (number for number, frame in enumerate(received) if isinstance(frame, Done))
    assert place > 0
    done = received[place]
    assert isinstance(done, Done) and isinstance(done.result, SampleOutput) and done.result.topk_prompt_logprobs
    np.testing.assert_array_equal(done.result.topk_prompt_logprobs[0][0], np.arange(2**20))
    assert (done.result.prompt_logprobs == 1).all()


def test_a_frame_to_an_engine_that_has_gone_is_dropped():
    async def main() -> list[object]:
        ours, theirs = socket.socketpair()
        api = await ApiChannel.open(ours)
        theirs.close()
        received = [frame async for frame in api.frames()]
        api.send(a_step("a", 0))
        await api.close()
        return received

    assert uvloop.run(main()) == []
