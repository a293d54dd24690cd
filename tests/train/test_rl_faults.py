"""Whole runs in which something fails: they go on, or stop with a message; then they continue as if nothing had."""

import re
import sys
import zlib
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
from envs.http_server import closed_port, serving
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from faulty import Faulty
from safetensors.numpy import load_file
from short_runs import check_equal, command, metrics, newest, train

from skyrl.envs.services import http
from skyrl.envs.tasks.arithmetic_data import arithmetic_rows, write_rows
from skyrl.train.rollouts.attempts import RolloutError

STEPS, PROMPTS, SAMPLES = 2, 4, 3
A_STEP = PROMPTS * SAMPLES
"""Episodes of a step."""
IN_STEP_2 = range(A_STEP, 2 * A_STEP)
HIDDEN = ["generate/retries"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    columns = {"reward_spec": {"ground_truth": {"target": "7"}}}
    write_rows(
        path, ({"prompt": row["prompt"], **columns} for row in arithmetic_rows(STEPS * PROMPTS, seed=0, largest=9))
    )
    return path


# -- environments -----------------------------------------------------------------------------------------------------

FAULTY = ["environment.env_class=faulty:Faulty", "generator.max_turns=3", "generator.trajectory_timeout_s=3600"]


@pytest.fixture(scope="module")
def undisturbed(rows, tiny_model, tmp_path_factory) -> Path:
    """Folder of a run of `faulty:Faulty` in which nothing failed."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    Faulty.restart({})
    train(command(rows, tiny_model, folder, *FAULTY))
    return folder


@pytest.mark.full
def test_a_raising_and_a_hanging_environment_are_closed_counted_and_left_out(rows, tiny_model, tmp_path):
    raising, hanging = IN_STEP_2[1], IN_STEP_2[7]
    Faulty.restart({raising: "raises", hanging: "hangs"})
    options = ["generator.trajectory_retries=0", "generator.max_failed_fraction=0.2", "trainer.dump_data_batch=true"]
    train(command(rows, tiny_model, tmp_path / "run", *FAULTY, *options))
    first, second = metrics(tmp_path / "run")
    assert first["generate/failed"] == 0 and first["generate/batch_num_seq"] == A_STEP
    assert second["generate/failed"] == 2 and second["generate/failed_fraction"] == 2 / A_STEP
    assert second["generate/failed_env_error"] == second["generate/failed_timeout"] == 1
    assert second["generate/batch_num_seq"] == A_STEP - 2 and second["policy/grad_norm"] > 0
    dumped = load_file(tmp_path / "run-exports" / "dumped_data" / "global_step_2_training_input.safetensors")
    assert len(dumped["mask"]) == A_STEP - 2 and dumped["mask"].any(axis=1).all()
    assert sorted(Faulty.closed) == [*range(STEPS * A_STEP)]


@pytest.mark.slow
def test_failures_that_another_attempt_does_not_meet_change_nothing(rows, tiny_model, tmp_path, undisturbed):
    Faulty.restart({IN_STEP_2[1]: "raises", IN_STEP_2[7]: "raises"})
    train(command(rows, tiny_model, tmp_path / "run", *FAULTY))
    assert [row["generate/retries"] for row in metrics(tmp_path / "run")] == [0, 2]
    check_equal(tmp_path / "run", undisturbed, STEPS, ["policy"], ignored=HIDDEN)


@pytest.mark.full
def test_too_many_failures_stop_a_run_that_continues_once_they_are_mended(rows, tiny_model, tmp_path, undisturbed):
    Faulty.restart(dict.fromkeys(IN_STEP_2, "raises"))
    arguments = command(rows, tiny_model, tmp_path / "run", *FAULTY)
    with pytest.raises(
        RolloutError,
        match=r"3 of 12 trajectories failed \(env_error 3\).*RuntimeError\('the world ended'\) \(at turn 1",
    ):
        train([*arguments, "generator.trajectory_retries=0"])
    assert newest(tmp_path / "run") == 1
    assert sorted(Faulty.closed) == [*range(STEPS * A_STEP)]
    Faulty.restart({})
    train(arguments)
    check_equal(tmp_path / "run", undisturbed, STEPS, ["policy"])


# -- servers that environments need -----------------------------------------------------------------------------------


@pytest.fixture
def no_pauses(monkeypatch) -> None:
    monkeypatch.setattr(http, "FIRST_DELAY_S", 0.0)
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


class Judge:
    """A judge whose scores are hashes of the answers. It answers 500 so many times first."""

    def __init__(self, failing: int):
        self.left = failing
        self.app = FastAPI()

        @self.app.post("/v1/chat/completions")
        async def complete(request: Request) -> JSONResponse:
            if self.left:
                self.left -= 1
                return JSONResponse({"error": "down"}, status_code=500)
            asked = (await request.json())["messages"][1]["content"]
            found = re.search(r"(=== \w{32} ===)\n(.*)\n\1", asked, re.DOTALL)
            assert found is not None
            content = f"### Final Score: {zlib.crc32(found[2].encode()) % 2}"
            return JSONResponse({"choices": [{"message": {"role": "assistant", "content": content}}]})


def test_a_judge_that_is_down_for_some_time_changes_nothing(rows, tiny_model, tmp_path, no_pauses):
    for name, failing in (("whole", 0), ("down", A_STEP * http.ATTEMPTS + 5)):
        judge = Judge(failing)
        with serving(judge.app) as address:
            options = ["environment.env_class=llm_as_a_judge", "generator.trajectory_retries=50"]
            options += ["generator.retry_with_new_seed=false"]
            options += [f"environment.skyrl_gym.llm_as_a_judge.base_url={address}/v1"]
            train(command(rows, tiny_model, tmp_path / name, *options))
        assert judge.left == 0
    assert metrics(tmp_path / "down")[0]["generate/retries"] >= 6
    check_equal(tmp_path / "down", tmp_path / "whole", STEPS, ["policy"], ignored=HIDDEN)


def found_again() -> FastAPI:
    """A search engine that finds the query itself."""
    app = FastAPI()

    @app.post("/retrieve")
    async def retrieve(request: Request) -> JSONResponse:
        query = (await request.json())["query"]
        return JSONResponse({"result": [[{"document": {"contents": f"About {query}."}, "score": 1.0}]]})

    return app


@pytest.mark.slow
def test_a_search_engine_that_goes_down_stops_a_run_that_continues_once_it_is_up(rows, tiny_model, tmp_path, no_pauses):
    port = closed_port()
    options = ["environment.env_class=faulty:Searching", "generator.max_turns=2"]
    options += [f"environment.skyrl_gym.Searching.search_url=http://127.0.0.1:{port}/retrieve"]
    with serving(found_again(), port):
        train(command(rows, tiny_model, tmp_path / "whole", *options))
    arguments = command(rows, tiny_model, tmp_path / "down", *options)
    with (
        pytest.raises(
            RolloutError, match=rf"127\.0\.0\.1:{port}/retrieve failed \(ConnectError.*is the server running"
        ),
        ExitStack() as stack,
    ):
        stack.enter_context(serving(found_again(), port))
        train(arguments, lambda metrics, step: stack.close())
    assert newest(tmp_path / "down") == 1
    with serving(found_again(), port):
        train(arguments)
    check_equal(tmp_path / "down", tmp_path / "whole", STEPS, ["policy"])


# -- trackers ---------------------------------------------------------------------------------------------------------

RAISES = """
class Run:
    def log(self, metrics, step):
        raise ConnectionError("the server is gone")
    def finish(self):
        pass
def init(**options):
    return Run()
"""
HANGS = """
import threading
end, logged = threading.Event(), []
def init(**options):
    pass
def log(metrics, step):
    end.wait()
    logged.append(step)
def finish():
    pass
"""


@pytest.mark.full
def test_a_tracker_that_raises_and_one_that_hangs_do_not_stop_a_run(
    rows, tiny_model, tmp_path, undisturbed, monkeypatch, caplog
):
    for name, text in {"wandb": RAISES, "swanlab": HANGS}.items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.setitem(sys.modules, name, None)  # what is there now comes back at the end, and these go
        del sys.modules[name]
        monkeypatch.setenv(f"{name.upper()}_MODE", "offline")
    monkeypatch.syspath_prepend(tmp_path)
    import swanlab  # pyright: ignore[reportMissingImports]

    behind: list[int] = []

    def report(metrics: Mapping[str, float], step: int) -> None:
        behind.append(len(swanlab.logged))
        if step == STEPS:
            swanlab.end.set()

    Faulty.restart({})
    train(command(rows, tiny_model, tmp_path / "run", *FAULTY, "trainer.logger=[wandb,swanlab,console]"), report)
    assert behind == [0, 0] and swanlab.logged == [1, 2]
    assert caplog.text.count("tracker wandb failed; the run goes on without it") == 1
    check_equal(tmp_path / "run", undisturbed, STEPS, ["policy"])


# -- disks ------------------------------------------------------------------------------------------------------------
