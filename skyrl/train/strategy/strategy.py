"""Strategies (`trainer.strategy`). A strategy defines supported fields and backend options, and loads a run's models.

To add one, write a module with a subclass of `Strategy`. Add the subclass to `skyrl.train.strategy.registry`, and the
strategy's traits to `skyrl.config.strategies`. `skyrl.config.machinery.uses` says how a field names the backends that
reject it.
"""

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from skyrl.backends.common.sampling.model_runner import CHUNKS
from skyrl.backends.executor.sampling_options import check_values
from skyrl.backends.registry import find_backend, options_of
from skyrl.config import SFTConfig, SkyRLLoraConfig, SkyRLTrainConfig
from skyrl.config.machinery.changes import changed_fields
from skyrl.config.machinery.uses import Status, use_of
from skyrl.config.shared_options import config_overrides
from skyrl.errors import ConfigError, RequestError
from skyrl.train.policies import BackendModels
from skyrl.train.policies.policy import Learner
from skyrl.train.policies.sampling_options import options_of as sampling_options_of
from skyrl.types import AdapterConfig, LoraConfig
from skyrl.utils.expected import expected
from skyrl.utils.spelling import did_you_mean

log = logging.getLogger(__name__)

T = TypeVar("T", bound=BaseModel)

DTYPES = ("auto", "float32", "bfloat16")
"""Types of base weights. auto: the checkpoint's type on an accelerator, float32 on the CPU."""
OF_POLICY = ("engines", "config_overrides")
"""Options of the policy's backend that a separate backend for critic or reference does not take over."""


class Strategy(ABC):
    """A strategy: it translates a configuration into options of a backend, and loads that backend in this process."""

    name: str
    """Name in configurations. The section with the backend's options has the same name."""
    backend: str
    """Name of the backend in `skyrl.backends.registry`."""
    kind: str
    """Name of the backend in the metadata of fields (`skyrl.config.machinery.uses`)."""

    @property
    def architectures(self) -> Collection[str] | None:
        """Supported architectures of base models. None: all that transformers supports."""
        return None

    def refusal(self, config: SkyRLTrainConfig | SFTConfig, path: str) -> str | None:
        """Return the reason why the strategy rejects a field, with an alternative. None if it supports the field."""
        use = use_of(type(config), path, self.kind)
        return use.why if use.status is Status.REFUSED else None

    def unsupported(self, config: SkyRLTrainConfig | SFTConfig) -> Iterator[str]:
        """Yield a message for each rejected field whose value differs from the default."""
        is_rl = isinstance(config, SkyRLTrainConfig)
        field, chosen = ("trainer.strategy", config.trainer.strategy) if is_rl else ("strategy", config.strategy)
        for path, value in changed_fields(config, SkyRLTrainConfig() if is_rl else SFTConfig()):
            if why := self.refusal(config, path):
                yield f"{path}={value} cannot be honoured with {field}={chosen}: {why}"

    @abstractmethod
    def rl_options(self, config: SkyRLTrainConfig) -> dict[str, Any]:
        """Return the options of the backend. Options in its own section override options derived from other fields."""

    @abstractmethod
    def sft_options(self, config: SFTConfig) -> dict[str, Any]:
        """Return the options of the backend for supervised fine-tuning."""

    @abstractmethod
    def problems(self, config: SkyRLTrainConfig) -> Iterator[str]:
        """Yield messages about settings of a resolved configuration that the strategy does not support together."""

    def sft_problems(self, config: SFTConfig) -> Iterator[str]:
        """Yield messages about settings of supervised fine-tuning that the strategy does not support together."""
        yield from ()

    @abstractmethod
    def where_available(self, config: SkyRLTrainConfig) -> str:
        """Return one line for the log: effective values of fields whose defaults need optional capabilities."""

    def record_memory(self, path: Path) -> None:
        """Write a snapshot of the device's memory to a file.

        Required if `trainer.policy.record_memory` is supported.
        """
        raise NotImplementedError(self.name)

    def longest_context(self, config: SkyRLTrainConfig) -> int | None:
        """Return the maximum context length that the configuration sets, in tokens. None: the model's own."""
        return config_overrides(config).get("max_position_embeddings")

    def rl_backend_config(self, config: SkyRLTrainConfig) -> BaseModel:
        """Return the configuration object of the backend, built from a resolved configuration.

        Raises ConfigError for unknown or invalid options in the strategy's section.
        """
        return self._config(self.rl_options(config), f"trainer.{self.name}")

    def sft_backend_config(self, config: SFTConfig) -> BaseModel:
        """Return the configuration object of the backend for supervised fine-tuning."""
        return self._config(self.sft_options(config), self.name)

    def rl_loader(self, config: SkyRLTrainConfig) -> Callable[[], BackendModels]:
        """Return a function that loads the base model of a resolved configuration.

        This method already checks all that can be checked before loading. Both this method and the returned function
        raise ConfigError for settings that cannot be met.
        """
        log.info("%s", self.where_available(config))
        load = self._loader(config.trainer.policy.model.path, self.rl_backend_config(config), f"trainer.{self.name}")

        def load_sampled() -> BackendModels:
            models = load()
            try:
                models.check_samples()
            except RequestError as error:
                models.close()
                raise ConfigError(f"trainer.policy.model.path: {error}") from error
            return models

        return load_sampled

    def options_apart(self, config: SkyRLTrainConfig, model: str) -> dict[str, Any]:
        """Return the options of a separate backend for the critic or the reference (ref)."""
        return self.rl_options(config)

    def loader_apart(self, config: SkyRLTrainConfig, model: str, longest: int) -> Callable[[], BackendModels]:
        """Return a function that loads the critic or the reference (ref) on a separate backend, which does not sample.

        Args:
            config: Resolved configuration.
            model: "critic" or "ref".
            longest: Length of the longest sequence that the model scores, in tokens.
        """
        trainer = config.trainer
        owner = getattr(trainer, model)
        options = {name: value for name, value in self.options_apart(config, model).items() if name not in OF_POLICY}
        overrides = owner.model_config_kwargs
        if not (model == "ref" and trainer.has_teacher):
            overrides = config_overrides(config)
        rank = (trainer.critic if model == "critic" else trainer.policy).model.lora.rank
        options |= {"max_lora_rank": max(1, rank), "kv_cache_gib": 2**-10, "max_context_length": longest}
        options |= {"config_overrides": overrides} if overrides else {}
        options |= {"warm_up": False} if "warm_up" in options_of(find_backend(self.backend)).model_fields else {}
        section = f"trainer.{self.name}"
        path = owner.model.path or trainer.policy.model.path
        return self._loader(path, self._config(options, section), section)

    def sft_loader(self, config: SFTConfig) -> Callable[[], BackendModels]:
        """Return a function that loads the model for supervised fine-tuning."""
        return self._loader(config.model.path, self.sft_backend_config(config), self.name)

    def _config(self, options: dict[str, Any], section: str) -> BaseModel:
        config = built(options_of(find_backend(self.backend)), options, section)
        if getattr(config, "gradient_reduction", "sum") != "sum":
            raise ConfigError(
                f"{section}.gradient_reduction=mean: trainers weight the losses of sequences themselves, so their "
                "gradients are sums; leave it out (trainer.algorithm.loss_reduction chooses the weights of RL)"
            )
        return config

    def _loader(self, base_model: str | None, options: BaseModel, section: str) -> Callable[[], BackendModels]:
        assert base_model is not None  # guaranteed by resolving the configuration
        backend = find_backend(self.backend)

        def load() -> BackendModels:
            try:
                return BackendModels(backend(base_model, options, lambda message: log.info("%s", message)), section)
            except RequestError as error:
                raise ConfigError(f"{error} (options of the backend are set as {section}.<option>)") from error

        return load


