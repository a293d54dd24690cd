"""Setup for training or evaluating a policy: checks, tokenizer, model loaders, and the checkpoint store."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import NamedTuple, cast

from skyrl.config import SkyRLTrainConfig, get_config_as_dict
from skyrl.envs import check_settings, env_class
from skyrl.errors import ConfigError
from skyrl.train.checkpoints import CheckpointStore
from skyrl.train.policies import Endpoint, Models, Policy
from skyrl.train.ranking import Ranking
from skyrl.train.rl.environment_check import check_rows
from skyrl.train.rl.prompts import TrainingPrompts
from skyrl.train.rl.rollout_source import Source, StalenessPolicy
from skyrl.train.rollouts.chat import Chat, ChatTokenizer
from skyrl.train.rollouts.episode import Prompt
from skyrl.train.rollouts.generators.generator import load_generator
from skyrl.train.rollouts.rollouts import Rollouts, chat_of
from skyrl.train.run_identity import identity_of
from skyrl.train.strategy.base_model import check_base_model, check_model_given, fit_context, load_tokenizer
from skyrl.train.strategy.registry import find_strategy
from skyrl.train.strategy.strategy import Strategy
from skyrl.train.strategy.validate import validate
from skyrl.utils.own_code import import_own

ENDPOINT = "skyrl.endpoint"
"""Module of the HTTP endpoint, which joins the trainer and the server. Both know nothing of it."""
BASE_MODEL, REFERENCE_MODEL = "trainer.policy.model.path", "trainer.ref.model.path"


class Setup(NamedTuple):
    """Parts of a run that are created from a checked configuration, before anything slow is loaded."""

    tokenizer: ChatTokenizer
    chat: Chat
    store: CheckpointStore
    load: Callable[[], AbstractContextManager[Models]]
    """Loads the base model and allocates memory for models."""
    load_reference: Callable[[], AbstractContextManager[Models]] | None
    """Loads the reference. None if it has the policy's base model and runs on the policy's workers."""
    load_critic: Callable[[], AbstractContextManager[Models]] | None
    """Loads the critic. None if it runs on the policy's workers."""

    @classmethod
    def of(cls, config: SkyRLTrainConfig) -> "Setup":
        """Check a resolved configuration. Raises ConfigError for invalid settings."""
        validate(config)
        settings = config.trainer
        path = settings.policy.model.path
        assert path is not None  # or the configuration would not have resolved
        if config.generator.generator_class is None:
            env_class(config.environment.reward_id or config.environment.env_class)
        else:
            load_generator(config.generator.generator_class)
        check_model_given(settings.policy.model, BASE_MODEL, config.example)
        strategy = find_strategy(config)
        longest = check_base_model(path, BASE_MODEL, strategy.architectures)
        fit_context(config, strategy.longest_context(config) or longest)
        load = strategy.rl_loader(config)
        tokenizer = load_tokenizer(path, BASE_MODEL)
        store = CheckpointStore(
            settings.ckpt_path,
            identity=identity_of(config),
            max_to_keep=settings.max_ckpts_to_keep,
            ranking=Ranking.of("trainer.best_metric", settings.best_metric, settings.best_mode),
            settings=get_config_as_dict(config),
        )
        reference = critic = None
        if settings.has_teacher:
            reference = _reference_loader(config, strategy, tokenizer)
        elif "ref" in settings.apart:
            reference = strategy.loader_apart(config, "ref", _longest(config))
        if "critic" in settings.apart:
            critic = strategy.loader_apart(config, "critic", _longest(config))
        return cls(tokenizer, chat_of(config.generator, tokenizer), store, load, reference, critic)


