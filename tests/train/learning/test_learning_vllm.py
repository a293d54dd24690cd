"""GRPO of a whole model learns with vLLM servers that the run starts itself: `make test-vllm`.

Once two of them share the trainer's device by turns and samples are of the newest weights, once they sample beside it,
and once one samples for two workers that share the weights.
"""

import os
from pathlib import Path

import pytest
from kinds import make_pupil
from test_learning_rl import SCORE, assert_learned, configured, run

PYTHON = os.environ.get("SKYRL_TEST_VLLM_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="make test-vllm")
VARIABLES = "{HF_HUB_OFFLINE: '1', VLLM_NO_USAGE_STATS: '1', VLLM_CPU_OMP_THREADS_BIND: nobind, OMP_NUM_THREADS: '1'}"
CLOSE = "policy/rollout_train_logprobs_abs_diff_max"
ASYNC = [
    "trainer.placement.colocate_all=false",
    "trainer.fully_async.enabled=true",
    "trainer.fully_async.max_staleness_steps=1",
    "trainer.fully_async.num_parallel_generation_workers=24",
    "trainer.algorithm.off_policy_correction.tis_ratio_type=token",
]
RANKS = [
    "trainer.torch.workers=processes",
    "trainer.torch.num_workers=2",
    "generator.inference_engine.num_engines=1",
]


def arguments(folder: Path, *more: str) -> list[str]:
    launch = f"{{python: {PYTHON}, env: {VARIABLES}}}"
    engines = f"{{max_loras: 4, connect_timeout_s: 60, launch: {launch}}}"
    return [
        f"trainer.policy.model.path={make_pupil(folder / 'pupil', 0, head_dim=32)}",
        "trainer.placement.policy_num_gpus_per_node=0",
        f"trainer.torch={{train_tile_tokens: 1024, kv_cache_gib: 0.5, engines: {engines}}}",
        f"trainer.policy.model.lora.lora_sync_path={folder}/shared",
        "trainer.max_prompt_length=16",
        "generator.inference_engine.num_engines=2",
        "generator.inference_engine.max_num_seqs=128",
        *more,
    ]


@pytest.mark.parametrize("more", [[], ASYNC, RANKS], ids=["by turns", "fully asynchronous", "two workers"])
def test_grpo_learns_with_engines_of_its_own(tmp_path, more):
    reports = run(configured(tmp_path, 0, *arguments(tmp_path, *more), steps=40, strategy="torch"))
    assert_learned(reports, least=0.75)
    if more != ASYNC:  # else samples are of the version before, whose log-probabilities are others
        assert max(report[CLOSE] for report in reports if CLOSE in report) < 1e-3
    print(f"score {reports[0][SCORE]:.3f} -> {reports[-1][SCORE]:.3f}")
