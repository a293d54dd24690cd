"""Options of a server: one frozen class, and one parser for all commands.

`EngineConfig` has the options. `parse_config` reads them from the command line, `SKYRL_*` and `TX_*` environment
variables, in this order of precedence. `skyrl serve` and `python -m skyrl.tinker.api` both call it. To add an option,
add a field with a docstring: its flag, help text and environment variables are derived from it.
"""

import argparse
import ipaddress
import json
import os
import re
import socket
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, cast, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from skyrl.errors import RequestError
from skyrl.tinker.identity.ids import NAMED, tenant_of_key
from skyrl.tinker.identity.key_file import SDK_PREFIX, ApiKey, parse_keys, read_key_file
from skyrl.utils.arguments import ArgumentParser
from skyrl.utils.console import say_error
from skyrl.utils.expected import expected
from skyrl.utils.fairness import HEAVIEST, LIGHTEST
from skyrl.utils.files.object_store import check_url, is_url
from skyrl.utils.files.paths import bucket_folder, data_folder
from skyrl.utils.log import LogFormat
from skyrl.utils.spelling import did_you_mean

ENVIRONMENT_PREFIXES = ("SKYRL_", "TX_")
"""Prefixes of environment variables; the rest is the field's name in capitals. Earlier prefixes take precedence."""

SEEN = "every user of the machine sees command lines"
SECRET = ("api_keys", "operator_keys", "tenant_weights", "external_inference_api_key", "database_url")
"""Options whose values are never printed."""
KEYS = {"api_keys": "api_keys_file", "operator_keys": "operator_keys_file"}
"""Option that names a key file, by the option that lists keys. An empty value of either option is an error, because
keys are meant to restrict access.
"""

STATE = data_folder()
"""Default folder of persistent state."""


def without_password(url: str) -> str:
    """Return a URL with its password masked."""
    hidden = re.sub(r"(://[^:@/?]*):.*@", r"\1:***@", url)
    return re.sub(r"([?&][^=&]*pass[^=&]*)=[^&]*", r"\1=***", hidden)


def _json_object(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error}); write an object such as '{{\"max_lora_rank\": 64}}'") from None


def _comma_separated(value: object) -> object:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


JsonObject = Annotated[dict[str, Any], BeforeValidator(_json_object)]
Names = Annotated[tuple[str, ...], BeforeValidator(_comma_separated)]


