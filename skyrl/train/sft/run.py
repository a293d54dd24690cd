"""A whole run of supervised fine-tuning, as `skyrl train sft` does it."""

from contextlib import ExitStack

from skyrl.errors import ConfigError
from skyrl.train.config import SFTConfig, get_config_as_dict
from skyrl.train.sft import load_datasets
from skyrl.train.sft.trainer import MODEL, SFTTrainer, Summary
from skyrl.train.strategy.base_model import check_base_model, load_tokenizer
from skyrl.train.strategy.registry import find_strategy
from skyrl.train.strategy.strategy import sft_adapter
from skyrl.train.strategy.validate import validate_sft
from skyrl.train.tracking.clients import RunInfo
from skyrl.train.tracking.metrics import Metrics
from skyrl.train.tracking.reporting import reporting

BASE_MODEL = "model.path"


async def train_sft(config: SFTConfig) -> Summary:
    """Train as a resolved configuration says, and say how it went. Raises ConfigError for what cannot be run."""
    validate_sft(config)
    load, base_model = find_strategy(config).sft_loader(config), config.model.path
    assert base_model is not None  # or the configuration would not have resolved
    longest = check_base_model(base_model, BASE_MODEL)
    if longest is not None and (config.max_length or 0) > longest:
        raise ConfigError(
            f"max_length={config.max_length}: {base_model} was made for {longest} tokens; use at most that"
        )
    train, evaluation = load_datasets(config, load_tokenizer(base_model, BASE_MODEL))
    with ExitStack() as stack:
        learner = stack.enter_context(load()).learner(MODEL)

        def told(metrics: Metrics, step: int) -> None:
            report(metrics, step)

        trainer = SFTTrainer(config, learner, train, evaluation, report=told)
        resumed = await trainer.resume()
        if resumed is None:
            await learner.create(sft_adapter(config))
        report = stack.enter_context(
            reporting(
                config.ckpt_path or config.export_path or config.run_name,
                config.logger,
                RunInfo(
                    config.project_name, config.run_name, trainer.run_id or config.run_name, get_config_as_dict(config)
                ),
                total_steps=trainer.total_steps,
                resumed_step=resumed,
                shown={"policy/loss": "loss"},
            )
        )
        summary = await trainer.run()
    print(summary)
    return summary
