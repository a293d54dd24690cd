"""Options of sampling engines, launched by us or elsewhere."""

import os
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from skyrl.backends.engines.launcher.options import API_KEY_VARIABLE, LaunchOptions
from skyrl.errors import RequestError


def _address(url: str) -> str:
    """Normalize a URL: strip a trailing slash and /v1, and add http:// if there is no scheme."""
    url = url.strip().rstrip("/").removesuffix("/v1")
    return url if "://" in url else f"http://{url}"


def _addresses(value: object) -> object:
    given = value.split(",") if isinstance(value, str) else value
    if not isinstance(given, list | tuple) or not all(isinstance(url, str) for url in given):
        return value
    urls = tuple(dict.fromkeys(_address(url) for url in given if url.strip()))
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"{url} is no http:// or https:// address; correct it")
    return urls


class EngineOptions(BaseModel):
    """Options of sampling engines. Without `urls` and `launch`, the backend samples by itself."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    urls: Annotated[tuple[str, ...], BeforeValidator(_addresses)] = ()
    """Address of each engine, such as http://10.0.0.5:8000. An engine is a server with vLLM's OpenAI API. Engines that
    do not answer at startup join later."""

    launch: LaunchOptions | None = None
    """Engines to start in addition to those at `urls`. They are restarted if they exit, and stopped on shutdown. If we
    are killed, the next process takes them over. Records and logs are in FOLDER.engines, next to `folder`."""

    api_key: str | None = Field(default=None, repr=False)
    """API key of the engines. None: the environment variable VLLM_API_KEY, if set."""

    folder: str | None = None
    """Folder for published adapters, visible to engines at the same path. Each server or trainer needs its own."""

    folder_gib: float = Field(default=16.0, gt=0, allow_inf_nan=False)
    """Maximum GiB of unused adapters in the folder. Adapters beyond that are removed, and written again on demand."""

    max_requests: int = Field(default=256, ge=1)
    """Maximum concurrent samples per engine: its --max-num-seqs."""

    max_loras: int = Field(default=1, ge=1)
    """Maximum adapters loaded per engine: its --max-loras, whose default in vLLM is 1 too."""

    whole: bool = False
    """Reserve the engines for fully trained models (rank 0). Each engine serves one version at a time, as its base
    weights, and no adapters; the backend samples adapters itself. vLLM servers need VLLM_SERVER_DEV_MODE=1 for this."""

    colocated: bool = False
    """Let engines and the trainer alternate on the same devices: while one of them works, the other sleeps. vLLM
    servers need VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode for this."""

    phase_s: float = Field(default=20.0, gt=0, allow_inf_nan=False)
    """Maximum seconds of a training phase while sampling has work, and of a sampling phase while training has work, if
    they share devices."""

    reload_method: str = "reload_weights"
    """Method of vLLM's workers that replaces their weights. Engines launched by us use a method of our own."""

    max_logprobs: int = Field(default=20, ge=0)
    """Maximum top log-probabilities per position: the engine's --max-logprobs."""

    logprob_bound: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    """Maximum mean difference, in nats, between an engine's log-probabilities and ours. An engine within it counts as
    serving the same model. Typical values are below 0.001 in float32 on both sides, and about 0.01 in bfloat16."""

    check_every_sync: bool = True
    """Before the first sample of a version on an engine, compare the engine's log-probabilities of 32 tokens after a
    fixed prompt with ours."""

    sync_logprob_bound: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Maximum mean difference of log-probabilities, in nats, in the comparison of `check_every_sync`. None: ten times
    the difference measured with the base model and random adapters at admission, but at least 0.001 and at most
    logprob_bound."""

    stream: bool = True
    """Stream tokens, so that samples of a lost engine resume on another engine instead of restarting. Start vLLM with a
    --stream-interval of about 16: each chunk costs this process about 50 microseconds."""

    connect_timeout_s: float = Field(default=5.0, gt=0, allow_inf_nan=False)
    """Timeout in seconds to connect to an engine, and for its health check."""

    timeout_s: float = Field(default=120.0, gt=0, allow_inf_nan=False)
    """Timeout in seconds of a request to an engine, such as loading an adapter. For samples, token_timeout_s is added.
    If samples are streamed, an engine with running samples that sends no token for `timeout_s` counts as lost."""

    token_timeout_s: float = Field(default=0.5, gt=0, allow_inf_nan=False)
    """Seconds per token added to timeout_s for a sample."""

    health_interval_s: float = Field(default=5.0, gt=0, allow_inf_nan=False)
    """Seconds between health checks of an engine. If one fails, and a second right after it, the engine counts as lost
    and its samples are retried."""

    start_timeout_s: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    """Timeout in seconds for the first engine to answer at startup."""

    absent_timeout_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """Seconds that samples wait while no engine that could draw them is available. Then the backend draws them itself.
    The time does not run while an engine that we launched is being restarted."""

    def check(self) -> None:
        """Raise `RequestError` if a required option is missing, or if engines cannot be launched."""
        if self.count and not self.folder:
            given = f"engines.urls={', '.join(self.urls)}" if self.urls else "engines.launch"
            raise RequestError(
                f"{given} without engines.folder: published adapters reach the engines "
                "through a folder that they see at the same path; name it, on a disk that all machines have if engines "
                "are elsewhere"
            )
        if self.launch is not None:
            self.launch.check()

    @property
    def count(self) -> int:
        """Number of configured engines. 0: the backend samples by itself."""
        return len(self.urls) + (0 if self.launch is None else self.launch.count)

    @property
    def key(self) -> str | None:
        """The API key to send, or None."""
        return self.api_key or os.environ.get(API_KEY_VARIABLE)