def shared_problems(config: SkyRLTrainConfig) -> Iterator[str]:
    """Yield messages about settings that are not supported because one backend both trains and samples."""
    yield from _rope_problems(config)
    yield from _dtype_problems(config)
    yield from _call_problems(config)
    yield from _sampling_problems(config)
    trainer = config.trainer
    for name in ("micro_train_batch_size_per_gpu", "micro_forward_batch_size_per_gpu"):
        if not trainer.use_sample_packing and (rows := getattr(trainer, name)) > 1:
            yield (
                f"trainer.use_sample_packing=False and trainer.{name}={rows}: sequences that are not packed are "
                f"computed one by one; set {name}=1, or use_sample_packing=True"
            )
    policy = trainer.policy.model_config_kwargs
    others = {"critic": trainer.critic.model_config_kwargs}
    if not trainer.has_teacher:
        others["ref"] = trainer.ref.model_config_kwargs
    for name, other in others.items():
        if other and other != policy:
            yield (
                f"trainer.{name}.model_config_kwargs={other} is not trainer.policy.model_config_kwargs={policy}: all "
                "models share the policy's base weights; set it to the policy's, or leave it out"
            )


def _dtype_problems(config: SkyRLTrainConfig) -> Iterator[str]:
    trainer, engine = config.trainer, config.generator.inference_engine
    field = f"generator.inference_engine.model_dtype={engine.model_dtype}"
    if engine.model_dtype not in DTYPES:
        yield f"{field}: weights are in one of {', '.join(DTYPES)}; set it to one"
        return
    if engine.is_given("model_dtype") and trainer.is_given("bf16"):
        ours = "bfloat16" if trainer.bf16 else "float32"
        if engine.model_dtype not in ("auto", ours):
            yield (
                f"{field} and trainer.bf16={trainer.bf16}: the policy samples with the trained weights; set it "
                f"to {ours}, or leave one of them out"
            )


