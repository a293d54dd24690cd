"""A client of the wire protocol that costs next to nothing: prebuilt bodies over one kept connection."""

import http.client
import json
import socket
import time
from typing import Any
from urllib.parse import urlsplit

from skyrl.tinker.wire.proto import skyrl_tinker_pb2 as pb

PROTOBUF, JSON = "application/x-protobuf", "application/json"


class PlainClient:
    """One connection with one key (None: without)."""

    def __init__(self, url: str, key: str | None, timeout_s: float = 60):
        address = urlsplit(url)
        self._connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=timeout_s)
        self._headers = {} if key is None else {"X-API-Key": key}

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, bytes]:
        """(status, body). Raises `OSError` or `http.client.HTTPException` where the connection ends."""
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            if self._connection.sock is None:
                self._connection.connect()
                self._connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connection.request(method, path, body, {"Content-Type": JSON, **self._headers, **given})
            response = self._connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException):
            self._connection.close()
            raise

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON answer of a request that has to succeed."""
        status, answer = self.request("POST", f"/api/v1/{path}", json.dumps(body).encode())
        assert status == 200, f"{path}: {status} {answer[:300]!r}"
        return json.loads(answer)

    def result(self, request_id: str, accept: str = PROTOBUF) -> bytes:
        """The result of a queued request, polled for."""
        body = json.dumps({"request_id": request_id}).encode()
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            status, answer = self.request("POST", "/api/v1/retrieve_future", body, Accept=accept)
            if status == 200:
                return answer
            assert status == 408, f"{request_id}: {status} {answer[:300]!r}"
        raise TimeoutError(f"{request_id} has not ended in 120 s")

    def new_session(self) -> str:
        """The id of a session."""
        body = {"tags": [], "user_metadata": {"purpose": "benchmark"}, "sdk_version": "0.38.0"}
        return self.post("create_session", body)["session_id"]

    def new_model(self, base_model: str, session: str) -> str:
        """The id of a model."""
        body = {"session_id": session, "model_seq_id": 0, "base_model": base_model, "lora_config": {"rank": 4}}
        return json.loads(self.result(self.post("create_model", body)["request_id"]))["model_id"]

    def new_sampler(self, base_model: str, session: str) -> str:
        """The id of a sampler of the base model."""
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": base_model}
        return self.post("create_sampling_session", body)["sampling_session_id"]


def pass_body(model: str, seq_id: int, rows: int, length: int) -> bytes:
    """A forward_backward of `rows` sequences of `length` equal tokens."""
    request = pb.ForwardBackwardRequest(model_id=model, seq_id=seq_id, loss_fn="cross_entropy")
    for _ in range(rows):
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = b"\1\0\0\0" * length
        targets = datum.loss_fn_inputs["target_tokens"]
        targets.dense, targets.dtype = b"\1\0\0\0\0\0\0\0" * length, pb.DTYPE_INT64
        targets.shape.append(length)
    return request.SerializeToString()


def sample_body(sampler: str, seq_id: int, tokens: int, **options: object) -> bytes:
    """An asample whose prompt has `tokens` equal tokens, as JSON. Made by joining text, which costs little."""
    fields = {"sampling_session_id": sampler, "seq_id": seq_id, "sampling_params": {"max_tokens": 1}, **options}
    head, tail = json.dumps(fields)[:-1], b"1]}]}}"
    start = f'{head},"prompt":{{"chunks":[{{"type":"encoded_text","tokens":['.encode()
    return start + b"1," * (tokens - 1) + tail
