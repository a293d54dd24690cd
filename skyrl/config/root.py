"""The whole configuration of an RL run: data, trainer, generator and environment, and rules that span them."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, make_dataclass
from typing import Any, TypeVar

from skyrl.config.algorithm import AlgorithmConfig
from skyrl.config.environment import EnvironmentConfig
from skyrl.config.generator import GeneratorConfig
from skyrl.config.machinery.base import BaseConfig
from skyrl.config.machinery.fields import OneOrMore
from skyrl.config.rules.geometry import BatchGeometry
from skyrl.config.rules.root import root_cautions, root_problems
from skyrl.config.trainer import TrainerConfig
from skyrl.errors import ConfigError

T = TypeVar("T", bound=BaseConfig)


def _gsm8k(split: str) -> list[str]:
    return [os.path.expanduser(f"~/data/gsm8k/{split}.parquet")]


@dataclass
class DataConfig(BaseConfig):
    """Prompts: .parquet, .json, .jsonl or .csv files, or data sets of the Hugging Face hub (name, or name:split)."""

    train_data: OneOrMore = field(default_factory=lambda: _gsm8k("train"))
    """Data to train on. Sources are read in the given order. May be empty ([]) with trainer.eval_only."""

    val_data: OneOrMore = field(default_factory=lambda: _gsm8k("validation"))
    """Data to evaluate on. If only train_data is set: the default file, or no data if that file does not exist."""


@dataclass
class SkyRLTrainConfig(BaseConfig):
    """Configuration of an RL run."""

    data: DataConfig = field(default_factory=DataConfig)
    """Prompts."""

    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """Training of the policy."""

    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    """Generation of rollouts."""

    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    """Environment in which rollouts act."""

    @classmethod
    def translate(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return `given`. Raises ConfigError if the old field `generator.model_name` differs from the policy's path."""
        name = _at(given, "generator", "model_name")
        path = _at(given, "trainer", "policy", "model", "path") or cls().trainer.policy.model.path
        if name is not None and str(name) != str(path):
            raise ConfigError(
                f"generator.model_name={name} is not trainer.policy.model.path={path}, which is what is sampled; leave "
                "generator.model_name out"
            )
        return given

    def geometry(self, model: str = "policy") -> BatchGeometry:
        """Return how the batch of a model (policy, critic or ref) is divided.

        In a resolved configuration, all divisions are without remainder.
        """
        trainer = self.trainer
        scores_only = model == "ref"
        return BatchGeometry(
            model=model,
            prompts=trainer.train_batch_size,
            samples_per_prompt=self.generator.n_samples_per_prompt,
            mini_batch_prompts=trainer.train_batch_size
            if scores_only
            else getattr(trainer, f"{model}_mini_batch_size"),
            ranks=trainer.gpus(model) // trainer.model_parallel_size(model),
            micro_batch_rows=1 if scores_only else trainer.micro_train_batch_size_per_gpu,
            forward_batch_rows=trainer.micro_forward_batch_size_per_gpu,
        )

    @property
    def example(self) -> str:
        """Example of a command line. It trains on a file that `python -m skyrl.envs.tasks.arithmetic_data` writes."""
        return (
            "skyrl train rl trainer.policy.model.path=Qwen/Qwen3-0.6B trainer.policy.model.lora.rank=32 "
            "data.train_data=train.jsonl environment.env_class=arithmetic trainer.train_batch_size=8 "
            "trainer.policy_mini_batch_size=8 generator.sampling_params.max_generate_length=64"
        )

    @property
    def restarts(self) -> int:
        """Maximum number of restarts of this run. 0 if the run does not resume from its newest checkpoint."""
        trainer = self.trainer
        return trainer.max_restarts if trainer.resume_mode == "latest" and not trainer.eval_only else 0

    def derive(self) -> None:
        trainer, generator, data = self.trainer, self.generator, self.data
        if data.is_given("train_data") and not data.is_given("val_data"):
            data.fill_in("val_data", [path for path in data.val_data if os.path.exists(path)])
        if not data.val_data and not trainer.eval_only:
            for name, off in (("eval_interval", 0), ("eval_before_train", False)):
                if not trainer.is_given(name):
                    trainer.fill_in(name, off)
        if generator.max_input_length is None:
            turn = trainer.max_prompt_length + generator.sampling_params.max_generate_length
            generator.fill_in("max_input_length", trainer.max_prompt_length + (generator.max_turns - 1) * turn)
        if generator.rope_scaling is None:
            generator.rope_scaling = trainer.rope_scaling
        if generator.rope_theta is None:
            generator.rope_theta = trainer.rope_theta
        algorithm = trainer.algorithm
        if algorithm.temperature is None:
            algorithm.temperature = generator.sampling_params.temperature
        if algorithm.max_seq_len is None and generator.max_turns == 1:
            algorithm.max_seq_len = trainer.max_prompt_length + generator.sampling_params.max_generate_length

    def problems(self) -> Iterator[str]:
        return root_problems(self)

    def cautions(self) -> Iterator[str]:
        return root_cautions(self)


def make_config(
    algorithm_cls: type[AlgorithmConfig] | None = None,
    trainer_cls: type[TrainerConfig] | None = None,
    generator_cls: type[GeneratorConfig] | None = None,
) -> type[SkyRLTrainConfig]:
    """Return a subclass of `SkyRLTrainConfig` in which some sections have your own classes.

    Args:
        algorithm_cls: Class of `trainer.algorithm`; ignored if `trainer_cls` is given.
        trainer_cls: Class of `trainer`.
        generator_cls: Class of `generator`.
    """
    if trainer_cls is None and algorithm_cls is not None:
        trainer_cls = _with_fields(f"_{algorithm_cls.__name__}TrainerConfig", TrainerConfig, algorithm=algorithm_cls)
    given: dict[str, type[BaseConfig] | None] = {"trainer": trainer_cls, "generator": generator_cls}
    classes = {name: cls for name, cls in given.items() if cls is not None}
    return _with_fields("_CustomSkyRLTrainConfig", SkyRLTrainConfig, **classes)


def _with_fields(name: str, base: type[T], **classes: type[BaseConfig]) -> type[T]:
    members = [(member, cls, field(default_factory=cls)) for member, cls in classes.items()]
    return make_dataclass(name, members, bases=(base,), namespace={"__doc__": base.__doc__})


def _at(tree: Any, *path: str) -> Any:
    for name in path:
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree
