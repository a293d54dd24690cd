"""`skyrl adapter import` to a server that is still starting."""

import json
from pathlib import Path

import numpy as np
import pytest
from fastapi import FastAPI
from safetensors.numpy import save_file
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from skyrl.cli import main
from skyrl.utils.adapters import on_server
from tests.envs.http_server import serving

SAID = "the engine is not ready yet: loading"


@pytest.fixture
def adapter(tmp_path) -> str:
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    save_file(
        {f"{name}A.weight": np.ones((2, 4)), f"{name}B.weight": np.ones((4, 2))}, tmp_path / "adapter_model.safetensors"
    )
    return str(tmp_path)


def imported(folder: Path | str, refusals: int) -> tuple[int, list[str]]:
    """Exit status of an import to a server that is not ready so many times, and the paths that were asked for."""
    paths: list[str] = []

    async def answer(request: Request) -> JSONResponse:
        paths.append(request.url.path.removeprefix("/api/v1/external_weights_upload_"))
        if len(paths) <= refusals:
            return JSONResponse({"detail": SAID}, 503, {"Retry-After": "0"})
        return JSONResponse({"urls": {}, "upload_id": "u", "tinker_path": "tinker://m/weights/upload"})

    with serving(FastAPI(routes=[Route("/{path:path}", answer, methods=["POST"])])) as url:
        return main(["adapter", "import", str(folder), "--url", url, "--base-model", "m"]), paths


def test_an_import_waits_for_a_server_that_is_starting_and_says_so_once(adapter, capsys):
    assert imported(adapter, refusals=2) == (0, ["start"] * 3 + ["finish"])
    said = capsys.readouterr()
    assert said.out == "tinker://m/weights/upload\n"
    assert said.err.count(SAID) == 1 and said.err.startswith("waiting for http://127.0.0.1:")


@pytest.mark.full
def test_an_import_gives_a_server_up_that_stays_away(adapter, capsys, monkeypatch):
    monkeypatch.setattr(on_server, "PATIENCE_S", 0.5)
    status, paths = imported(adapter, refusals=10**9)
    assert status == 1 and set(paths) == {"start"}
    assert f"the server refuses it (503): {SAID}" in capsys.readouterr().err.splitlines()[-1]
