"""Options of sampling engines, which were started elsewhere or are started from here."""

import os
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from skyrl.backends.engines.launcher.options import API_KEY_VARIABLE, LaunchOptions
from skyrl.errors import RequestError


def _address(url: str) -> str:
    """A URL without what clients put behind it; host:port is http."""
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
    """Options of sampling engines. Without `urls` and `launch` there are none, and the backend samples by itself."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    urls: Annotated[tuple[str, ...], BeforeValidator(_addresses)] = ()
    """Address of each engine, such as http://10.0.0.5:8000: a server of vLLM's OpenAI API. Those that do not answer
    yet join when they do."""

    launch: LaunchOptions | None = None
    """Engines to start, beside those at `urls`. They end with us, are started again where they end, and are taken over
    by the next of us if we are killed. Records and logs are beside `folder`, in FOLDER.engines."""

    api_key: str | None = Field(default=None, repr=False)
    """Key that the engines ask for. None: the environment's VLLM_API_KEY, if it is set."""

    folder: str | None = None
    """Folder for published adapters, which engines see at the same path. One for each server or trainer."""

    folder_gib: float = Field(default=16.0, gt=0, allow_inf_nan=False)
    """GiB of adapters that stay there though nobody uses them; more are removed, and written again on demand."""

    max_requests: int = Field(default=256, ge=1)
    """Samples that an engine is given at a time: its --max-num-seqs."""

    max_loras: int = Field(default=1, ge=1)
    """Adapters that an engine holds at a time: its --max-loras, which is 1 there as well unless it is given."""

    whole: bool = False
    """Reserve the engines for models of which all weights are trained (rank 0). Each has one version at a time, as its
    base weights, and no adapters; those are sampled here. Servers of vLLM need VLLM_SERVER_DEV_MODE=1 for that."""

    colocated: bool = False
    """Let engines and the trainer use the same devices by turns: while one trains, the others sleep. Servers of vLLM
    need VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode for that."""

    phase_s: float = Field(default=20.0, gt=0, allow_inf_nan=False)
    """Seconds that training or sampling goes on while the other has something to do, where they share devices."""

    reload_method: str = "reload_weights"
    """Method of vLLM's workers that replaces their weights. Engines that are started here have one of ours."""

    max_logprobs: int = Field(default=20, ge=0)
    """Most likely tokens that an engine tells at each place: its --max-logprobs."""

    logprob_bound: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    """Mean difference, in nats, of an engine's log-probabilities from ours past which it does not count as the same
    model. In float32 on both sides it is below 0.001; in bfloat16 some 0.01."""

    check_every_sync: bool = True
    """Compare each version on each engine with ours before its first sample there: 32 tokens after a fixed prompt."""

    sync_logprob_bound: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Mean difference of log-probabilities, in nats, past which that fails. None: ten times what was found of the base
    model and of random adapters when the engine was admitted, but 0.001 at least and logprob_bound at most."""

    stream: bool = True
    """Take tokens as they are drawn, so that samples of an engine that is lost are gone on with elsewhere and not begun
    anew. Start vLLM with --stream-interval 16 or so: each piece costs some 50 microseconds here."""

    connect_timeout_s: float = Field(default=5.0, gt=0, allow_inf_nan=False)
    """Seconds to connect to an engine, and for its sign of life."""

    timeout_s: float = Field(default=120.0, gt=0, allow_inf_nan=False)
    """Seconds that an engine has for anything: a sample (and token_timeout_s for each token), or loading an adapter."""

    token_timeout_s: float = Field(default=0.5, gt=0, allow_inf_nan=False)
    """Seconds for each token that a sample may have, beside timeout_s."""

    health_interval_s: float = Field(default=5.0, gt=0, allow_inf_nan=False)
    """Seconds between an engine's signs of life. One that owes one counts as gone, and its samples are drawn again."""

    start_timeout_s: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    """Seconds that the first engine has to answer when we start."""

    absent_timeout_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """Seconds that samples wait for an engine while none is there that could draw them."""

    def check(self) -> None:
        """Raise `RequestError` if something is missing."""
        if self.count and not self.folder:
            given = f"engines.urls={', '.join(self.urls)}" if self.urls else "engines.launch"
            raise RequestError(
                f"{given} without engines.folder: published adapters reach the engines "
                "through a folder that they see at the same path; name it, on a disk that all machines have if engines "
                "are elsewhere"
            )

    @property
    def count(self) -> int:
        """Engines that there are to be. 0: the backend samples by itself."""
        return len(self.urls) + (0 if self.launch is None else self.launch.count)

    @property
    def key(self) -> str | None:
        """The key to send."""
        return self.api_key or os.environ.get(API_KEY_VARIABLE)
