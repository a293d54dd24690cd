"""A client of the wire protocol with minimal cost: prebuilt bodies over one persistent connection."""

import http.client
import json
import socket
import time
from typing import Any
from urllib.parse import urlsplit

from skyrl.tinker.wire.proto import skyrl_tinker_pb2 as pb

PROTOBUF, JSON = "application/x-protobuf", "application/json"


class PlainClient:
    """One connection with one key (None: no key)."""

    def __init__(self, url: str, key: str | None, timeout_s: float = 60):
        address = urlsplit(url)
        self._connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=timeout_s)
        self._headers = {} if key is None else {"X-API-Key": key}

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, bytes]:
        """Send a request. Returns (status, body). Raises `OSError` or `http.client.HTTPException` on disconnects."""
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
        """Send a request that must succeed. Returns its JSON answer."""
        status, answer = self.request("POST", f"/api/v1/{path}", json.dumps(body).encode())
        assert status == 200, f"{path}: {status} {answer[:300]!r}"
        return json.loads(answer)

    def result(self, request_id: str, accept: str = PROTOBUF) -> bytes:
        """Poll for the result of a queued request."""
        body = json.dumps({"request_id": request_id}).encode()
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            status, answer = self.request("POST", "/api/v1/retrieve_future", body, Accept=accept)
            if status == 200:
                return answer
            assert status == 408, f"{request_id}: {status} {answer[:300]!r}"
        raise TimeoutError(f"{request_id} has not ended in 120 s")

    def new_session(self) -> str:
        """Create a session. Returns its id."""
        body = {"tags": [], "user_metadata": {"purpose": "benchmark"}, "sdk_version": "0.38.0"}
        return self.post("create_session", body)["session_id"]

    def new_model(self, base_model: str, session: str) -> str:
        """Create a model. Returns its id."""
        body = {"session_id": session, "model_seq_id": 0, "base_model": base_model, "lora_config": {"rank": 4}}
        return json.loads(self.result(self.post("create_model", body)["request_id"]))["model_id"]

    def new_sampler(self, base_model: str, session: str) -> str:
        """Create a sampler of the base model. Returns its id."""
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": base_model}
        return self.post("create_sampling_session", body)["sampling_session_id"]


def pass_body(model: str, seq_id: int, rows: int, length: int) -> bytes:
    """Body of a forward_backward of `rows` sequences with `length` equal tokens."""
    request = pb.ForwardBackwardRequest(model_id=model, seq_id=seq_id, loss_fn="cross_entropy")
    for _ in range(rows):
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = b"\1\0\0\0" * length
        targets = datum.loss_fn_inputs["target_tokens"]
        targets.dense, targets.dtype = b"\1\0\0\0\0\0\0\0" * length, pb.DTYPE_INT64
        targets.shape.append(length)
    return request.SerializeToString()


def sample_body(sampler: str, seq_id: int, tokens: int, **options: object) -> bytes:
    """JSON body of an asample with a prompt of `tokens` equal tokens. It is built by joining text, which is cheap."""
    fields = {"sampling_session_id": sampler, "seq_id": seq_id, "sampling_params": {"max_tokens": 1}, **options}
    head, tail = json.dumps(fields)[:-1], b"1]}]}}"
    start = f'{head},"prompt":{{"chunks":[{{"type":"encoded_text","tokens":['.encode()
    return start + b"1," * (tokens - 1) + tail
