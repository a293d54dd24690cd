"""Bodies of a few kilobytes that stand for gigabytes: refused in bounded memory, as a process of its own tells."""

import json
import subprocess
import sys

import pytest

MAX_BYTES = 16 * 2**20

MEASURE = """
import ctypes, json, sys
import zstandard
from skyrl.tinker.wire import codec as wire
from skyrl.tinker.wire.parsing import MalformedBody
from skyrl.tinker.wire.proto import skyrl_tinker_pb2 as pb

PR_SET_THP_DISABLE = 41
assert ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0  # pages of 2 MiB would be counted whole
MAX_BYTES = int(sys.argv[1])
HALF = MAX_BYTES // 2
address = pb.ForwardBackwardRequest(model_id="m", seq_id=1).SerializeToString()
start = b'{"model_id":"m","seq_id":1,'


def length_delimited(tag, content):
    length, size = b"", len(content)
    while size > 127:
        length, size = length + bytes([size & 127 | 128]), size >> 7
    return tag + length + bytes([size]) + content


def datum_with_tensor(tensor):
    return length_delimited(b"\\x1a", length_delimited(b"\\x12", length_delimited(b"\\x12", tensor)))


def status(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))


bombs = {
    "zeros": (bytes(2**30), wire.PROTOBUF),
    "datums": (address + b"\\x1a\\x00" * (HALF - 50), wire.PROTOBUF),
    "chunks": (address + length_delimited(b"\\x1a", b"\\x0a\\x00" * (HALF - 50)), wire.PROTOBUF),
    "spans": (address + length_delimited(b"\\x1a", b"\\x1a\\x00" * (HALF - 50)), wire.PROTOBUF),
    "options": (address + b"\\x3a\\x02\\x12\\x00" * (HALF // 2 - 50), wire.PROTOBUF),
    "shape": (
        address + datum_with_tensor(length_delimited(b"\\x22", b"\\x01" * (MAX_BYTES - 100))), wire.PROTOBUF
    ),
    "unknown fields": (address + b"\\x7a\\x00" * (HALF - 50), wire.PROTOBUF),
    "unknown field": (address + length_delimited(b"\\x7a", bytes(MAX_BYTES - 100)), wire.PROTOBUF),
    "unknown fields of a datum": (address + length_delimited(b"\\x1a", b"\\x7a\\x00" * (HALF - 50)), wire.PROTOBUF),
    "models": (b"\\x0a\\x00" * (HALF - 50) + address, wire.PROTOBUF),
    "json objects": (start + b'"forward_input":{"data":[' + b"{}," * (HALF // 2) + b"{}]}}", "application/json"),
    "json names": (
        start + b",".join(b'"%06x":1' % number for number in range(HALF // 6)) + b"}",
        "application/json",
    ),
    "json numbers": (
        start + b'"forward_input":{"data":[{"model_input":{"chunks":[{"tokens":[' + b"1," * (HALF - 100) + b"1]}]}}]}}",
        "application/json",
    ),
}
found = {}
for name, (body, media_type) in bombs.items():
    sent = zstandard.compress(body)
    del body
    bombs[name] = None
    ctypes.CDLL(None).malloc_trim(0)  # or what was freed before is used again, and nothing grows
    open("/proc/self/clear_refs", "w").write("5")  # the highest so far becomes what it is now
    before = status("VmRSS")
    try:
        answer = wire.decode_forward_backward(sent, media_type, "zstd", MAX_BYTES).error
    except MalformedBody as error:
        answer = str(error)
    found[name] = {"bytes": len(sent), "grown": status("VmHWM") - before, "answer": answer}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def bombs() -> dict[str, dict]:
    """By name: bytes sent, bytes that the process grew by, and the answer."""
    command = [sys.executable, "-c", MEASURE, str(MAX_BYTES)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, timeout=240).stdout)


NAMES = {
    "zeros": f"more than {MAX_BYTES} bytes",
    "datums": "more than 16384 datums",
    "chunks": "more than 131072 parts",
    "spans": "more than 131072 parts",
    "options": "more than 131072 parts",
    "shape": "more than 131072 parts",
    "unknown fields": "field number 15 of the request is not known",
    "unknown field": "field number 15 of the request is not known",
    "unknown fields of a datum": "more than 131072 parts",
    "models": "both are required",
    "json objects": "beside the long lists of numbers",
    "json names": "beside the long lists of numbers",
    "json numbers": "loss_fn_inputs: is required",
}


@pytest.mark.full
def test_a_bomb_that_says_its_size_is_refused_before_it_is_decompressed(bombs):
    assert bombs["zeros"]["grown"] < MAX_BYTES / 4


@pytest.mark.parametrize("name", NAMES)
def test_a_bomb_is_refused_by_what_is_wrong_with_it(bombs, name):
    assert NAMES[name] in bombs[name]["answer"]


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("json")])
def test_a_protobuf_bomb_takes_no_more_than_four_times_the_largest_body(bombs, name):
    assert bombs[name]["grown"] < 4 * MAX_BYTES, bombs[name]


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("json")])
def test_json_takes_no_more_than_ten_times_the_largest_body(bombs, name):
    assert bombs[name]["grown"] < 10 * MAX_BYTES, bombs[name]
