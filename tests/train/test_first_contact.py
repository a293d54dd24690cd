"""The first runs of a new user: what is missing is one line, before anything is loaded, and what is there runs."""

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from forked_runs import Forks, forks

from skyrl.cli import main
from skyrl.envs.tasks.arithmetic_data import arithmetic_rows, write_rows
from skyrl.train.config import DPOConfig, SFTConfig, SkyRLTrainConfig
from skyrl.train.strategy.validate import validate, validate_sft

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "add-an-environment.md").read_text()
WITHOUT_TORCH = ROOT / "tests" / "without_torch"
CLI = [sys.executable, "-P", "-c", "import sys; from skyrl.cli import main; sys.exit(main())"]
"""The console script, which does not look for modules in the working directory by itself."""


def skyrl(folder: Path, *arguments: str, torch: bool = False) -> subprocess.CompletedProcess:
    """A new process, in which torch is not installed unless it is asked for."""
    paths = [ROOT] if torch else [ROOT, WITHOUT_TORCH]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "HF_HUB_OFFLINE": "1"}
    return subprocess.run([*CLI, *arguments], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture
def folder(tmp_path) -> Path:
    """With rows, and a file that has an environment in it."""
    write_rows(tmp_path / "train.jsonl", arithmetic_rows(8, seed=0, largest=9))
    blocks = re.findall(r"```python\n# (guess\w+\.py)\n(.*?)```", PAGE, re.DOTALL)
    for name, block in blocks:
        (tmp_path / name).write_text(block)
    assert {name for name, _ in blocks} == {"guess_env.py", "guesses.py"}
    (tmp_path / "broken.py").write_text("import math\nimport numpyy\n")
    return tmp_path


RUN = [
    "train",
    "rl",
    "data.train_data=[train.jsonl]",
    "data.val_data=[]",
    "environment.env_class=arithmetic",
    "trainer.eval_interval=0",
    "trainer.eval_before_train=false",
    "trainer.train_batch_size=8",
    "trainer.policy_mini_batch_size=8",
    "trainer.max_prompt_length=64",
    "generator.n_samples_per_prompt=2",
    "generator.sampling_params.max_generate_length=4",
    "trainer.ckpt_path=run/checkpoints",
    "trainer.export_path=run",
]
TORCH = "trainer.strategy=torch"
"""It has nothing to compile."""


def of_commands(text: str) -> list[list[str]]:
    """Commands of a shell, a list of words each."""
    return [line.split() for line in text.replace("\\\n", " ").splitlines()]


@pytest.mark.full
def test_the_pages_commands_train_with_the_pages_environment(folder):
    [block] = [block for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) if "guess_env" in block]
    rows, model, train = of_commands(block)
    subprocess.run([sys.executable, *rows[1:]], cwd=folder, check=True)
    assert skyrl(folder, *model[1:]).returncode == 0
    ran = skyrl(folder, *train[1:])
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("environment  turns 3") == 4, "metrics without a tracker"
    assert "trainer.strategy=jax (it was left out)" in ran.stderr
    steps = [json.loads(line) for line in (folder / "guess/checkpoints/metrics.jsonl").read_text().splitlines()]
    assert [step["generate/failed"] for step in steps] == [0] * 4
    again = skyrl(folder, *train[1:])
    assert again.returncode == 0 and "all 4 steps were taken before; raise trainer.epochs" in again.stderr


