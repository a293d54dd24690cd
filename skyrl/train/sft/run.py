"""Complete runs of supervised fine-tuning (`skyrl train sft`) or preference optimization (`skyrl train dpo`)."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace

from skyrl.config import SFTConfig, get_config_as_dict
from skyrl.errors import ConfigError
from skyrl.train.callbacks import load_callbacks
from skyrl.train.data.loaders import Loader, as_it_is
from skyrl.train.places import place_of
from skyrl.train.policies import Learner, Models
from skyrl.train.sft import load_datasets
from skyrl.train.sft.conversations import ChatTokenizer
from skyrl.train.sft.limits import check_rows
from skyrl.train.sft.methods import MODEL, Method, method_of
from skyrl.train.sft.trainer import SFTTrainer, Summary, checked_order, checkpoint_store, resume_mode
from skyrl.train.strategy.base_model import check_base_model, check_model_given, load_tokenizer
from skyrl.train.strategy.registry import find_strategy
from skyrl.train.strategy.strategy import create_sft
from skyrl.train.strategy.validate import validate_sft
from skyrl.train.tracking.clients import RunInfo
from skyrl.train.tracking.metrics import Metrics
from skyrl.train.tracking.reporting import closing_summary, reporting
from skyrl.train.tracking.tracker import METRICS_FILE
from skyrl.utils.console import say

log = logging.getLogger(__name__)

BASE_MODEL = "model.path"


async def train_sft(config: SFTConfig, loader: Loader = as_it_is) -> Summary:
    """Train with a resolved configuration, and print a summary. Raises ConfigError for invalid settings or data.

    Args:
        config: Resolved configuration.
        loader: Function that converts each row of the data to a kind that `RowReader` or `PairReader` knows.
    """
    load, tokenizer = _checked(config)
    callbacks = load_callbacks(config.callbacks, "callbacks")
    train, evaluation = load_datasets(config, tokenizer, loader)
    check_rows(config, (*train, *evaluation), tokenizer)
    order = checked_order(config, train)
    with ExitStack() as stack:
        models = stack.enter_context(load())
        learner = models.learner(MODEL)
        method = method_of(config, learner, models.learner)

        def told(metrics: Metrics, step: int) -> None:
            report(metrics, step)

        trainer = SFTTrainer(
            config, learner, train, evaluation, report=told, method=method, callbacks=callbacks, order=order
        )
        resumed = await trainer.resume()
        if resumed is None and config.init_from:
            await _begin_with(config.init_from, config, learner, method)
        elif resumed is None:
            await create_sft(learner, config)
        if resumed is not None and resumed >= trainer.total_steps:
            log.info("all %d steps were taken before; raise num_epochs or num_steps to go on", trainer.total_steps)
        folder = config.ckpt_path or config.export_path or config.run_name
        report = stack.enter_context(
            reporting(
                folder,
                config.logger,
                RunInfo(
                    config.project_name,
                    config.run_name,
                    trainer.run_id or config.run_name,
                    get_config_as_dict(config),
                    config.log_interval,
                ),
                total_steps=trainer.total_steps,
                resumed_step=resumed,
                shown=method.shown,
            )
        )
        summary = await trainer.run()
    metrics = {"metrics": place_of(folder).folder / METRICS_FILE}
    say(closing_summary(str(summary), trainer.places() | metrics))
    return summary


async def evaluate_sft(config: SFTConfig) -> Metrics:
    """Evaluate the model on `eval_datasets`, print the losses and return them (`eval_only`).

    The model is the first of these that exists: the checkpoint of `resume_from`, the checkpoint of `init_from`, the
    base model. Another process may be training at the same time. Raises ConfigError for invalid settings or data.
    """
    load, tokenizer = _checked(config)
    _, evaluation = load_datasets(replace(config, train_datasets=[]), tokenizer)
    check_rows(config, evaluation, tokenizer)
    where = config.init_from
    with ExitStack() as stack:
        models = stack.enter_context(load())
        learner = models.learner(MODEL)
        method = method_of(config, learner, models.learner)
        mode, path = resume_mode(config.resume_from)
        found = checkpoint_store(config).find(mode, path) if config.ckpt_path or mode == "from_path" else None
        if found is not None:
            await learner.load(found.model_path(MODEL), optimizer=False)
            await method.restore(found)
        elif config.init_from:
            await _begin_with(config.init_from, config, learner, method)
        else:
            where = f"{config.model.path} as it is"
            await create_sft(learner, config)
        metrics = await method.evaluate(evaluation, config.batch_size)
    say(closing_summary(f"{len(evaluation)} data set(s) evaluated with {found.title if found else where}", {}, metrics))
    return metrics


def _checked(config: SFTConfig) -> tuple[Callable[[], AbstractContextManager[Models]], ChatTokenizer]:
    """Check a configuration. Returns the loader of the run's models, and the tokenizer."""
    validate_sft(config)
    check_model_given(config.model, BASE_MODEL, config.example)
    strategy, base_model = find_strategy(config), config.model.path
    load = strategy.sft_loader(config)
    assert base_model is not None  # guaranteed by resolving the configuration
    longest = check_base_model(base_model, BASE_MODEL, strategy.architectures)
    if longest is not None and (config.max_length or 0) > longest:
        raise ConfigError(
            f"max_length={config.max_length}: {base_model} was made for {longest} tokens; use at most that"
        )
    return load, load_tokenizer(base_model, BASE_MODEL)


async def _begin_with(path: str, config: SFTConfig, learner: Learner, method: Method) -> None:
    """Start a new run from the weights of the checkpoint at `path`."""
    initial = checkpoint_store(config).initial(path, "init_from")
    await learner.load(initial.model_path(MODEL), optimizer=False)
    await method.begin_with(initial)
    log.info("beginning with the weights of %s", initial.title)
