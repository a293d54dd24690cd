"""Options that decide what a run trains on, in whole runs, interrupted ones too."""

import contextlib
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from short_runs import check_equal, command, metrics, train

from skyrl.envs.tasks.arithmetic_data import arithmetic_rows, write_rows
from skyrl.errors import ConfigError

CORRECTED = "trainer.algorithm.off_policy_correction.tis_ratio_type=token"


class Interrupted(Exception):
    """Error that ends a run in the middle."""


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


REPLACING = ["environment.env_class=rewarding:Tossed", "trainer.algorithm.dynamic_sampling.type=replace"]
REPLACING += ["trainer.epochs=2", "trainer.dump_data_batch=true"]


@pytest.mark.full
def test_every_step_has_all_its_prompts_where_those_without_a_signal_are_replaced(rows, tiny_model, tmp_path):
    train(command(rows, tiny_model, tmp_path / "whole", *REPLACING))
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


@pytest.mark.slow
def test_a_run_that_replaces_prompts_without_a_signal_is_resumed_bit_for_bit(rows, tiny_model, tmp_path):
    train(command(rows, tiny_model, tmp_path / "whole", *REPLACING))
    cut = command(rows, tiny_model, tmp_path / "cut", *REPLACING)
    interrupted(cut, at=3)
    train(cut)
    check_equal(tmp_path / "cut", tmp_path / "whole", 4, ["policy"])


@pytest.mark.full
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
    norms = [row.get("policy/grad_norm") for row in metrics(tmp_path / "run")]
    assert norms == [None, None] if filtered else min(norms) > 0
    trained = [row["generate/tokens_trained"] for row in metrics(tmp_path / "run")]
    assert trained == [0, 0] if filtered else min(trained) > 0


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["jax", pytest.param("torch", marks=pytest.mark.slow)])
def test_a_reference_that_follows_the_policy_is_resumed_and_leaves_exports_alone(rows, tiny_model, tmp_path, strategy):
    options = ["environment.env_class=rewarding:Hashed", "trainer.algorithm.use_kl_loss=true", "trainer.epochs=2"]
    options += ["trainer.update_ref_every_epoch=true", "trainer.hf_save_interval=2"]
    train(command(rows, tiny_model, tmp_path / "whole", *options, strategy=strategy))
    kl = [row["loss/avg_kl"] for row in metrics(tmp_path / "whole")]
    assert kl[0] == kl[2] == 0 < min(kl[1], kl[3])  # the policy begins each epoch as its own reference
    for step in (2, 4):
        exported = load_file(tmp_path / "whole-exports" / f"global_step_{step}" / "policy" / "model.safetensors")
        assert exported
    cut = command(rows, tiny_model, tmp_path / "cut", *options, strategy=strategy)
    interrupted(cut, at=4)
    train(cut)
    check_equal(tmp_path / "cut", tmp_path / "whole", 4, ["policy", "reference"])


@pytest.mark.slow
def test_a_run_that_is_made_longer_goes_on_with_the_reference_of_its_new_epoch(rows, tiny_model, tmp_path):
    options = ["environment.env_class=rewarding:Hashed", "trainer.algorithm.use_kl_loss=true"]
    options += ["trainer.update_ref_every_epoch=true"]
    train(command(rows, tiny_model, tmp_path / "whole", *options, "trainer.epochs=2"))
    longer = command(rows, tiny_model, tmp_path / "longer", *options)
    train(longer)
    train([*longer, "trainer.epochs=2"])
    check_equal(tmp_path / "longer", tmp_path / "whole", 4, ["policy", "reference"], ["trainer/epoch"])


@pytest.mark.full
@pytest.mark.parametrize("kind", [pytest.param("filter", marks=pytest.mark.slow), "replace"])
def test_one_step_off_with_dynamic_sampling_is_resumed_bit_for_bit(rows, tiny_model, tmp_path, kind):
    options = ["environment.env_class=rewarding:Tossed", f"trainer.algorithm.dynamic_sampling.type={kind}"]
    options += ["trainer.epochs=2", "trainer.one_step_off=true", CORRECTED]
    train(command(rows, tiny_model, tmp_path / "whole", *options))
    cut = command(rows, tiny_model, tmp_path / "cut", *options)
    interrupted(cut, at=3)
    train(cut)
    check_equal(tmp_path / "cut", tmp_path / "whole", 4, ["policy"])


@pytest.mark.full
def test_samples_of_an_environment_with_numbers_of_an_array_library_are_kept(rows, tiny_model, tmp_path):
    train(
        command(
            rows,
            tiny_model,
            tmp_path / "run",
            "environment.env_class=rewarding:Sized",
            "trainer.one_step_off=true",
            CORRECTED,
        )
    )
    assert all(row["environment/size"] > 0 for row in metrics(tmp_path / "run"))


@pytest.mark.full
def test_every_source_of_evaluations_is_told_apart_whatever_it_is_called(rows, tiny_model, tmp_path):
    held_out = [{"prompt": row["prompt"]} for row in arithmetic_rows(6, seed=1, largest=9)]
    named = zip(held_out, ["all", "all", "all", "one", None, None], strict=True)
    write_rows(tmp_path / "held-out.jsonl", ({**row, "data_source": name} for row, name in named))
    options = ["environment.env_class=rewarding:Content", f"data.val_data=[{tmp_path}/held-out.jsonl]"]
    train([*command(rows, tiny_model, tmp_path / "run", *options), "trainer.eval_interval=5"])
    scores = {name for name in metrics(tmp_path / "run")[0] if name.endswith("avg_score")}
    assert scores == {f"eval/{source}/avg_score" for source in ("all", "_all", "one", "unknown")}


def test_prompts_that_never_differ_end_a_run_with_one_message(rows, tiny_model, tmp_path):
    options = ["environment.env_class=rewarding:Content", "trainer.algorithm.dynamic_sampling.type=filter"]
    with pytest.raises(ConfigError, match=r"max_sample_batches=2: .*use easier or harder prompts"):
        train(
            command(
                rows, tiny_model, tmp_path / "run", *options, "trainer.algorithm.dynamic_sampling.max_sample_batches=2"
            )
        )