def gpt2(folder: Path) -> str:
    """A model of which there is nothing but config.json."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    return "trainer.policy.model.path=model"


def tiny(folder: Path, tiny_model: Path) -> str:
    shutil.copytree(tiny_model, folder / "model")
    return "trainer.policy.model.path=model"


@pytest.mark.full
def test_a_model_below_the_home_folder_and_settings_of_an_environment_that_rows_name(folder, tiny_model, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    tiny(folder, tiny_model)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    own = [{**row, "env_class": "guess_env:GuessEnv", "reward_spec": {"ground_truth": "5"}} for row in rows]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    model = ["trainer.policy.model.path=~/model", "environment.skyrl_gym.GuessEnv.hint_reward=0.5"]
    ran = skyrl(folder, *RUN, *model, TORCH, torch=True)
    assert ran.returncode == 0, ran.stderr


TOKENIZERS = ["skyrl.backends.jax.config", "transformers.models.auto.tokenization_auto"]
"""Modules that what refuses something has imported, beside the trainers."""
REFUSED = {
    "an environment that is nowhere": (["environment.env_class=nowhere:Env"], ["nowhere:Env", "working directory"]),
    "an unknown environment": (["environment.env_class=arithmetics"], ["arithmetics", "did you mean 'arithmetic'"]),
    "data that are not there": (
        ["data.train_data=[none.jsonl]"],
        ["data.train_data: none.jsonl", "there is no such file"],
    ),
    "validation data that are not there": (
        ["data.val_data=[none.jsonl]", "trainer.eval_interval=1"],
        ["data.val_data: none.jsonl", "there is no such file"],
    ),
    "a context that is too long": (
        ["trainer.max_prompt_length=400000"],
        ["trainer.max_prompt_length=400000", "generator.sampling_params.max_generate_length", "was made for"],
    ),
    "a context above the backend's": (
        ["trainer.jax.max_context_length=64"],
        ["trainer.max_prompt_length=64", "trainer.jax.max_context_length"],
    ),
    "a loss that is nowhere": (["trainer.algorithm.policy_loss_type=nowhere:loss"], ["nowhere:loss"]),
    "an option that the backend does not have": (["trainer.jax.rows=3"], ["trainer.jax.rows=3", "no such option"]),
    "a template that is not there": (
        ["generator.chat_template.source=file", "generator.chat_template.name_or_path=none.jinja"],
        ["none.jinja"],
    ),
    **{
        f"a module that fails, as {field}": (
            [f"{field}={name}"],
            [name.strip("[]"), "broken.py, line 2: ModuleNotFoundError: No module named 'numpyy'; fix it"],
        )
        for field, name in {
            "environment.env_class": "broken:Env",
            "trainer.algorithm.policy_loss_type": "broken:loss",
            "trainer.algorithm.advantage_estimator": "broken:estimate",
            "trainer.callbacks": "[broken:Callback]",
        }.items()
    },
    "a callback that is not there": (
        ["trainer.callbacks=[broken_not:Callback]"],
        ["trainer.callbacks: no callback at 'broken_not:Callback'", "none is registered"],
    ),
    "a checkpoint that is not there": (
        ["trainer.resume_mode=from_path", "trainer.resume_path=run/global_step_3"],
        ["run/global_step_3"],
    ),
}


@pytest.fixture(scope="module")
def processes(tmp_path_factory) -> Iterator[Forks]:
    """Processes that have imported the trainers already, which takes ten times as long as to refuse something."""
    with forks(tmp_path_factory.mktemp("crash points"), WITHOUT_TORCH, modules=TOKENIZERS) as running:
        yield running


@pytest.fixture
def refusal(folder, processes) -> Callable[..., str]:
    """The one line that says what is wrong with arguments. Nothing was loaded or compiled."""

    def refused(*arguments: str) -> str:
        status = processes.run(*RUN, *arguments, output=folder / "said", folder=folder)
        return checked(status, (folder / "said").read_text())

    return refused


def checked(status: int, said: str) -> str:
    """The one line of a refusal."""
    assert status == 1
    assert "Traceback" not in said
    assert not re.search(r"device |compiling|reading the weights", said), said
    *_, last = said.splitlines()
    assert last.startswith("skyrl train rl: error: ")
    return last


@pytest.mark.full("an environment that is nowhere")
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_run_is_one_line_before_anything_is_loaded(folder, tiny_model, refusal, what):
    given, words = REFUSED[what]
    said = refusal(tiny(folder, tiny_model), *given)
    assert all(word in said for word in words), said


def test_an_architecture_that_is_not_implemented_is_known_from_its_configuration(folder, refusal):
    said = refusal(gpt2(folder))
    assert "trainer.policy.model.path=model: its architecture is GPT2LMHeadModel" in said


def test_a_folder_without_a_tokenizer_is_no_model(folder, tiny_model, refusal):
    given = tiny(folder, tiny_model)
    for file in (folder / "model").iterdir():
        if "token" in file.name:
            file.unlink()
    assert "trainer.policy.model.path=model: the folder has none of tokenizer.json" in refusal(given)


@pytest.mark.full
def test_a_model_that_the_hub_does_not_give_is_named_by_the_trainers_key(folder):
    ran = skyrl(folder, *RUN, "trainer.policy.model.path=nobody/nothing")  # a new process, as a user's is
    said = checked(ran.returncode, ran.stderr)
    assert "trainer.policy.model.path=nobody/nothing: no such folder" in said
    assert "built-in" not in said


@pytest.mark.slow
def test_a_loss_and_an_estimator_of_the_working_directory_are_found(folder, tiny_model):
    (folder / "mine.py").write_text(
        "from skyrl.algorithms.advantages import Advantages\n"
        "def loss(x):\n    return -x.logprobs * x.advantages\n"
        "def estimate(x):\n    return Advantages(x.rewards * 0 + 1, x.rewards)\n"
    )
    ran = skyrl(
        folder,
        *RUN,
        TORCH,
        tiny(folder, tiny_model),
        "trainer.algorithm.policy_loss_type=mine:loss",
        "trainer.algorithm.advantage_estimator=mine:estimate",
        "trainer.algorithm.use_kl_loss=false",
        torch=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert "raw_advantages_abs 1" in ran.stdout


BARE = {
    "rl": "trainer.policy.model.path was left out, and its default Qwen/Qwen2.5-1.5B-Instruct",
    "sft": "train_datasets=[]: there is nothing to train on",
    "dpo": "train_datasets=[]: there is nothing to train on",
}


def example_of(said: str) -> list[str]:
    """Arguments of the command that a message gives as an example."""
    [found] = re.findall(r"such as: skyrl ([^()]*)", said)
    return found.split()


@pytest.fixture
def no_cache(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def said_in_process(monkeypatch, tmp_path, capfd, no_cache) -> Callable[..., str]:
    """Run a command that is refused in this process. Return its standard error."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", root.handlers[:])
    monkeypatch.chdir(tmp_path)

    def said(*arguments: str) -> str:
        assert main(list(arguments)) == 1
        return capfd.readouterr().err

    return said


