"""Upload of adapters to a server of the Tinker API, and download from it."""

import json
import tempfile
import time
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx

from skyrl.errors import RequestError
from skyrl.utils.adapters.naming import pairs_of, tensors_of
from skyrl.utils.adapters.plain import rank_of
from skyrl.utils.adapters.stored import CONFIG, TENSORS, StoredAdapter, read_adapter
from skyrl.utils.console import say_error
from skyrl.utils.files.hf_files import check_peft_config
from skyrl.utils.files.tensor_file import Tensor, tensor_file

PATIENCE_S = 600.0
"""Timeout of a request, in seconds: the server reads and converts a large adapter before it responds."""
SCHEME = "tinker://"


class Server:
    """Client of a server.

    Args:
        url: Base URL, without /api/v1.
        key: Sent as `X-API-Key`.
    """

    def __init__(self, url: str, key: str):
        self.url = url.rstrip("/")
        self._headers = {"X-API-Key": key}

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a request and return the JSON response.

        Raises RequestError for error responses and connection failures.
        """
        headers = self._headers | {"Accept": "application/json"}
        answer = self._answer(method, f"{self.url}/api/v1{path}", headers=headers, json=body)
        try:
            return answer.json()
        except ValueError as error:
            raise RequestError(f"--url {self.url} is no server of the Tinker API; name one") from error

    def send(self, url: str, content: bytes) -> None:
        """Upload a file to a URL that the server has returned. It needs no key. Raises the errors of `ask`."""
        self._answer("PUT", url, content=content)

    def fetch(self, url: str, file: Path) -> None:
        """Download a URL to a file. Raises the errors of `ask`."""
        try:
            with httpx.stream("GET", url, timeout=PATIENCE_S) as answer, open(file, "wb") as target:
                answer.raise_for_status()
                for piece in answer.iter_bytes():
                    target.write(piece)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._lost(error) from error

    def _answer(self, method: str, url: str, **given: Any) -> httpx.Response:
        """Return the response to a request. Retries after 503 with Retry-After (a server that is starting)."""
        until, told = time.monotonic() + PATIENCE_S, False
        while True:
            try:
                answer = httpx.request(method, url, timeout=PATIENCE_S, **given)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise self._lost(error) from error
            pause_s = answer.headers.get("Retry-After", "")
            if answer.status_code != 503 or not pause_s.isdecimal() or time.monotonic() > until:
                break
            if not told:
                say_error(f"waiting for {self.url}: {_detail(answer)}")
                told = True
            time.sleep(int(pause_s))
        if answer.is_error:
            raise RequestError(f"the server refuses it ({answer.status_code}): {_detail(answer)}")
        return answer

    def _lost(self, error: Exception) -> RequestError:
        return RequestError(f"--url {self.url} does not answer ({error}); start a server, or name another with --url")


def upload(adapter: StoredAdapter, server: Server, base_model: str | None, project: str | None) -> str:
    """Create a training checkpoint from an adapter. Returns the checkpoint's path. Prints the server's warning, if any.

    Args:
        adapter: The adapter. Copies of base weights in it are left out.
        server: Target server.
        base_model: Base model of the adapter; None: the server's.
        project: Project that lists the checkpoint's run. None: no project.

    Raises RequestError for PEFT options that are not implemented, and the errors of `Server.ask`.
    """
    check_peft_config(adapter.config)
    if base_model is None:
        base_model = server.ask("GET", "/get_server_capabilities")["supported_models"][0]["model_name"]
    body: dict[str, Any] = {"base_model": base_model, "lora_config": {"rank": rank_of(adapter.config, adapter.where)}}
    if project is not None:
        body["destination_project_id"] = project
    arrays = tensors_of(pairs_of(adapter.tensors, adapter.where)[0])
    tensors, content = {name: Tensor(x.shape, x.dtype, lambda x=x: x) for name, x in arrays.items()}, BytesIO()
    tensor_file(tensors, {"format": "pt"})(content)
    files = {CONFIG: json.dumps(adapter.config).encode(), TENSORS: content.getvalue()}
    begun = server.ask("POST", "/external_weights_upload_start", body)
    for name, url in begun["urls"].items():
        server.send(url, files[name])
    finished = server.ask("POST", "/external_weights_upload_finish", {"upload_id": begun["upload_id"]})
    if (warning := finished.get("warning")) is not None:
        say_error(f"warning: {warning}")
    return finished["tinker_path"]


def download(path: str, server: Server) -> StoredAdapter:
    """Download the adapter of a checkpoint.

    Raises RequestError for an invalid path or a checkpoint without an adapter.
    """
    model, *checkpoint = path.removeprefix(SCHEME).split("/")
    if not path.startswith(SCHEME) or len(checkpoint) != 2:
        raise RequestError(f"{path} is no checkpoint; name tinker://MODEL/sampler_weights/NAME")
    link = server.ask("GET", f"/training_runs/{model}/checkpoints/{'/'.join(checkpoint)}/archive")["url"]
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "archive.tar"
        server.fetch(link, archive)
        try:
            return read_adapter(archive)
        except RequestError as error:
            reason = str(error).replace(str(archive), path)
            raise RequestError(f"{reason}, as save_weights_for_sampler and save_weights_external save one") from error


def _detail(answer: httpx.Response) -> str:
    try:
        return answer.json()["detail"]
    except (ValueError, KeyError, TypeError):
        return answer.reason_phrase
