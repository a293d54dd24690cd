"""Training methods: likelihood of examples, or preference between two answers. Each also has its evaluation.

To add one, write a class with the methods of `Method`, and let `method_of` create it for its configuration.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from skyrl.config.sft import DPOConfig, SFTConfig
from skyrl.train.checkpoints import Checkpoint
from skyrl.train.policies import Learner
from skyrl.train.sft.batches import scoring_data, training_data, weighted_data
from skyrl.train.sft.datasets import Dataset
from skyrl.train.sft.pairs import Pair
from skyrl.train.sft.preference_losses import PREFERENCE_LOSSES
from skyrl.train.tracking.metrics import Metrics
from skyrl.types import ForwardBackwardOutput

LOSS = "cross_entropy"
MODEL = "policy"
"""Folder of the trained model in a checkpoint and in an export."""
REFERENCE = "reference"
"""Folder of the reference model in a checkpoint, if the reference is not the base model."""


class Method(Protocol):
    """Training method: the loss with which a learner is trained, and its evaluation."""

    shown: Mapping[str, str]
    """Metrics that are shown beside the progress bar, with their labels."""

    async def forward_backward(self, batch: Sequence[Any]) -> Metrics:
        """Accumulate the gradients of a batch's loss. Returns metrics. One of them is the loss, policy/loss."""
        ...

    async def evaluate(self, datasets: Sequence[Dataset[Any]], batch_size: int) -> Metrics:
        """Evaluate the learner. Returns eval/{name}/loss for each data set, and further metrics of the method."""
        ...

    async def begin_with(self, initial: Checkpoint) -> None:
        """Start a new run from the weights of a checkpoint. The learner has already loaded them."""
        ...

    async def restore(self, checkpoint: Checkpoint) -> None:
        """Restore the method's own state from a checkpoint. The caller restores the learner."""
        ...

    def begin_save(self, folder: Path) -> list[Awaitable[object]]:
        """Start to write the method's own state, which `restore` reads. Returns awaitables (`Learner.begin_save`)."""
        ...


def method_of(config: SFTConfig, learner: Learner, make_learner: Callable[[str], Learner]) -> Method:
    """Return the method that a configuration selects. `make_learner` creates an additional model with a name."""
    if isinstance(config, DPOConfig):
        return DirectPreference(config, learner, make_learner)
    return Likelihood(learner)


class Likelihood:
    """Supervised fine-tuning. The loss is the negative log-likelihood per token, averaged over trained tokens."""

    shown: Mapping[str, str] = {"policy/loss": "loss"}

    def __init__(self, learner: Learner):
        self._learner = learner

    async def forward_backward(self, batch: Sequence[Any]) -> Metrics:
        output = await self._learner.forward_backward(training_data(batch), LOSS)
        return {"policy/loss": output.metrics["loss:sum"]}

    async def evaluate(self, datasets: Sequence[Dataset[Any]], batch_size: int) -> Metrics:
        metrics: Metrics = {}
        for dataset in datasets:
            total = 0.0
            for start in range(0, len(dataset.examples), batch_size):
                data = scoring_data(dataset.examples[start : start + batch_size])
                total += (await self._learner.forward(data, LOSS)).metrics["loss:sum"]
            metrics[f"eval/{dataset.name}/loss"] = total / sum(one.trained_tokens for one in dataset.examples)
        return metrics

    async def begin_with(self, initial: Checkpoint) -> None:
        """Do nothing, because the learner is the only model."""

    async def restore(self, checkpoint: Checkpoint) -> None:
        """Do nothing, because the learner has all state."""

    def begin_save(self, folder: Path) -> list[Awaitable[object]]:
        """Do nothing, because the learner has all state."""
        return []


class Scores(NamedTuple):
    """Scores of pairs of answers. All arrays are float64 `[pairs, 2]`: chosen answer, rejected answer."""

    policy: np.ndarray
    """Log-probability of each answer from the policy, in nats."""
    reference: np.ndarray
    """Log-probability of each answer from the reference model, in nats."""
    tokens: np.ndarray
    """Number of tokens of each answer."""