@pytest.mark.parametrize("kind", BARE)
def test_a_command_without_a_model_says_what_to_give_with_an_example_that_resolves(said_in_process, kind):
    said = said_in_process("train", kind)
    *_, last = said.splitlines()
    assert last.startswith(f"skyrl train {kind}: error: {BARE[kind]}")
    command, name, *overrides = example_of(last)
    assert (command, name) == ("train", kind)
    made = {"rl": SkyRLTrainConfig, "sft": SFTConfig, "dpo": DPOConfig}[kind].from_cli_overrides(overrides).resolve()
    validate(made) if isinstance(made, SkyRLTrainConfig) else validate_sft(made)
    assert "wandb" not in said.replace("tensorboard or wandb", ""), "a tracker that nobody asked for"
    assert (said.count("trainer.logger=console (it was left out)") == 1) == (kind == "rl")


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_a_model_that_was_left_out_is_told_beside_data(said_in_process, kind):
    *_, last = said_in_process("train", kind, "train_datasets=chat.jsonl").splitlines()
    assert "model.path was left out, and its default Qwen/Qwen3-0.6B is not on this machine" in last
    assert example_of(last)[:2] == ["train", kind]


@pytest.mark.full
def test_a_default_model_that_is_on_this_machine_is_used(said_in_process, tmp_path):
    (tmp_path / "Qwen" / "Qwen3-0.6B").mkdir(parents=True)
    said = said_in_process("train", "sft", "train_datasets=chat.jsonl")
    assert "model.path=Qwen/Qwen3-0.6B: the folder has no config.json" in said


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rl", "sft", "dpo"])
def test_the_example_of_a_refusal_runs(folder, tiny_model, kind):
    asked = {"role": "user", "content": "1+1="}
    answers = [[{"role": "assistant", "content": content}] for content in ("2", "3")]
    (folder / "chat.jsonl").write_text(json.dumps({"messages": [asked, *answers[0]]}))
    pair = {"prompt": [asked], "chosen": answers[0], "rejected": answers[1]}
    (folder / "pairs.jsonl").write_text(json.dumps(pair))
    refused = skyrl(folder, "train", kind)
    assert refused.returncode == 1
    (folder / "Qwen").mkdir()
    shutil.copytree(tiny_model, folder / "Qwen" / "Qwen3-0.6B")
    strategy = TORCH if kind == "rl" else "strategy=torch"
    more = ["trainer.ckpt_path=ckpts"] if kind == "rl" else ["batch_size=1"]
    ran = skyrl(folder, *example_of(refused.stderr), *more, strategy, torch=True)
    assert ran.returncode == 0, ran.stderr
