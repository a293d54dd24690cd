"""Files that a run writes to be looked at, read back by json, safetensors and an image library, not by our code."""

import datetime
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from matplotlib import image

from skyrl.envs.env import StepResult
from skyrl.errors import RequestError, StorageError
from skyrl.train.rollouts.records import as_record
from skyrl.train.rollouts.sampler import Sampled
from skyrl.train.rollouts.trajectory import Trajectory, TrajectoryId, Turn
from skyrl.train.tracking.dumps import (
    KINDS,
    EvalRow,
    dump_data_batch,
    dump_eval_results,
    dump_rollouts,
    remove_old_dumps,
)
from skyrl.train.tracking.plots import plot_metrics


def row(source: str | None = "gsm8k", **options: Any) -> EvalRow:
    values = {"input_prompt": "2+2=", "output_response": "4", "score": 1.0, "stop_reason": "stop", "env_class": "math"}
    return EvalRow(**{**values, "env_extras": {"answer": "4"}, "data_source": source, **options})


def lines(path: Path) -> list[Any]:
    def refused(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refused) for line in path.read_text().splitlines()]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("step", "folder"), [(None, "eval_only"), (0, "global_step_0_evals")])
def test_an_evaluation_is_a_file_per_data_source_and_one_of_metrics(tmp_path, step, folder):
    rows = [row(), row("openai/gsm8k", score=0.5), row(), row(None)]
    written = dump_eval_results(tmp_path, step, rows, {"eval/all/avg_score": 0.9})
    assert written == tmp_path / "dumped_evals" / folder
    assert names(written) == ["aggregated_results.jsonl", "gsm8k.jsonl", "openai_gsm8k.jsonl", "unknown.jsonl"]
    assert lines(written / "aggregated_results.jsonl") == [{"eval/all/avg_score": 0.9}]
    assert len(lines(written / "gsm8k.jsonl")) == 2
    assert lines(written / "openai_gsm8k.jsonl") == [
        {
            "input_prompt": "2+2=",
            "output_response": "4",
            "score": 0.5,
            "stop_reason": "stop",
            "env_class": "math",
            "env_extras": {"answer": "4"},
            "data_source": "openai/gsm8k",
        }
    ]


@pytest.mark.parametrize("source", ["../../outside", "/root", "..", "aggregated_results", "a\0b", "x" * 999, ""])
def test_no_data_source_is_written_anywhere_else_or_over_the_metrics(tmp_path, source):
    written = dump_eval_results(tmp_path / "exports", 1, [row(source)], {"a": 1})
    (other,) = [name for name in names(written) if name != "aggregated_results.jsonl"]
    assert lines(written / other)[0]["data_source"] == (source or "unknown")
    assert names(tmp_path) == ["exports"]
    assert lines(written / "aggregated_results.jsonl") == [{"a": 1}]


def test_data_sources_of_one_file_name_lose_nothing(tmp_path):
    written = dump_eval_results(tmp_path, 1, [row("a/b"), row("a_b")], {})
    assert [record["data_source"] for record in lines(written / "a_b.jsonl")] == ["a/b", "a_b"]


def test_an_evaluation_of_the_same_step_replaces_the_one_before(tmp_path):
    dump_eval_results(tmp_path, 1, [row("old")], {})
    written = dump_eval_results(tmp_path, 1, [row("new")], {})
    assert names(written) == ["aggregated_results.jsonl", "new.jsonl"]


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (float("nan"), None),
        ([1.0, float("inf")], [1.0, None]),
        (np.arange(3), [0, 1, 2]),
        (np.float32("nan"), None),
        (np.int64(3), 3),
        (datetime.date(2026, 1, 2), "2026-01-02"),
        (b"bytes", "bytes"),
        ({1: {(2, 3): "x"}}, {"1": {"(2, 3)": "x"}}),
        (frozenset([1]), [1]),
        (1 + 2j, "(1+2j)"),
        ("\ud800 ü", "? ü"),
    ],
)
def test_columns_of_any_type_are_written_as_strict_json(tmp_path, value, written):
    folder = dump_eval_results(tmp_path, 1, [row(env_extras={"value": value})], {})
    assert lines(folder / "gsm8k.jsonl")[0]["env_extras"] == {"value": written}


def test_rollouts_are_a_line_each(tmp_path):
    sampled = Sampled([5, 6], [-0.5, float("-inf")], "stop", 3)
    turn = Turn([1, 2], sampled, reward=1.0, action="4", observations=StepResult([], 1.0, True).observations)
    trajectory = Trajectory(TrajectoryId("7", 1), [turn], "stop", [{"role": "user", "content": "2+2="}])
    path = dump_rollouts(tmp_path, 12, [as_record(trajectory)] * 2)
    assert path == tmp_path / "dumped_rollouts" / "global_step_12.jsonl"
    first, second = lines(path)
    assert first == second
    assert (first["instance_id"], first["repetition_id"], first["reward"]) == ("7", 1, 1.0)
    assert first["turns"][0]["logprobs"] == [-0.5, None]


