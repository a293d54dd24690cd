"""`skyrl train check-generator`: conformance test of a custom generator. It uses a run's tokenizer and prompts."""

from skyrl.config import SkyRLTrainConfig
from skyrl.errors import ConfigError
from skyrl.train.rl.prompts import first_prompts
from skyrl.train.rl.setup import BASE_MODEL
from skyrl.train.rollouts.generators.conformance import check_generator
from skyrl.train.rollouts.generators.generator import load_generator
from skyrl.train.rollouts.rollouts import chat_of
from skyrl.train.strategy.base_model import load_tokenizer
from skyrl.utils.console import say

PROMPTS = 4
"""Number of prompts to try."""


def check_generator_of(config: SkyRLTrainConfig) -> None:
    """Print the result of each check. Raises ConfigError if a check fails, or if there is nothing to check."""
    name, path = config.generator.generator_class, config.trainer.policy.model.path
    if name is None:
        raise ConfigError("generator.generator_class=None: there is nothing to check; name a class as module:Class")
    assert path is not None  # or the configuration would not have resolved
    cls = load_generator(name)
    chat = chat_of(config.generator, load_tokenizer(path, BASE_MODEL))
    prompts = first_prompts(config, chat, PROMPTS)
    failed = checked = 0
    for finding in check_generator(cls, config.generator, config.environment, chat, prompts):
        say(f"{'ok  ' if finding.problem is None else 'FAIL'}  {finding.check}", flush=True)
        if finding.problem is not None:
            say(f"      {finding.problem}", flush=True)
        failed, checked = failed + (finding.problem is not None), checked + 1
    if failed:
        raise ConfigError(f"generator.generator_class={name}: {failed} of {checked} checks do not hold")
