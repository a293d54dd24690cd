"""Options that decide what a run trains on, in whole runs, interrupted ones too."""

import contextlib
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from short_runs import check_equal, command, metrics, train

from skyrl.envs.arithmetic_data import arithmetic_rows, write_rows


class Interrupted(Exception):
    """What ends a run in the middle."""


@pytest.fixture
def rows(tmp_path) -> Path:
    """8 prompts: 2 steps an epoch."""
    path = tmp_path / "rows.jsonl"
    write_rows(path, ({"prompt": row["prompt"]} for row in arithmetic_rows(8, seed=0, largest=9)))
    return path


def interrupted(arguments: list[str], at: int) -> None:
    """A run that ends before the checkpoint of a step."""

    def report(metrics: dict[str, float], step: int) -> None:
        if step == at:
            raise Interrupted

    with contextlib.suppress(Interrupted):
        train(arguments, report)


def test_every_step_has_all_its_prompts_where_those_without_a_signal_are_replaced(rows, tiny_model, tmp_path):
    options = ["environment.env_class=rewarding:Tossed", "trainer.algorithm.dynamic_sampling.type=replace"]
    options += ["trainer.epochs=2", "trainer.dump_data_batch=true"]
    train(command(rows, tiny_model, tmp_path / "whole", *options))
    recorded = metrics(tmp_path / "whole")
    assert [row["generate/batch_num_seq"] for row in recorded] == [12] * 4
    dumps = [
        load_file(tmp_path / "whole-exports" / "dumped_data" / f"global_step_{step}_training_input.safetensors")
        for step in range(1, 5)
    ]
    for dump in dumps:
        scores = dump["rewards"].sum(axis=1).reshape(4, 3)
        assert (scores.min(axis=1) < scores.max(axis=1)).all()
    means = [float(dump["rewards"].sum() / 12) for dump in dumps]
    assert means != [row["reward/avg_raw_reward"] for row in recorded]  # something was replaced
    cut = command(rows, tiny_model, tmp_path / "cut", *options)
    interrupted(cut, at=3)
    train(cut)
    check_equal(tmp_path / "cut", tmp_path / "whole", 4, ["policy"])


@pytest.mark.parametrize("filtered", [False, True])
def test_the_zero_variance_filter_leaves_prompts_whose_samples_are_alike_out_of_the_loss(
    rows, tiny_model, tmp_path, filtered
):
    options = ["environment.env_class=rewarding:Content", "trainer.algorithm.use_entropy_loss=true"]
    train(
        command(
            rows,
            tiny_model,
            tmp_path / "run",
            *options,
            f"trainer.algorithm.zero_variance_filter={str(filtered).lower()}",
        )
    )
    norms = [row["policy/grad_norm"] for row in metrics(tmp_path / "run")]
    assert norms == [0.0, 0.0] if filtered else min(norms) > 0


def test_a_reference_that_follows_the_policy_is_resumed_and_leaves_exports_alone(rows, tiny_model, tmp_path):
    options = ["environment.env_class=rewarding:Hashed", "trainer.algorithm.use_kl_loss=true", "trainer.epochs=2"]
    options += ["trainer.update_ref_every_epoch=true", "trainer.hf_save_interval=2"]
    train(command(rows, tiny_model, tmp_path / "whole", *options))
    kl = [row["loss/avg_kl"] for row in metrics(tmp_path / "whole")]
    assert kl[0] == kl[2] == 0 < min(kl[1], kl[3])  # the policy begins each epoch as its own reference
    for step in (2, 4):
        exported = load_file(tmp_path / "whole-exports" / f"global_step_{step}" / "policy" / "model.safetensors")
        assert exported
    cut = command(rows, tiny_model, tmp_path / "cut", *options)
    interrupted(cut, at=4)
    train(cut)
    check_equal(tmp_path / "cut", tmp_path / "whole", 4, ["policy", "reference"])