def test_a_batch_is_read_back_as_it_was(tmp_path):
    arrays = {"rewards": np.asfortranarray(np.arange(6.0).reshape(2, 3)), "mask": np.array([[True, False]])}
    path = dump_data_batch(tmp_path, 4, arrays, {"uids": ["a", "b"], "kl": float("nan")})
    assert path == tmp_path / "dumped_data" / "global_step_4_training_input.safetensors"
    with safetensors.safe_open(path, "np") as file:
        assert json.loads(file.metadata()["json"]) == {"uids": ["a", "b"], "kl": None}
        for name in file.keys():  # noqa: SIM118
            np.testing.assert_array_equal(file.get_tensor(name), arrays[name])
        assert sorted(file.keys()) == sorted(arrays)


def test_dumps_of_the_newest_steps_are_kept_and_what_is_no_dump_stays(tmp_path):
    for step in (1, 2, 3, 10):
        dump_rollouts(tmp_path, step, [{"step": step}])
        dump_data_batch(tmp_path, step, {"mask": np.ones(1)}, {})
        if step % 2 == 0:
            dump_eval_results(tmp_path, step, [], {"eval/loss": 1.0})
    dump_eval_results(tmp_path, None, [], {"eval/loss": 1.0})
    (tmp_path / "dumped_rollouts" / "notes.txt").write_text("mine")
    (tmp_path / "global_step_1").mkdir()
    remove_old_dumps(tmp_path, step=3, max_to_keep=1)  # of a run that goes on from step 2: 10 is to be replaced
    kept = {kind: sorted(path.name for path in (tmp_path / kind).iterdir()) for kind in KINDS}
    assert kept == {
        "dumped_evals": ["eval_only", "global_step_10_evals", "global_step_2_evals"],
        "dumped_rollouts": ["global_step_10.jsonl", "global_step_3.jsonl", "notes.txt"],
        "dumped_data": [f"global_step_{step}_training_input.safetensors" for step in (10, 3)],
    }
    assert (tmp_path / "global_step_1").is_dir()
    remove_old_dumps(tmp_path / "nowhere", step=3, max_to_keep=1)


def test_a_dump_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "file").touch()
    for dump in (
        lambda: dump_rollouts(tmp_path / "file", 1, []),
        lambda: dump_data_batch(tmp_path / "file", 1, {}, {}),
        lambda: dump_eval_results(tmp_path / "file", 1, [], {}),
    ):
        with pytest.raises(StorageError, match=r"cannot write .*/file/dumped_.*; free space or check permissions"):
            dump()


def test_a_store_that_is_not_served_is_refused():
    with pytest.raises(RequestError, match="ftp:// is not served"):
        dump_rollouts("ftp://bucket", 1, [])


# -- pictures ---------------------------------------------------------------------------------------------------------

ROWS = [{"step": 0, "reward": 0.1}, {"step": 1, "reward": None}, {"step": 2, "eval": 0.5, "reward": 0.4}]


def test_a_plot_is_a_picture_with_the_line_of_each_metric(tmp_path):
    assert plot_metrics(ROWS, ["reward"], tmp_path / "new" / "rewards.png", title="Rewards", label="mean")
    data = (tmp_path / "new" / "rewards.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", data[16:24]) == (1050, 600)
    assert _pixels(tmp_path / "new" / "rewards.png", (31, 119, 180)) > 500


def test_metrics_without_numbers_make_an_empty_plot(tmp_path):
    assert plot_metrics([{"step": 0, "reward": None}], ["reward"], tmp_path / "rewards.png")


def test_without_matplotlib_there_is_no_plot_and_a_message(tmp_path):
    code = f"""
import sys
sys.modules["matplotlib"] = None  # as Python marks a module that is not there
from skyrl.train.tracking.plots import plot_metrics
assert not plot_metrics([], ["reward"], {str(tmp_path / "x.png")!r})
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert "x.png is not drawn: matplotlib is not installed; pip install 'skyrl[train]'" in run.stderr
    assert names(tmp_path) == []


def _pixels(path: Path, colour: tuple[int, int, int]) -> int:
    """Return the number of pixels that have nearly this colour."""
    shown = np.asarray(image.imread(path))[..., :3] * 255
    return int((np.abs(shown - np.array(colour)) < 8).all(-1).sum())
