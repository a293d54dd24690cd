"""The prompts of a run: training prompts, epoch after epoch, and evaluation prompts."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from skyrl.config import SkyRLTrainConfig
from skyrl.envs import env_class
from skyrl.errors import ConfigError
from skyrl.train.data.epoch_order import OrderState, PromptOrder
from skyrl.train.data.prompt_dataset import PromptDataset, PromptReader
from skyrl.train.data.vocabulary import check_vocabulary
from skyrl.train.rollouts.chat import Chat
from skyrl.train.rollouts.episode import Prompt
from skyrl.train.strategy.base_model import model_sizes
from skyrl.utils.template_form import TemplateForm


class TrainingPrompts:
    """Rows of the training data, epoch after epoch, in the order that each epoch gives them.

    The id of a row (`instance_id`) differs in each epoch.
    """

    def __init__(self, dataset: PromptDataset, order: PromptOrder):
        self._dataset = dataset
        self.order = order

    def next(self) -> Prompt:
        epoch = self.order.epoch
        (index,) = self.order.next_batch(1)
        row = self._dataset[index]
        return replace(row, instance_id=f"{row.instance_id}.{epoch}")

    def state(self) -> dict[str, Any]:
        return dict(self.order.state())

    def restore(self, state: dict[str, Any]) -> None:
        self.order.restore(OrderState(**state))

    @property
    def rows(self) -> Iterator[Prompt]:
        """All rows, in the order of the files."""
        return iter(self._dataset)


def training_prompts(config: SkyRLTrainConfig, chat: Chat) -> TrainingPrompts:
    """Create the training prompts of a new run. Raises ConfigError if data are missing or too few."""
    dataset = training_data(config, chat)
    settings = config.trainer
    order = PromptOrder(
        len(dataset), batch_size=settings.train_batch_size, seed=settings.seed, fingerprint=dataset.fingerprint
    )
    return TrainingPrompts(dataset, order)


def training_data(config: SkyRLTrainConfig, chat: Chat) -> PromptDataset:
    """Read the training data. Raises ConfigError if they are missing or malformed."""
    return _dataset(config, "data.train_data", config.data.train_data, chat)


def evaluation_prompts(config: SkyRLTrainConfig, chat: Chat) -> list[Prompt]:
    """Return the prompts for evaluation. The list is empty if the run has no evaluations."""
    settings = config.trainer
    if not config.data.val_data or (settings.eval_interval <= 0 and not settings.eval_only):
        return []
    return [*_dataset(config, "data.val_data", config.data.val_data, chat)]


def first_prompts(config: SkyRLTrainConfig, chat: Chat, count: int) -> list[Prompt]:
    """Return the first prompts of the training data, at most `count`. Raises ConfigError if data are missing."""
    dataset = training_data(config, chat)
    return [dataset[index] for index in range(min(count, len(dataset)))]


def prompt_reader(config: SkyRLTrainConfig, chat: Chat) -> PromptReader:
    """Return the reader of the rows of a run."""
    path, longest = config.trainer.policy.model.path, config.trainer.max_prompt_length
    vocab_size = None if path is None else model_sizes(path).vocabulary

    def length(prompt: Prompt) -> int:
        token_ids = chat.render(prompt.messages, prompt.extras.get("tools") or ())
        if vocab_size is not None and len(token_ids) <= longest:
            check_vocabulary(np.array(token_ids), vocab_size, f"trainer.policy.model.path={path}", chat.tokenizer)
        return len(token_ids)

    def tools_of(env_id: str) -> list[dict[str, Any]]:
        return [] if config.generator.generator_class else env_class(env_id).tool_schemas()

    environment, fit = config.environment, TemplateForm(chat.written).fit
    return PromptReader(environment.env_class, length, fit, tools_of, environment.reward_id)


def _dataset(config: SkyRLTrainConfig, field: str, sources: list[str], chat: Chat) -> PromptDataset:
    try:
        return PromptDataset(sources, prompt_reader(config, chat), config.trainer.max_prompt_length)
    except ConfigError as error:
        raise ConfigError(f"{field}: {error}") from error