class DirectPreference:
    """Direct preference optimization (Rafailov et al. 2023, https://arxiv.org/abs/2305.18290).

    A backend computes losses of single sequences, so a step takes three passes. The first two compute log-probabilities
    from policy and reference. They determine the derivative of each pair's loss with respect to its margin (see
    `preference_losses`). The third pass is a cross-entropy in which each answer is weighted with this derivative. Its
    gradient thus equals that of the preference loss. The reference is the base model, or the checkpoint that the run
    started from.
    """

    shown: Mapping[str, str] = {"policy/loss": "loss", "rewards/accuracies": "accuracy"}

    def __init__(self, config: DPOConfig, learner: Learner, make_learner: Callable[[str], Learner]):
        self._config = config
        self._loss = PREFERENCE_LOSSES[config.loss_type]
        self._learner = learner
        self._make_learner = make_learner
        self._reference: Learner | None = None

    async def forward_backward(self, batch: Sequence[Pair]) -> Metrics:
        scores = await self._score(batch)
        _, slopes = self._losses(scores)
        signs = np.array([-1.0, 1.0]) / len(batch)  # cross-entropy is minus the log-probability
        weights = slopes[:, None] * signs * self._per_unit(scores)
        await self._learner.forward_backward(weighted_data(_sequences(batch), weights.ravel().tolist()), LOSS)
        metrics = self._metrics(scores)
        return {"policy/loss": metrics.pop("loss"), **metrics}

    async def evaluate(self, datasets: Sequence[Dataset[Pair]], batch_size: int) -> Metrics:
        metrics: Metrics = {}
        for dataset in datasets:
            pairs = dataset.examples
            parts = [await self._score(pairs[start : start + batch_size]) for start in range(0, len(pairs), batch_size)]
            scores = Scores(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
            metrics |= {f"eval/{dataset.name}/{name}": value for name, value in self._metrics(scores).items()}
        return metrics

    async def begin_with(self, initial: Checkpoint) -> None:
        """Make the checkpoint's model the reference."""
        await self._load(initial.model_path(MODEL))

    async def restore(self, checkpoint: Checkpoint) -> None:
        if (checkpoint.path / REFERENCE).is_dir():
            await self._load(checkpoint.model_path(REFERENCE))

    def begin_save(self, folder: Path) -> list[Awaitable[object]]:
        return [] if self._reference is None else [self._reference.begin_save(str(folder / REFERENCE))]

    async def _load(self, path: str) -> None:
        self._reference = self._make_learner(REFERENCE)
        await self._reference.load(path, optimizer=False)

    async def _score(self, pairs: Sequence[Pair]) -> Scores:
        sequences = _sequences(pairs)
        data = scoring_data(sequences)
        if self._reference is None:
            reference = self._learner.forward(data, LOSS, reference=True)
        else:
            reference = self._reference.forward(data, LOSS)
        outputs = await asyncio.gather(self._learner.forward(data, LOSS), reference)
        policy, other = (_logprobs(output) for output in outputs)
        return Scores(
            policy, other, np.array([[one.trained_tokens for one in pair.sequences] for pair in pairs], float)
        )

    def _per_unit(self, scores: Scores) -> np.ndarray:
        """Return the factor of each answer's log-probability in the margin, `[pairs, 2]`."""
        return 1 / scores.tokens if self._loss.is_per_token else np.ones_like(scores.tokens)

    def _losses(self, scores: Scores) -> tuple[np.ndarray, np.ndarray]:
        """Return the loss of each pair, and its derivative with respect to the margin. Both are `[pairs]`."""
        scaled = (scores.policy - scores.reference) * self._per_unit(scores)
        return self._loss.function(scaled[:, 0] - scaled[:, 1], self._config.beta, self._config.label_smoothing)

    def _metrics(self, scores: Scores) -> Metrics:
        """Return metrics averaged over pairs. They have the names of TRL's metrics."""
        losses, _ = self._losses(scores)
        rewards = self._config.beta * (scores.policy - scores.reference)
        margins = rewards[:, 0] - rewards[:, 1]
        values = {
            "loss": losses,
            "rewards/chosen": rewards[:, 0],
            "rewards/rejected": rewards[:, 1],
            "rewards/accuracies": margins > 0,
            "rewards/margins": margins,
            "logps/chosen": scores.policy[:, 0],
            "logps/rejected": scores.policy[:, 1],
        }
        return {name: float(np.mean(value)) for name, value in values.items()}


def _sequences(pairs: Sequence[Pair]) -> list[Any]:
    return [one for pair in pairs for one in pair.sequences]


def _logprobs(output: ForwardBackwardOutput) -> np.ndarray:
    """Return the log-probability of each answer, `[pairs, 2]`. It is minus the loss of the sequence."""
    sums = [-np.sum(one["elementwise_loss"], dtype=np.float64) for one in output.loss_fn_outputs]
    return np.reshape(sums, (-1, 2))
