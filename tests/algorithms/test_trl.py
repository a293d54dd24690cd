"""The objective against TRL: losses, reductions, KL and entropy as `GRPOTrainer` has them for the same numbers."""

from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from skyrl.algorithms.losses import LossInputs
from skyrl.algorithms.objective import entropy, policy_objective
from skyrl.algorithms.weights import token_weights

ROWS, TOKENS, VOCAB = 5, 7, 6
LENGTHS = [7, 3, 5, 1, 6]
MAX_COMPLETION_LENGTH = 9
LOW, HIGH = 0.1, 0.25

# name: (our policy loss and its options, our reduction, TRL's settings)
CASES = {
    "regular, sequence mean": ("regular", {}, "sequence_mean", {"loss_type": "grpo"}),
    "regular, token mean": ("regular", {}, "token_mean", {"loss_type": "bnpo"}),
    "regular, token sum": ("regular", {}, "seq_mean_token_sum_norm", {"loss_type": "dr_grpo"}),
    "regular, token mean of the global batch": ("regular", {}, "token_mean", {"loss_type": "dapo"}),
    "dual_clip": ("dual_clip", {"clip_ratio_c": 1.6}, "token_mean", {"loss_type": "bnpo", "delta": 1.6}),
    "gspo": ("gspo", {}, "sequence_mean", {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
    "sapo": ("sapo", {"sapo": {"tau_pos": 0.75, "tau_neg": 1.5}}, "sequence_mean", {"loss_type": "sapo"}),
    "cispo": (
        "cispo",
        {"cispo": {"cispo_eps_clip_low": 1.0, "cispo_eps_clip_high": HIGH}},
        "token_mean",
        {"loss_type": "cispo", "epsilon_high": 1 + HIGH},
    ),
}


class Sample:
    """Random logits with everything that is constant, as torch tensors."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.logits = torch.tensor(rng.normal(size=(ROWS, TOKENS, VOCAB)), requires_grad=True)
        logprobs = self.logprobs.detach()
        self.old = logprobs + torch.tensor(rng.normal(scale=0.4, size=(ROWS, TOKENS)))
        self.reference = logprobs + torch.tensor(rng.normal(scale=0.4, size=(ROWS, TOKENS)))
        self.advantages = torch.tensor(rng.normal(size=ROWS))
        self.mask = (torch.arange(TOKENS)[None, :] < torch.tensor(LENGTHS)[:, None]).double()

    @property
    def logprobs(self) -> torch.Tensor:
        return torch.log_softmax(self.logits, -1)[:, :, 0]


@pytest.fixture(scope="module")
def grpo_trainer():
    from trl import GRPOTrainer

    return GRPOTrainer


def trl_loss(trainer_class, sample: Sample, beta: float, entropy_coef: float, **options) -> torch.Tensor:
    """TRL's loss of one batch: its trainer with nothing in it but settings, and our numbers in place of a model's."""
    trainer = object.__new__(trainer_class)
    settings = {
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "epsilon_high": HIGH,
        "delta": None,
        **options,
    }
    for name in ("loss_type", "importance_sampling_level", "epsilon_high"):
        setattr(trainer, name, settings[name])
    trainer.epsilon_low, trainer.beta, trainer.entropy_coef = LOW, beta, entropy_coef
    trainer._entropy_bonus_enabled, trainer.use_adaptive_entropy = entropy_coef != 0, False
    trainer.aux_loss_enabled, trainer.use_vllm = False, False
    trainer.top_entropy_quantile, trainer.off_policy_mask_threshold = 1.0, None
    trainer.max_completion_length, trainer.current_gradient_accumulation_steps = MAX_COMPLETION_LENGTH, 1
    trainer.args = SimpleNamespace(
        delta=settings["delta"],
        use_bias_correction_kl=False,
        sapo_temperature_pos=0.75,
        sapo_temperature_neg=1.5,
        steps_per_generation=1,
    )
    trainer.model = SimpleNamespace(training=True)
    trainer.accelerator = SimpleNamespace(
        num_processes=1, sync_gradients=False, gather=lambda x: x, reduce=lambda x, reduction: x
    )
    trainer._metrics = {"train": defaultdict(list)}
    entropies = torch.distributions.Categorical(logits=sample.logits).entropy()
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (sample.logprobs, entropies, None)
    ids = torch.zeros((ROWS, TOKENS), dtype=torch.int64)
    return trainer._compute_loss(
        None,
        {
            "prompt_ids": ids[:, :1],
            "prompt_mask": ids[:, :1] + 1,
            "completion_ids": ids,
            "completion_mask": sample.mask,
            "advantages": sample.advantages,
            "old_per_token_logps": sample.old,
            "ref_per_token_logps": sample.reference,
            "num_items_in_batch": sample.mask.sum(),
        },
    )


def our_loss(sample: Sample, name: str, options: dict, reduction: str, beta: float, entropy_coef: float):
    objective = policy_objective(
        {
            "policy_loss_type": name,
            "use_kl_loss": beta != 0,
            "kl_loss_coef": beta,
            "kl_estimator_type": "k3",
            "use_entropy_loss": entropy_coef != 0,
            "entropy_loss_coef": entropy_coef,
            "eps_clip_low": LOW,
            "eps_clip_high": HIGH,
            **options,
        }
    )
    x = LossInputs(
        logprobs=sample.logprobs,
        weights=token_weights(reduction, sample.mask, sample.old, max_seq_len=MAX_COMPLETION_LENGTH),
        sampling_logprobs=sample.old,
        advantages=sample.advantages[:, None] * sample.mask,
        sequence_ratio_mask=sample.mask,
        reference_logprobs=sample.reference,
        entropy=entropy(sample.logits),
        segments=torch.where(sample.mask > 0, 0, -1).to(torch.int32),
    )
    return objective(x).sum()


def assert_same(ours: torch.Tensor, theirs: torch.Tensor, logits: torch.Tensor) -> None:
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-10)
    gradients = [torch.autograd.grad(loss, logits, retain_graph=True)[0].numpy() for loss in (ours, theirs)]
    np.testing.assert_allclose(*gradients, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_trls(case, beta, grpo_trainer):
    sample = Sample()
    name, options, reduction, settings = CASES[case]
    theirs = trl_loss(grpo_trainer, sample, beta, 0.0, **settings)
    assert_same(our_loss(sample, name, options, reduction, beta, 0.0), theirs, sample.logits)


def test_the_entropy_term_is_trls(grpo_trainer):
    """TRL takes its mean over tokens whatever the loss, so the reductions are the same for the token mean."""
    sample = Sample()
    theirs = trl_loss(grpo_trainer, sample, 0.3, 0.2, loss_type="bnpo")
    assert_same(our_loss(sample, "regular", {}, "token_mean", 0.3, 0.2), theirs, sample.logits)
