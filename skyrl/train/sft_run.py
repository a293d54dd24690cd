"""A whole run of supervised fine-tuning, as `skyrl train sft` does it."""

from contextlib import ExitStack

from transformers import AutoTokenizer

from skyrl.backends.client import BackendClient
from skyrl.backends.jax import JaxBackend
from skyrl.train.config import SFTConfig, get_config_as_dict
from skyrl.train.jax_options import sft_adapter, sft_backend
from skyrl.train.learner import Learner
from skyrl.train.sft import load_datasets
from skyrl.train.sft.trainer import Metrics, SFTTrainer, Summary
from skyrl.train.tracker_clients import RunInfo, tracker_clients
from skyrl.train.tracking import Tracker
from skyrl.train.validation import choose_trackers


async def train_sft(config: SFTConfig) -> Summary:
    """Train as a resolved configuration says, and say how it went. Raises ConfigError for what cannot be run."""
    base_model, options = sft_backend(config)
    with ExitStack() as stack:
        client = stack.enter_context(BackendClient(JaxBackend(base_model, options)))
        tokenizer = AutoTokenizer.from_pretrained(client.backend.info().tokenizer_path, local_files_only=True)
        train, evaluation = load_datasets(config, tokenizer)
        learner = Learner(client, "policy")
        await learner.create(sft_adapter(config))
        trackers: list[Tracker] = []

        def told(step: int, metrics: Metrics) -> None:
            if not trackers:  # the first that is told: a run that is resumed knows by now where
                info = RunInfo(config.project_name, config.run_name, trainer.run_id, get_config_as_dict(config))
                clients = tracker_clients(choose_trackers(config.logger).usable, info)
                resumed = trainer.resumed_from or None
                trackers.append(Tracker(config.ckpt_path or config.run_name, clients, resumed_step=resumed))
                stack.callback(trackers[0].finish)
            trackers[0].log(metrics, step)

        trainer = SFTTrainer(config, learner, train, evaluation, on_metrics=told)
        summary = await trainer.run()
    print(summary)
    return summary