def source_of(config: SkyRLTrainConfig, rollouts: Rollouts, prompts: TrainingPrompts, steps: int) -> Source:
    """Create the source of rollouts for a run of `steps` steps."""
    settings, parallel = config.trainer, config.trainer.fully_async
    staleness = parallel.max_staleness_steps if parallel.enabled else int(settings.one_step_off)
    batch = settings.train_batch_size
    return Source(
        rollouts,
        prompts,
        batch,
        workers=parallel.num_parallel_generation_workers if parallel.enabled else batch * (staleness + 1),
        max_failed_fraction=config.generator.max_failed_fraction,
        steps=steps,
        max_staleness_steps=staleness,
        synchronous=not parallel.enabled,
        staleness_policy=cast(StalenessPolicy, parallel.staleness_policy) if parallel.enabled else "block",
    )


def serve_endpoint(config: SkyRLTrainConfig, policy: Policy, folder: Path, stack: ExitStack) -> None:
    """Serve the policy by HTTP until `stack` is closed, if `enable_http_endpoint` is set. Call it on the event loop.

    Raises ConfigError if the port is in use, or if the run renders chats otherwise than the model's own template does.
    """
    generator, engines = config.generator, config.generator.inference_engine
    if not engines.enable_http_endpoint:
        return
    for field, given in (
        ("chat_template.name_or_path", generator.chat_template.name_or_path),
        ("chat_template_kwargs", generator.chat_template_kwargs),
    ):
        if given:
            raise ConfigError(
                f"generator.{field}={given!r} and generator.inference_engine.enable_http_endpoint=True: the "
                "endpoint renders chats with the model's own template; leave it out, and put it into the model's folder"
            )
    assert generator.eval_sampling_params is not None, "the configuration is resolved"
    temperatures = {generator.sampling_params.temperature, generator.eval_sampling_params.temperature}
    serve_policy = import_own(ENDPOINT).serve_policy
    names = tuple(dict.fromkeys([str(config.trainer.policy.model.path), *filter(None, [engines.served_model_name])]))
    url = serve_policy(policy, temperatures, folder, engines.http_endpoint_host, engines.http_endpoint_port, names)
    cast(Endpoint, policy).address = stack.enter_context(url)


async def check_environments(config: SkyRLTrainConfig, prompts: Sequence[Prompt]) -> None:
    """Raise ConfigError for unknown environments, for rows that their environment rejects, and for unused settings.

    With a custom generator, nothing is checked, because the generator defines the meaning of rows and settings.
    """
    if config.generator.generator_class is None:
        check_settings(config.environment.skyrl_gym, tuple(dict.fromkeys(prompt.env_class for prompt in prompts)))
        await check_rows(config, prompts)


def _reference_loader(
    config: SkyRLTrainConfig, strategy: Strategy, tokenizer: ChatTokenizer
) -> Callable[[], AbstractContextManager[Models]]:
    """Return a loader for a reference that is a different model than the policy.

    Raises ConfigError if the reference has another vocabulary, or is made for sequences that are too short.
    """
    path, policy = config.trainer.ref.model.path, config.trainer.policy.model.path
    assert path is not None
    overrides = config.trainer.ref.model_config_kwargs
    longest = check_base_model(path, REFERENCE_MODEL, strategy.architectures)
    longest = overrides.get("max_position_embeddings", longest)
    needed = _longest(config)
    if longest is not None and longest < needed:
        raise ConfigError(
            f"{REFERENCE_MODEL}={path} was made for {longest} tokens, and sequences may have {needed} "
            "(generator.max_input_length and sampling_params.max_generate_length); lower them"
        )
    if load_tokenizer(path, REFERENCE_MODEL).get_vocab() != tokenizer.get_vocab():
        raise ConfigError(
            f"{REFERENCE_MODEL}={path}: its vocabulary differs from that of {BASE_MODEL}={policy}; a reference "
            "must share the tokenizer of the policy, so use a model of the same family"
        )
    return strategy.loader_apart(config, "ref", needed)


def _longest(config: SkyRLTrainConfig) -> int:
    """Return the length of the longest training sequence, in tokens."""
    generator = config.generator
    assert generator.max_input_length is not None, "the configuration is resolved"
    return generator.max_input_length + generator.sampling_params.max_generate_length
