"""A whole run of supervised fine-tuning, as `skyrl train sft` does it."""

from contextlib import ExitStack

from skyrl.backends.async_client import BackendClient
from skyrl.errors import ConfigError
from skyrl.train.config import SFTConfig, get_config_as_dict
from skyrl.train.model_client import Learner
from skyrl.train.sft import load_datasets
from skyrl.train.sft.trainer import SFTTrainer, Summary
from skyrl.train.strategy.base_model import check_base_model, load_tokenizer, open_backend
from skyrl.train.strategy.jax_backend import STRATEGY, sft_adapter, sft_backend
from skyrl.train.strategy.validate import usable_trackers, validate_sft
from skyrl.train.tracking.clients import RunInfo, tracker_clients
from skyrl.train.tracking.progress import RunBar
from skyrl.train.tracking.tracker import Tracker

BASE_MODEL = "model.path"


async def train_sft(config: SFTConfig) -> Summary:
    """Train as a resolved configuration says, and say how it went. Raises ConfigError for what cannot be run."""
    validate_sft(config)
    base_model, options = sft_backend(config)
    longest = check_base_model(base_model, BASE_MODEL)
    if longest is not None and (config.max_length or 0) > longest:
        raise ConfigError(
            f"max_length={config.max_length}: {base_model} was made for {longest} tokens; use at most that"
        )
    train, evaluation = load_datasets(config, load_tokenizer(base_model, BASE_MODEL))
    with ExitStack() as stack:
        client = stack.enter_context(BackendClient(open_backend(STRATEGY, base_model, options, "jax")))
        learner = Learner(client, "policy")

        def told(step: int, metrics: dict[str, float]) -> None:
            tracker.log(metrics, step)
            bar.update(step, metrics)

        trainer = SFTTrainer(config, learner, train, evaluation, on_metrics=told)
        resumed = await trainer.resume()
        if resumed is None:
            await learner.create(sft_adapter(config))
        info = RunInfo(
            config.project_name, config.run_name, trainer.run_id or config.run_name, get_config_as_dict(config)
        )
        clients = tracker_clients(usable_trackers(config.logger), info)
        tracker = Tracker(config.ckpt_path or config.export_path or config.run_name, clients, resumed_step=resumed)
        stack.callback(tracker.finish)
        bar = stack.enter_context(RunBar(trainer.total_steps, trainer.global_step, {"policy/loss": "loss"}))
        summary = await trainer.run()
    print(summary)
    return summary
