"""The channel to the engine: order and turns of frames, over a real pair of sockets."""

import asyncio
import socket
from collections.abc import Sequence

import numpy as np

from skyrl.backends.operations import ForwardBackward, OptimStep
from skyrl.tinker.channel import LARGE_TOKENS, ApiChannel, Cancel, EngineChannel, Enqueue, ToEngine
from skyrl.types import AdamParams, Datum

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

    return asyncio.run(main())


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
        await asyncio.sleep(0.2)
        await api.close()
        theirs.close()
        again, other = socket.socketpair()
        api, engine = await ApiChannel.open(again), EngineChannel(other)
        api.send(a_pass("a", 1))
        await asyncio.to_thread(engine.receive)
        await api.close()
        engine.close()

    asyncio.run(asyncio.wait_for(main(), 20))
