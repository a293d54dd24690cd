"""Frames between the processes: what arrives is what was sent, and takes no Python object per token."""

import asyncio
import socket
import struct
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from skyrl.algorithms.checks.requests import check_pass
from skyrl.backends.operations import ForwardBackward
from skyrl.tinker.processes.channel import ApiChannel, EngineChannel
from skyrl.tinker.processes.frames import decode, encode, pack, unpack
from skyrl.tinker.processes.messages import Done, Enqueue, FromEngine
from skyrl.tinker.wire import codec
from skyrl.types import Datum, ForwardBackwardOutput, GeneratedSequence, SampleOutput
from tests.tinker.harness import pass_request
from tests.traced import least


def through_a_socket(frame):
    """The frame as its reader has it."""
    sent = b"".join(encode(frame))
    (count,) = struct.unpack_from("<Q", sent)
    at, parts = 8 * (1 + count), []
    for size in struct.unpack_from(f"<{count}Q", sent, 8):
        parts.append(bytearray(sent[at : at + size]))
        at += size
    assert at == len(sent)
    return decode(parts)


def assert_same(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert list(ours) == list(theirs)
    for name, array in ours.items():
        assert (array.dtype, array.shape) == (theirs[name].dtype, theirs[name].shape)
        assert array.tobytes() == theirs[name].tobytes()


shapes = st.one_of(st.tuples(st.integers(0, 5)), st.tuples(st.integers(0, 5), st.integers(0, 3)))
row_shapes = st.dictionaries(st.sampled_from("abc"), shapes).map(lambda row: dict(sorted(row.items())))


@given(st.lists(row_shapes, max_size=8))
def test_rows_of_any_shapes_come_back_from_their_columns(given_shapes: list[dict[str, tuple[int, ...]]]):
    draws = np.random.default_rng(0)
    rows = [{name: draws.random(shape, np.float32) for name, shape in row.items()} for row in given_shapes]
    columns = pack(rows)
    assert columns is not None
    for ours, theirs in zip(rows, unpack(columns, len(rows)), strict=True):
        assert_same(ours, {name: theirs[name] for name in ours})
        assert ours.keys() == theirs.keys()


@pytest.mark.parametrize(
    "arrays",
    [[np.zeros(2, np.float32), np.zeros(2, np.int64)], [np.zeros((2, 2, 2))], [np.zeros(())]],
    ids=["types", "three dimensions", "none"],
)
def test_arrays_that_no_column_can_hold_are_sent_all_the_same(arrays: list[np.ndarray]):
    assert pack([{"x": array} for array in arrays]) is None
    output = ForwardBackwardOutput([{"x": array} for array in arrays], {})
    arrived = through_a_socket(Done("id", output)).result
    for ours, theirs in zip(output.loss_fn_outputs, arrived.loss_fn_outputs, strict=True):
        assert_same(ours, theirs)


def a_pass(rows: int, tokens: int) -> ForwardBackward:
    """With targets of one and of several columns, and an input that only some have."""
    draws = np.random.default_rng(0)
    data = []
    for i in range(rows):
        shape = (tokens + i, 2) if i % 3 == 2 else (tokens + i,)
        inputs = {
            "target_tokens": draws.integers(0, 100, shape).astype(np.int32),
            "weights": draws.random(shape, np.float32),
        }
        if i % 2:
            inputs["advantages"] = draws.random(tokens + i, np.float32)
        data.append(Datum(draws.integers(0, 100, tokens + i).astype(np.int32), inputs))
    return ForwardBackward(
        request_id="r",
        tenant="t",
        model_id="m",
        alone=True,
        data=data,
        loss_fn="ppo",
        loss_fn_config={"clip": 0.5},
        forward_only=True,
    )


@pytest.mark.parametrize("tokens", [1, 10, 10_000])
def test_a_pass_arrives_as_it_was_sent(tokens: int):
    sent = a_pass(5, tokens)
    frame = through_a_socket(Enqueue(sent, 7))
    arrived = frame.operation
    assert frame.seq_id == 7
    for name in ("request_id", "tenant", "model_id", "alone", "loss_fn", "loss_fn_config", "forward_only"):
        assert getattr(arrived, name) == getattr(sent, name)
    for ours, theirs in zip(sent.data, arrived.data, strict=True):
        assert_same({"tokens": ours.tokens, **ours.loss_fn_inputs}, {"tokens": theirs.tokens, **theirs.loss_fn_inputs})


@pytest.mark.parametrize("tokens", [1, 10_000])
def test_outputs_arrive_as_they_were_sent(tokens: int):
    outputs = [{"logprobs": np.arange(tokens, dtype=np.float32), "elementwise_loss": np.ones(tokens, np.float32)}] * 3
    sent = ForwardBackwardOutput(outputs, {"loss:sum": 1.5}, "SomeType")
    arrived = through_a_socket(Done("r", sent)).result
    assert (arrived.metrics, arrived.loss_fn_output_type) == (sent.metrics, sent.loss_fn_output_type)
    for ours, theirs in zip(outputs, arrived.loss_fn_outputs, strict=True):
        assert_same(ours, theirs)


def test_long_arrays_are_not_copied_into_a_frame():
    output = ForwardBackwardOutput([{"logprobs": np.zeros(100_000, np.float32)}], {})
    first, *arrays = encode(output)
    assert len(first) < 1000 and [len(array) for array in arrays] == [400_000]


ROWS = 8


def all_the_way(body: bytes) -> Iterator[object]:
    """Yield the forms of a pass on its way to the engine, and of its outputs on their way back."""
    yield (request := codec.decode_forward_backward(body, codec.PROTOBUF, None, 2**30))
    yield (data := check_pass(request.data, request.loss_fn, {}, vocab_size=10**5, max_context_length=10**6))
    operation = ForwardBackward(request_id="r", model_id="m", data=data, loss_fn=request.loss_fn)
    yield (arrived := through_a_socket(Enqueue(operation, 1)))
    outputs = [{"logprobs": datum.loss_fn_inputs["weights"]} for datum in arrived.operation.data]
    yield (back := through_a_socket(Done("r", ForwardBackwardOutput(outputs, {"loss:sum": 0.0}))))
    yield codec.encode_forward_backward(back.result)


def body_of(tokens: int) -> bytes:
    return pass_request("m", 1, [[70_000] * tokens] * ROWS).SerializeToString()


def test_no_step_of_the_way_makes_a_python_object_per_token_and_drops_it():
    body = body_of(100_000)

    def most_grown() -> int:
        kept, grown = [], []
        tracemalloc.start()
        try:
            before = 0
            for stage in all_the_way(body):
                kept.append(stage)
                after, peak = tracemalloc.get_traced_memory()
                grown.append(peak - before)
                before = after
                tracemalloc.reset_peak()
        finally:
            tracemalloc.stop()
        return max(grown)

    # Numbers in a list take 32 bytes or more each, which is 2.7 times what the body has for a token.
    bound = 2.6 * len(body)
    assert least(most_grown, bound) < bound


def test_a_large_frame_is_there_once_while_it_comes():
    """A copy in one piece stops the event loop, and doubles the memory."""
    size = 2**24
    sampled = GeneratedSequence(np.arange(size, dtype=np.int32), np.zeros(1, np.float32), "stop", None)

    async def main() -> tuple[FromEngine, int]:
        ours, theirs = socket.socketpair()
        api, engine = await ApiChannel.open(ours), EngineChannel(theirs)
        tracemalloc.start()
        sending = asyncio.create_task(asyncio.to_thread(engine.send, Done("sample-1", SampleOutput([sampled]))))
        frame = await anext(api.frames())
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        await sending
        await api.close()
        engine.close()
        return frame, peak

    def most_held() -> int:
        frame, peak = uvloop.run(main())
        assert isinstance(frame, Done) and isinstance(frame.result, SampleOutput)
        assert np.array_equal(frame.result.sequences[0].tokens, sampled.tokens)
        return peak

    bound = 1.5 * sampled.tokens.nbytes
    assert least(most_held, bound) < bound
