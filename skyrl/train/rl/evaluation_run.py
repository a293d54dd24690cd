"""Evaluation without training, of a checkpoint or of a model (`trainer.eval_only`)."""

import logging
import tempfile
from contextlib import ExitStack
from pathlib import Path

from skyrl.config import SkyRLTrainConfig
from skyrl.train.rl.evaluate import eval_rows, evaluate
from skyrl.train.rl.prompts import evaluation_prompts
from skyrl.train.rl.run import POLICY
from skyrl.train.rl.setup import Setup, check_environments, serve_endpoint
from skyrl.train.rollouts.rollouts import Rollouts
from skyrl.train.strategy.strategy import create_policy
from skyrl.train.tracking.dumps import dump_eval_results
from skyrl.train.tracking.metrics import Metrics
from skyrl.train.tracking.reporting import closing_summary
from skyrl.utils.console import say

log = logging.getLogger(__name__)


async def evaluate_rl(config: SkyRLTrainConfig) -> Metrics:
    """Evaluate with a resolved configuration, and print the scores. Another process may be training at the same time.

    The model is the policy of the checkpoint that `trainer.resume_mode` and `resume_path` select. If they select none,
    it is the policy of the checkpoint `trainer.init_from`. If that is unset too, it is the base model.

    Returns the metrics. Raises ConfigError for invalid settings.
    """
    settings = config.trainer
    setup = Setup.of(config)
    prompts = evaluation_prompts(config, setup.chat)
    await check_environments(config, prompts)
    found = setup.store.find(settings.resume_mode, settings.resume_path)
    if found is None and settings.init_from:
        found = setup.store.initial(settings.init_from, "trainer.init_from")
    with ExitStack() as stack:
        policy = stack.enter_context(setup.load()).policy(POLICY, settings.seed)
        if found is None:
            await create_policy(policy, config)
        else:
            await policy.load(found.model_path(POLICY), optimizer=False)
        step = 0 if found is None else found.step
        await policy.publish(step)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="skyrl-endpoint-"))
        serve_endpoint(config, policy, Path(folder), stack)
        rollouts = Rollouts(config.generator, config.environment, setup.tokenizer, policy)
        metrics, trajectories = await evaluate(rollouts, prompts, settings.eval_batch_size)
    what = f"{settings.policy.model.path} as it is" if found is None else found.title
    scores = {name: value for name, value in metrics.items() if "/generate/" not in name}
    say(closing_summary(f"{len(prompts)} prompts evaluated with {what}", {}, scores))
    if settings.dump_eval_results:
        folder = dump_eval_results(settings.export_path, None, eval_rows(prompts, trajectories), metrics)
        say(f"responses are in {folder}")
    return metrics
