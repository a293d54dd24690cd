"""Options of engines that are started from here."""

from pydantic import BaseModel, ConfigDict, Field, field_validator

API_KEY_VARIABLE = "VLLM_API_KEY"
"""Variable from which a vLLM server takes its key, too."""


class LaunchOptions(BaseModel):
    """Engines that we start ourselves, on this machine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    command: tuple[str, ...] = Field(min_length=1)
    """Command of an engine, such as [/opt/vllm/bin/python, -m, vllm.entrypoints.openai.api_server, --model, MODEL,
    --host, 127.0.0.1, --port, "{port}", --enable-lora]. `{port}` stands for a free port, which each has for ever, and
    `{number}` for its number from 0. Its environment has our key as VLLM_API_KEY, and
    VLLM_ALLOW_RUNTIME_LORA_UPDATING=1."""

    count: int = Field(default=1, ge=1)
    """Engines to start."""

    env: dict[str, str] = {}
    """Environment beside ours."""

    @field_validator("command")
    @classmethod
    def _has_a_port(cls, command: tuple[str, ...]) -> tuple[str, ...]:
        if not any("{port}" in part for part in command):
            raise ValueError(f"engines.launch.command={' '.join(command)} has no {{port}}; add --port {{port}}")
        return command