class EngineConfig(BaseModel):
    """Options of a Tinker server."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())

    base_model: str | None = None
    """Model to serve: a Hugging Face hub id or a local folder. Default: a tiny Qwen3 with random weights."""

    model_aliases: Names = ()
    """Additional names of the base model for clients, separated by commas."""

    backend: str | None = None
    """Backend: "jax", "torch" (other names: "skyrl_train", "fsdp2", "fsdp"), or module:attribute of a custom class.
    Default: torch if it is installed and finds a GPU, otherwise jax."""

    backend_config: JsonObject = Field(default_factory=dict)
    """Options of the backend as a JSON object, for example '{"max_lora_rank": 64}'."""

    checkpoints_base: Path | str = STATE / "checkpoints"
    """Folder for checkpoints, or s3://bucket/prefix (also gs:// and az://) for named checkpoints. Snapshots and unnamed
    versions then stay on disk, in buckets/ below the data folder, unless snapshots_in_bucket is set."""

    snapshots_in_bucket: bool = False
    """Store snapshots and unnamed versions in the bucket of checkpoints_base, too. The server can then continue on
    another machine with only the bucket and the database."""

    database_url: str = f"sqlite:///{STATE / 'tinker.db'}"
    """SQLAlchemy URL of the database (SQLite or PostgreSQL)."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for every interface, which requires keys (api_keys_file)."""

    insecure: bool = False
    """Allow listening without keys on an address that other machines can reach. Everybody there can then use and delete
    everything."""

    port: int = Field(8000, ge=0, le=65535)
    """Port to listen on; 0 picks a free one."""

    public_url: str | None = None
    """URL at which clients reach this server through a proxy, including a path prefix that the proxy strips, for
    example https://host/tinker. Links to files begin with it. Default: the host in the client's request."""

    api_keys_file: Path | None = None
    """File with the API keys of clients, one per line, readable only by the owner. A line is a key that begins with
    tml-, or a name (such as alice) and a key; operators then see the name. Without keys, every key is accepted. If a
    line ends with the id of an older key (key-...), the new key replaces the older one and owns the older key's data.
    """

    api_keys: Names = Field((), repr=False)
    """Additional API keys, separated by commas. Only in the environment (SKYRL_API_KEYS), because every user of the
    machine can see command lines."""

    operator_keys_file: Path | None = None
    """File with the keys of operators, one per line, readable only by the owner. Operators may read /metrics and use
    skyrl status, models, requests and usage. If no operator keys are set, everybody is an operator on a server without
    API keys, and nobody on other servers."""

    operator_keys: Names = Field((), repr=False)
    """Additional operator keys, separated by commas. Only in the environment (SKYRL_OPERATOR_KEYS)."""

    tenant_weights: JsonObject = Field(default_factory=dict, repr=False)
    """Relative shares of keys when their requests compete for the machine. A JSON object by names or ids of keys, for
    example '{"alice": 2}'. Other keys have weight 1."""

    session_timeout_sec: int = Field(300, ge=-1)
    """Seconds of silence after which a session's models are parked on disk until the next request; -1: park them only
    when they expire (session_retention_sec)."""

    session_cleanup_interval_sec: int = Field(60, ge=-1)
    """Interval in seconds at which idle models are parked and garbage is collected; -1: never."""

    shutdown_timeout_sec: float = Field(8, ge=0, allow_inf_nan=False)
    """Seconds after SIGTERM or Ctrl-C in which the server finishes open requests, last snapshots and writes. Unfinished
    work is replayed at the next start."""

    snapshot_every_steps: int = Field(10, ge=1)
    """Optimizer steps between two snapshots of a model. After a crash, requests since the last snapshot are replayed.
    """

    snapshot_every_requests: int = Field(64, ge=1)
    """Maximum number of requests between two snapshots of a model."""

    snapshot_every_mib: int = Field(64, ge=1)
    """Maximum size of requests between two snapshots of a model, in MiB."""

    result_retention_sec: int = Field(24 * 3600, ge=600)
    """Seconds for which the result of a training request can be read again, and for which a captured session is kept
    after its last request."""

    max_results_gib: float = Field(4, ge=0, allow_inf_nan=False)
    """Maximum size of results in the database, in GiB. Above this size, the oldest results are removed, except those
    younger than 10 minutes. 0: no limit."""

    ephemeral_grace_sec: int = Field(3600, ge=0)
    """Seconds for which unnamed versions are kept after the end of their session. A session ends when its client
    finishes it, or after a day of silence."""

    keep_last_ephemeral: int = Field(8, ge=0)
    """Number of newest unnamed versions that a model keeps during its session. Versions in use (see ephemeral_idle_sec)
    and versions that are not on disk yet are kept, too. 0: all."""

    max_ephemeral_gib: float = Field(0, ge=0, allow_inf_nan=False)
    """Maximum size of a model's unnamed versions, in GiB. Above this size, the oldest versions are removed, except the
    newest version and those in use. 0: no limit."""

    ephemeral_idle_sec: int = Field(600, ge=0)
    """Seconds after its creation or last sample for which an unnamed version counts as in use."""

    session_retention_sec: int = Field(30 * 24 * 3600, ge=0)
    """Seconds after the end of a session for which its requests are kept and, if it ended by silence, its models can be
    used again. Checkpoints are kept longer."""

    keep_last_checkpoints: int = Field(0, ge=0)
    """Number of newest checkpoints that a model keeps per kind (training, sampler, external), in addition to public
    checkpoints. 0: all."""

    trash_retention_sec: int = Field(7 * 24 * 3600, ge=0)
    """Seconds for which expired and surplus checkpoints and unreferenced files stay in .trash, below checkpoints_base.
    They are removed earlier if a save needs the space. 0: no trash."""

    max_disk_gib: float = Field(0, ge=0, allow_inf_nan=False)
    """Maximum size of checkpoints, versions, snapshots and .trash in GiB; saves that would exceed it are rejected. 0:
    no limit."""

    min_free_disk_mib: int = Field(256, ge=0)
    """Minimum free space on the disk of checkpoints_base, in MiB; saves that would leave less are rejected."""

    long_poll_s: float = Field(20.0, gt=0, le=40)
    """Maximum seconds that a retrieve_future request waits for its result (clients time out after 45)."""

    refused_losses: Names = ()
    """Losses that clients must not use, separated by commas, such as stable_reinforce (whose estimator is this
    project's own)."""

    max_body_bytes: int = Field(256 * 2**20, ge=2**20)
    """Maximum size of a request body in bytes, after decompression."""

    gap_timeout_s: float = Field(300.0, gt=0)
    """Timeout in seconds for a missing seq_id: if a model gets no new requests for this time, requests that wait for
    an earlier seq_id fail."""

    engine_heartbeat_timeout_sec: float = Field(60, ge=0, allow_inf_nan=False)
    """Seconds without a heartbeat after which the engine process counts as hung and is killed and restarted; 0: never.
    """

    compute_timeout_sec: float = Field(3600, ge=0, allow_inf_nan=False)
    """Timeout in seconds for one step of the engine (a batch of passes, an optimizer step, a few decoded tokens, each
    with its compilation), after which the engine counts as hung; 0: no timeout."""

    load_timeout_sec: float = Field(3600, ge=0, allow_inf_nan=False)
    """Timeout in seconds for the start of the engine process, and then for each reported stage of loading the model
    (such as reading the weights), after which the engine counts as hung; 0: no timeout."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest severity to log."""

    log_format: LogFormat = "text"
    """Format of log lines: text, or json with one object per line."""

    access_log: bool = False
    """Log a line for each response: method, route, status, bytes, milliseconds, tenant, address."""

    external_inference_url: Names = ()
    """URLs of vLLM servers that generate samples, separated by commas (backend torch). This server trains, and it
    generates the samples that the vLLM servers do not support. More options: backend_config
    '{"engines": {"max_loras": 4}}'."""

    external_inference_api_key: str | None = Field(None, repr=False)
    """API key of these vLLM servers. Better set SKYRL_EXTERNAL_INFERENCE_API_KEY or VLLM_API_KEY: every user of the
    machine can see command lines."""

    external_inference_lora_base: str | None = None
    """Folder through which adapters reach these vLLM servers, which see it at the same path. Only this server may use
    it."""

    forwarding_inference_max_connections: int | None = Field(None, ge=1)
    """Maximum number of concurrent samples per vLLM server. Set it to the server's --max-num-seqs. Default: 256."""

    @field_validator("refused_losses", mode="after")
    @classmethod
    def _known_losses(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        from skyrl.algorithms.losses import CUSTOM, LOSSES  # imports NumPy, which takes 0.2 s

        for name in names:
            if name not in (*LOSSES, CUSTOM):
                known = (*LOSSES, CUSTOM)
                raise ValueError(f"{name!r} is no loss; known: {', '.join(known)}{did_you_mean(name, known)}")
        return names

    @field_validator("public_url", mode="after")
    @classmethod
    def _is_a_base(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if not re.fullmatch(r"https?://[^/?#@\s]+(/[^?#\s]*)?", value):
            raise ValueError("it is no URL to which a path can be added; write one such as https://host/tinker")
        return value.rstrip("/")

    @field_validator("checkpoints_base", mode="before")
    @classmethod
    def _folder_or_bucket(cls, value: object) -> Path | str:
        if is_url(str(value)):
            try:
                check_url(str(value))
            except RequestError as error:
                raise ValueError(str(error).removeprefix(f"path={value}: ")) from None
            return str(value).rstrip("/")
        return Path(str(value)).expanduser().absolute()

    @field_validator(*KEYS, *KEYS.values(), mode="before")
    @classmethod
    def _not_empty(cls, value: object) -> object:
        if isinstance(value, str) and not value.strip(", "):
            raise ValueError("it contains no keys; write one, or leave the option out to serve without keys")
        return value

    @field_validator("api_keys", mode="after")
    @classmethod
    def _valid_keys(cls, entries: tuple[str, ...]) -> tuple[str, ...]:
        _, problems = _parsed(entries)
        if problems:
            raise ValueError(problems[0])
        return entries

    @field_validator("tenant_weights", mode="after")
    @classmethod
    def _in_bounds(cls, weights: dict[str, Any]) -> dict[str, float]:
        for name, weight in weights.items():
            number = isinstance(weight, int | float) and not isinstance(weight, bool)
            if not (number and LIGHTEST <= weight <= HEAVIEST):
                raise ValueError(
                    f"{_named(name)} weighs {weight!r}; give it a number from {LIGHTEST:g} to {HEAVIEST:g} "
                    "(others weigh 1)"
                )
        return weights

    @model_validator(mode="before")
    @classmethod
    def _keys_of_file(cls, values: Any) -> Any:
        """Add the keys of key files to `api_keys` and `operator_keys`."""
        for name, file in KEYS.items():
            if isinstance(values, dict) and values.get(file):
                given = cast(Sequence[str], _comma_separated(values.get(name, ())))
                values = {**values, name: tuple(dict.fromkeys([*given, *_read_keys(name, Path(values[file]))]))}
        return values

    @model_validator(mode="after")
    def _others_need_keys(self) -> "EngineConfig":
        if not (is_loopback(self.host) or self.api_keys or self.insecure):
            raise ValueError(
                f"host={self.host}: it is reachable from other machines and no API keys are set; set --api-keys-file, "
                "or --insecure to allow access without keys"
            )
        return self

    @model_validator(mode="after")
    def _engines_are_whole(self) -> "EngineConfig":
        if self.external_inference_url and not self.external_inference_lora_base:
            raise ValueError(
                f"external_inference_url={', '.join(self.external_inference_url)} without "
                "external_inference_lora_base: adapters reach those servers through a folder that they see at the same "
                "path; name it"
            )
        for name in (
            "external_inference_lora_base",
            "external_inference_api_key",
            "forwarding_inference_max_connections",
        ):
            if not self.external_inference_url and getattr(self, name) is not None:
                raise ValueError(
                    f"{name} is set without external_inference_url, so no such server is asked; set that too"
                )
        return self

    @model_validator(mode="after")
    def _snapshots_have_a_bucket(self) -> "EngineConfig":
        if self.snapshots_in_bucket and self.checkpoints_bucket is None:
            raise ValueError(
                f"snapshots_in_bucket: checkpoints_base={self.checkpoints_base} is a folder; set --checkpoints-base to "
                "s3://bucket/prefix, or leave the option out"
            )
        return self

    @property
    def checkpoints_bucket(self) -> str | None:
        """URL prefix of named checkpoints; None if they are in `checkpoints_folder`."""
        return self.checkpoints_base if isinstance(self.checkpoints_base, str) else None

    @property
    def snapshots_bucket(self) -> str | None:
        """URL prefix of snapshots and the state id; None if they are in `checkpoints_folder`."""
        return self.checkpoints_bucket if self.snapshots_in_bucket else None

    @property
    def checkpoints_folder(self) -> Path:
        """Folder on disk for everything that is not in `checkpoints_bucket`."""
        base = self.checkpoints_base
        return bucket_folder(base) if isinstance(base, str) else base

    def path_of(self, folder: str) -> str:
        """Return the path or URL of a folder that the database names MODEL/KIND/NAME."""
        bucket = self.checkpoints_bucket if folder.split("/")[1] in NAMED else self.snapshots_bucket
        return str(self.checkpoints_folder / folder) if bucket is None else f"{bucket}/{folder}"

    def folder_of(self, path: str) -> str:
        """Return the name MODEL/KIND/NAME of the folder at a path or URL."""
        if is_url(path):
            return path.removeprefix(f"{self.checkpoints_bucket}/")
        return str(Path(path).relative_to(self.checkpoints_folder))

    @property
    def engines(self) -> dict[str, Any]:
        """Options of the backend's sampling engines; empty without `external_inference_url`."""
        if not self.external_inference_url:
            return {}
        given = {
            "urls": self.external_inference_url,
            "folder": self.external_inference_lora_base,
            "api_key": self.external_inference_api_key,
            "max_requests": self.forwarding_inference_max_connections,
        }
        return {name: value for name, value in given.items() if value is not None}

    def without_secrets(self) -> "EngineConfig":
        """Return the options for the engine, without keys and database URL. Their `tenant_weights` are by tenant."""
        hidden = {"api_keys": (), "operator_keys": (), "tenant_weights": self.weights, "database_url": ""}
        return self.model_copy(update=hidden)

    @model_validator(mode="after")
    def _weights_are_of_keys(self) -> "EngineConfig":
        known = self._tenants_by_any_name
        for name in self.tenant_weights:
            if name not in known:
                raise ValueError(
                    f"tenant_weights: {_named(name)} is the name of none of the keys; correct it, or leave it out"
                )
        if len(self.weights) < len(self.tenant_weights):
            raise ValueError("tenant_weights: duplicate key, given by two of its names; leave out one of them")
        return self

    @property
    def weights(self) -> dict[str, float]:
        """Weights by tenant; all other tenants have weight 1."""
        known = self._tenants_by_any_name
        return {known.get(name, name): weight for name, weight in self.tenant_weights.items()}

    @property
    def _keys(self) -> list[ApiKey]:
        return _parsed(self.api_keys)[0]

    @property
    def tenants(self) -> dict[str, str]:
        """Tenant of each key: the key's id (a hash), or the id of the older key that the key replaces."""
        return {key.key: key.tenant for key in self._keys}

    @property
    def display_names(self) -> dict[str, str]:
        """Name that operators see, by tenant: the name in the key file, or the tenant itself. Names are not secret."""
        keys = self._keys
        return {key.tenant: key.tenant for key in keys} | {key.tenant: key.name for key in keys if key.name}

    @property
    def _tenants_by_any_name(self) -> dict[str, str]:
        """Tenant by key, by display name and by tenant."""
        names = {name: tenant for tenant, name in self.display_names.items()}
        return {**names, **self.tenants, **{tenant: tenant for tenant in names.values()}}


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach the address."""
    name = host.removeprefix("[").removesuffix("]").lower()
    numbers = re.fullmatch(r"[0-9a-fx.]+", name)  # the system accepts fewer than four numbers: 127.1
    try:
        address = ipaddress.ip_address(socket.inet_aton(name) if numbers else name)
    except (ValueError, OSError):
        return name == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def is_any(host: str) -> bool:
    """Return True if a server with this host listens on all addresses of the machine."""
    return host.removeprefix("[").removesuffix("]") in ("0.0.0.0", "::")


def url_of(host: str, port: int) -> str:
    """Return the URL at which programs of this machine reach a server with this host and port."""
    name = host.removeprefix("[").removesuffix("]")
    name = "127.0.0.1" if is_any(name) else f"[{name}]" if ":" in name else name
    return f"http://{name}:{port}"


def _names(weights: str) -> list[str]:
    """Return the names of a JSON object's members. Returns [] for other text, which is reported elsewhere."""
    try:
        given = json.loads(weights)
    except json.JSONDecodeError:
        return []
    return list(given) if isinstance(given, dict) else []


def _parsed(entries: Sequence[str]) -> tuple[list[ApiKey], list[str]]:
    return parse_keys(enumerate(entries, 1), "key", spaces=True)


def _read_keys(name: str, file: Path) -> list[str]:
    """Return the lines of a key file for the option `name`. Raises `ValueError` if a line is wrong."""
    option = KEYS[name]
    lines = read_key_file(option, file)
    if name == "api_keys":
        _, problems = parse_keys(lines)
    else:  # the SDK sends no operator keys, and they have no tenants
        spaces = [number for number, line in lines if len(line.split()) > 1]
        problems = [f"line {number}: unexpected space; write one key per line" for number in spaces]
    if problems:
        others = f" ({len(problems) - 1} more lines are wrong: skyrl keys list)" if problems[1:] else ""
        raise ValueError(f"{option}={file}: {problems[0]}{others}")
    return [line for _, line in lines]


def _named(name: str) -> str:
    """Return a description of a key or its name for messages, which must not contain keys."""
    return f"the key with the id {tenant_of_key(name.encode())}" if name.startswith(SDK_PREFIX) else repr(name)


def parse_config(
    argv: Sequence[str] | None = None, *, prog: str | None = None, environ: Mapping[str, str] = os.environ
) -> EngineConfig:
    """Read options from `argv` (default: the process's arguments), then the environment, then the defaults.

    Prints one line and exits with status 2 on an unknown option or an invalid value.
    """
    description = (
        "Serve the Tinker API. With --plan, skyrl serve starts nothing: it says whether the model fits on this "
        "machine, and what limits its speed."
    )
    return read_config(options_parser(prog, description), argv, environ)[0]


def options_parser(prog: str | None, description: str) -> ArgumentParser:
    """Create a parser of the server's options, for `read_config`. Commands may add their own options."""
    parser = _OneLineErrors(
        prog=prog,
        description=description,
        epilog="Every option can also be set as an environment variable: SKYRL_BASE_MODEL for --base-model. "
        "The command line wins over SKYRL_*, which wins over TX_*.",
        allow_abbrev=False,
    )
    for name, field in EngineConfig.model_fields.items():
        words: dict[str, Any] = {"nargs": "?", "const": "true"} if field.annotation is bool else {}
        parser.add_argument(
            _flag(name), default=argparse.SUPPRESS, metavar=_metavar(name, field), help=_help(field), **words
        )
    return parser


def read_config(
    parser: ArgumentParser, argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ
) -> tuple[EngineConfig, dict[str, Any]]:
    """Parse options. Returns (options of the server, options that the command added)."""
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    for name in EngineConfig.model_fields:
        for variable in (prefix + name.upper() for prefix in ENVIRONMENT_PREFIXES):
            given_there = environ.get(variable) or (variable in environ and name in {*KEYS, *KEYS.values()})
            if given_there and name not in values:
                values[name], origins[name] = environ[variable], variable
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        shown = " ".join(map(_without_value, unknown))
        parser.error(f"unrecognized arguments: {shown}{parser.suggestion(unknown)}")
    given = vars(known)
    for name in KEYS.keys() & given.keys():
        parser.error(
            f"{_flag(name)}: {SEEN}; put the keys into a file, one in each line, and name it with {_flag(KEYS[name])}"
        )
    if any(name.startswith(SDK_PREFIX) for name in _names(given.get("tenant_weights", "{}"))):
        parser.error(f"--tenant-weights: {SEEN}; write the names or ids of keys, which skyrl keys list prints")
    if without_password(url := given.get("database_url", "")) != url:
        parser.error(f"--database-url has a password, and {SEEN}; set SKYRL_DATABASE_URL, or leave it to ~/.pgpass")
    for name in EngineConfig.model_fields.keys() & given.keys():
        values[name], origins[name] = given.pop(name), _flag(name)
    try:
        return EngineConfig.model_validate(values), given
    except ValidationError as error:
        parser.error(describe(error, origins))


def _without_value(argument: str) -> str:
    """Return a misspelt option without its value, which may be a secret."""
    return argument.partition("=")[0] if argument.startswith("--") else "..."


def describe(error: ValidationError, origins: Mapping[str, str] | None = None, known: Collection[str] = ()) -> str:
    """Describe validation errors in one line: "option=value: problem; ...".

    Args:
        error: Validation error of a configuration.
        origins: Name of each option as the user wrote it (a flag, a variable), by path of the field.
        known: Names of the existing options. The message suggests one of them for a misspelt option.
    """
    problems = []
    for problem in error.errors():
        path = ".".join(str(part) for part in problem["loc"])
        name = (origins or {}).get(path, path)
        if problem["type"] == "extra_forbidden":
            problems.append(f"{name}: there is no such option{did_you_mean(path, known)}")
        else:
            # Errors of cross-field checks name the options themselves.
            value = "" if not path else f"{name}: " if path in SECRET else f"{name}={problem['input']}: "
            problems.append(value + expected([problem]))
    return "; ".join(problems)


class _OneLineErrors(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        say_error(f"{self.prog}: error: {message} (--help lists the options)")
        raise SystemExit(2)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _metavar(name: str, field: FieldInfo) -> str:
    if get_origin(field.annotation) is dict:
        return "JSON"
    if field.annotation in (Path, Path | str):
        return "FOLDER"
    if field.annotation in (int, float):
        return "N"
    return name.rsplit("_", 1)[-1].upper()


def _help(field: FieldInfo) -> str:
    """Return the field's docstring and default, with % escaped for argparse."""
    default = field.default
    text = field.description or ""
    if default not in (None, (), PydanticUndefined):
        text += f" Default: {default}."
    return text.replace("%", "%%")