def _call_problems(config: SkyRLTrainConfig) -> Iterator[str]:
    engine = config.generator.inference_engine
    field = f"generator.inference_engine.max_num_batched_tokens={engine.max_num_batched_tokens}"
    if engine.max_num_batched_tokens < CHUNKS[0]:
        yield f"{field}: prompts are read {CHUNKS[0]} tokens at once, or more; set it to {CHUNKS[0]} at least"
    elif engine.is_given("max_num_seqs") and engine.max_num_seqs > engine.max_num_batched_tokens:
        yield (
            f"{field} is below generator.inference_engine.max_num_seqs={engine.max_num_seqs}, and each sequence has a "
            "token in a call; raise it, or lower max_num_seqs"
        )


def _sampling_problems(config: SkyRLTrainConfig) -> Iterator[str]:
    generator = config.generator
    for section in ("sampling_params", "eval_sampling_params"):
        params = getattr(generator, section) or generator.sampling_params
        most = params.max_generate_length or generator.sampling_params.max_generate_length
        try:
            check_values(sampling_options_of(params), most)
        except (ConfigError, RequestError) as error:
            yield f"generator.{section}: {error}"


def _rope_problems(config: SkyRLTrainConfig) -> Iterator[str]:
    """Yield messages about position encodings that differ between rollouts and training."""
    trainer, generator = config.trainer, config.generator
    for name, ours, theirs in (
        ("rope_scaling", trainer.rope_scaling, generator.rope_scaling),
        ("rope_theta", trainer.rope_theta, generator.rope_theta),
    ):
        if ours != theirs:
            yield (
                f"generator.{name}={theirs} is not trainer.{name}={ours}: the policy samples with the weights that "
                f"are trained; set trainer.{name} alone"
            )


def policy_adapter(config: SkyRLTrainConfig) -> LoraConfig:
    """Return the configuration of the policy's adapter. By default, it covers all linear layers except the output
    embedding.

    Rank 0 means that there is no adapter, and all weights are trained. Raises ConfigError for invalid settings.
    """
    trainer = config.trainer
    return _adapter(trainer.policy.model.lora, trainer.seed, "trainer.policy.model.lora")


def critic_adapter(config: SkyRLTrainConfig) -> LoraConfig:
    """Return the configuration of the critic's adapter (see `policy_adapter`)."""
    trainer = config.trainer
    return _adapter(trainer.critic.model.lora, trainer.seed, "trainer.critic.model.lora")


def sft_adapter(config: SFTConfig) -> LoraConfig:
    """Return the configuration of the adapter in supervised fine-tuning (see `policy_adapter`)."""
    return _adapter(config.model.lora, config.seed, "model.lora")


async def create_policy(policy: Learner, config: SkyRLTrainConfig) -> None:
    """Create the policy with its adapter. Raises ConfigError for adapter settings that the base model rejects."""
    with _named("trainer.policy.model.lora"):
        await policy.create(policy_adapter(config))


async def create_critic(critic: Learner, config: SkyRLTrainConfig) -> None:
    """Create the critic with its adapter and a value head (see `create_policy`)."""
    with _named("trainer.critic.model.lora"):
        await critic.create(critic_adapter(config), value_head=True)


async def create_sft(learner: Learner, config: SFTConfig) -> None:
    """Create the model of supervised fine-tuning with its adapter (see `create_policy`)."""
    with _named("model.lora"):
        await learner.create(sft_adapter(config))


@contextmanager
def _named(section: str) -> Iterator[None]:
    """Context that changes errors of a backend: they name adapter options as fields in `section`."""
    try:
        yield
    except RequestError as error:
        fields = "|".join(SkyRLLoraConfig.__dataclass_fields__)
        message, count = re.subn(rf"\blora_config\.(?=({fields})\b)", f"{section}.", str(error))
        if not count:
            raise
        raise ConfigError(message) from error


def _adapter(lora: SkyRLLoraConfig, seed: int, section: str) -> LoraConfig:
    options = {"rank": lora.rank, "alpha": lora.alpha, "seed": seed, "train_unembed": lora.rank == 0}
    named = {
        "target_modules": lora.target_modules,
        "exclude_modules": lora.exclude_modules,
        "init_method": lora.init_method,
        "dropout": lora.dropout,
    }
    more = {name: value for name, value in named.items() if value != getattr(SkyRLLoraConfig(), name)}
    if more and not lora.rank:
        raise ConfigError(
            f"{section}.{min(more)}={more[min(more)]} and {section}.rank=0: there is no adapter; set a rank"
        )
    return built(AdapterConfig if more else LoraConfig, options | more, section)


def built(cls: type[T], options: dict[str, Any], where: str) -> T:
    """Return `cls(**options)`. Raises ConfigError for invalid options. The message names fields as `where.field`."""
    try:
        return cls(**options)
    except ValidationError as error:
        messages: list[str] = []
        for problem in error.errors():
            if problem["type"] == "extra_forbidden":
                near = did_you_mean(str(problem["loc"][-1]), cls.model_fields)
                text = f"there is no such option; known: {', '.join(cls.model_fields)}{near}"
            else:
                text = expected([problem])
            path = ".".join([where, *map(str, problem["loc"])])
            messages.append(f"{path}={problem['input']}: {text}" if problem["loc"] else f"{path}: {text}")
        raise ConfigError("\n".join(messages)) from None
