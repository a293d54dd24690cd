"""Options of launched engines."""

import os
import subprocess
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from skyrl.errors import RequestError

API_KEY_VARIABLE = "VLLM_API_KEY"
"""Environment variable with the API key, also read by vLLM servers."""
ASKED_S = 30.0
"""Maximum seconds in which an interpreter says whether it has vLLM."""
OURS = {
    "model": "the server's base model, or trainer.policy.model.path",
    "tokenizer": "the server's base model, or trainer.policy.model.path",
    "dtype": "dtype, or generator.inference_engine.model_dtype",
    "max_model_len": "max_context_length",
    "max_num_seqs": "engines.max_requests, or generator.inference_engine.max_num_seqs",
    "max_logprobs": "engines.max_logprobs",
    "stream_interval": "nothing else; the default is right",
    "enable_lora": "engines.whole",
    "enable_sleep_mode": "engines.colocated, or trainer.placement.colocate_all",
    "max_loras": "engines.max_loras",
    "max_lora_rank": "max_lora_rank, or trainer.policy.model.lora.rank",
    "host": "nothing else; engines that are started here listen on this machine alone",
    "port": "nothing else; each engine gets a free port",
    "api_key": "nothing else; the backend makes the key",
    "served_model_name": "nothing else; engines are asked for the model's path",
}
"""Arguments of vLLM that cannot be given because other options determine them, and the names of those options."""


class LaunchOptions(BaseModel):
    """Engines to launch on this machine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    python: str | None = None
    """Python interpreter of an environment with vLLM, such as /opt/vllm/bin/python. Engines are vLLM servers of the
    backend's model."""

    arguments: dict[str, Any] = {}
    """More arguments of these servers, by their names in vLLM: {"enforce_eager": true, "tensor_parallel_size": 2}."""

    command: tuple[str, ...] = ()
    """Command of any other engine, such as [/opt/vllm/bin/python, -m, vllm.entrypoints.openai.api_server, --model,
    MODEL, --host, 127.0.0.1, --port, "{port}", --enable-lora]. `{port}` is replaced by a free port, another
    one at each start, and `{number}` by the engine's number from 0. The environment contains our key as
    VLLM_API_KEY, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1."""

    count: int = Field(default=1, ge=1)
    """Number of engines."""

    env: dict[str, str] = {}
    """Additional environment variables."""

    gpus: int = Field(default=0, ge=0)
    """GPUs per engine, assigned consecutively. 0: each engine sees all GPUs."""

    first_gpu: int = Field(default=0, ge=0)
    """Index of the first engine's first GPU."""

    @field_validator("command")
    @classmethod
    def _has_a_port(cls, command: tuple[str, ...]) -> tuple[str, ...]:
        if command and not any("{port}" in part for part in command):
            raise ValueError(f"engines.launch.command={' '.join(command)} has no {{port}}; add --port {{port}}")
        return command

    @field_validator("arguments")
    @classmethod
    def _leaves_ours(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        for name, value in arguments.items():
            if other := OURS.get(name.removeprefix("--").replace("-", "_")):
                raise ValueError(f"{name}={value} is another option's: leave it out here; it follows from {other}")
        return arguments

    @model_validator(mode="after")
    def _starts_something(self) -> "LaunchOptions":
        if (self.python is None) == (not self.command):
            given = "both python and command" if self.command else "neither python nor command"
            raise ValueError(f"engines.launch has {given}; name a Python that has vLLM, or the whole command")
        if self.arguments and self.python is None:
            raise ValueError(
                f"engines.launch.arguments={self.arguments} with command: a command has its own; add them there"
            )
        return self

    def check(self) -> None:
        """Raise `RequestError` if `python` has no vLLM. Does not import vLLM, which takes long."""
        if self.python is None:
            return
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "PYTHONPATH")}
        command = [self.python, "-c", "import importlib.util; print(importlib.util.find_spec('vllm') is not None)"]
        try:
            told = subprocess.run(
                command, env={**environment, **self.env}, stdin=subprocess.DEVNULL, capture_output=True, timeout=ASKED_S
            )
            trouble = {b"True": None, b"False": "it has no module vllm"}.get(
                told.stdout.strip(),
                f"it ended with status {told.returncode}: {told.stderr.decode(errors='replace')[-200:]}",
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            trouble = str(error)
        if trouble is not None:
            raise RequestError(
                f"engines.launch.python={self.python}: {trouble}; name the Python interpreter of an environment in "
                "which vLLM is installed, or leave engines.launch out"
            )
