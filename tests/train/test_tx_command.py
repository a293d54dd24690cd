"""`tx train`: the loss falls, a killed run goes on exactly, and what is written loads elsewhere."""

import inspect
import json
import logging
import re
import sys
from pathlib import Path

import datasets
import numpy as np
import optax
import peft
import pytest
import torch
import transformers

from skyrl.errors import ConfigError
from skyrl.train.config import SFTConfig
from skyrl.train.data.files import read_rows
from skyrl.train.data.loaders import find_loader
from skyrl.tx_command import BETAS, FIXED, main, parsed

WORDS = ("red", "blue", "green", "white")
STEPS = 8
EXACT = ["jax.deterministic=true", "jax.warm_up=false", "jax.compilation_cache=false"]
LORA = ["--lora-rank", "4", "--learning-rate", "0.01"]


@pytest.fixture(autouse=True)
def logging_as_before():
    """A command sets up the logging of its process."""
    root = logging.getLogger()
    handlers, level, path = root.handlers[:], root.level, sys.path[:]
    yield
    root.handlers[:], sys.path[:] = handlers, path
    root.setLevel(level)


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"The sky is {word}."}) for word in WORDS))
    return path


@pytest.fixture(scope="module")
def command(tiny_model, texts):
    """Arguments of a short run into a folder."""

    def arguments(folder: Path, *more: str) -> list[str]:
        options = ["--model", str(tiny_model), "--dataset", str(texts), "--output-dir", str(folder)]
        options += ["--batch-size", "2", "--max-steps", str(STEPS), "--save-steps", "2"]
        return ["train", *options, *more, *EXACT]

    return arguments


@pytest.fixture(scope="module")
def adapted(command, tmp_path_factory) -> Path:
    """Folder of an uninterrupted run that trained an adapter."""
    folder = tmp_path_factory.mktemp("adapted") / "run"
    assert main(command(folder, *LORA)) == 0
    return folder


def told(folder: Path) -> list[dict]:
    """Metrics of each step, without those that are times."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if "tim" not in name} for line in lines]


def exported(folder: Path, what: str) -> Path:
    return folder / "export" / f"global_step_{STEPS}" / what


def logits(model) -> np.ndarray:
    with torch.no_grad():
        return model(torch.arange(24)[None]).logits.float().numpy()


def test_the_loss_falls(adapted):
    losses = [line["policy/loss"] for line in told(adapted)]
    assert len(losses) == STEPS and losses[-1] < 0.8 * losses[0]


def test_peft_loads_the_adapter_and_transformers_the_model_that_it_makes(adapted, tiny_model):
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype="float32")
    before = logits(base)
    with_adapter = logits(peft.PeftModel.from_pretrained(base, exported(adapted, "policy_adapter")))
    merged = logits(transformers.AutoModelForCausalLM.from_pretrained(exported(adapted, "policy"), dtype="float32"))
    assert np.abs(with_adapter - before).max() > 0.1
    np.testing.assert_allclose(merged, with_adapter, atol=1e-4)


@pytest.mark.full
def test_all_weights_are_trained_where_no_rank_is_given(command, tiny_model, tmp_path):
    assert main(command(tmp_path, "--learning-rate", "0.003", "--loader", "text")) == 0
    losses = [line["policy/loss"] for line in told(tmp_path)]
    assert losses[-1] < 0.8 * losses[0]
    assert not exported(tmp_path, "policy_adapter").exists()
    trained = transformers.AutoModelForCausalLM.from_pretrained(exported(tmp_path, "policy"), dtype="float32")
    before = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype="float32").state_dict()
    changed = [name for name, tensor in trained.state_dict().items() if not torch.equal(tensor, before[name])]
    assert len(changed) == len(before)


@pytest.mark.full
def test_a_checkpoint_is_gone_on_from_by_its_path(adapted, command, tmp_path):
    checkpoint = str(adapted / "global_step_6")
    assert main(command(tmp_path, *LORA, "--load-checkpoint-path", checkpoint)) == 0
    assert told(tmp_path) == told(adapted)[6:]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--resume", "--load-checkpoint-path", "x"], "--resume and --load-checkpoint-path both say"),
        (["--optimizer", "sgd"], "--optimizer sgd: only adamw is served"),
        (["--optimizer-args", "lr=1"], "argument --optimizer-args: lr=1 is not JSON"),
        (["--optimizer-args", "[1]"], "argument --optimizer-args: [1] is not a JSON object"),
        (["--optimizer-args", '{"beta1": 0.8}'], "--optimizer-args beta1=0.8: adamw has no such argument here"),
        (["--optimizer-args", '{"eps": 1e-6}'], "--optimizer-args eps=1e-06: only 1e-08 is served"),
        (["--optimizer-args", '{"learning_rate": 1}', "--learning-rate", "2"], "both set the learning rate"),
        (["--tracker", "wand"], "argument --tracker: invalid choice: 'wand'"),
        (
            ["--tracker", "wandb", "--tracker-args", '{"entity": "x"}'],
            '--tracker-args entity="x": only project and name',
        ),
        (["--tracker-args", '{"project": "x"}'], "there is no --tracker"),
        (["--split", "test"], "--split test: "),
        (["--lora-alpha", "8"], "--lora-alpha 8: all weights are trained, so there is no adapter to scale"),
    ],
)
def test_options_that_are_not_served_are_refused_by_name(more, words, command, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(command(tmp_path, *more))
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            ["--loader", "chat"],
            "texts.jsonl, row 0: loader=chat: the row has the columns text; give rows with messages",
        ),
        (["--loader", "nothing"], "loader=nothing: no loader named 'nothing'; known: chat, text, tx.loaders.chat"),
        (["--loader", "builtins:list"], "texts.jsonl, row 0: the loader returned"),
        (["--loader", "builtins:int"], "texts.jsonl, row 0: the loader raised TypeError"),
        (["--loader", "os:path"], "loader=os:path is a module; name a function of a row"),
    ],
)
def test_a_loader_that_does_not_fit_is_said_in_one_line(more, words, command, tmp_path, capfd):
    assert main(command(tmp_path, *more)) == 1
    said = capfd.readouterr().err
    assert words in said and "Traceback" not in said


def test_documented_names_of_loaders_are_those_of_ours():
    assert find_loader("tx.loaders.text") is find_loader("text")
    assert find_loader("tx.loaders.chat") is find_loader("chat")
    row = {"messages": [{"role": "user", "content": "a"}], "text": "not this", "system": None}
    assert find_loader("chat")(row) == {"messages": row["messages"]}
    assert find_loader("text")(row) == {"text": "not this"}
    with pytest.raises(ConfigError, match="no loader at 'no_such:thing'"):
        find_loader("no_such:thing")


@pytest.mark.full
def test_a_loader_of_ones_own_makes_rows(command, tmp_path, monkeypatch):
    (tmp_path / "shouting.py").write_text(
        "def shouted(row):\n    return {'prompt': row['text'][:4], 'completion': row['text'][4:].upper()}\n"
    )
    monkeypatch.chdir(tmp_path)
    run = command(tmp_path / "run", *LORA, "--loader", "shouting:shouted")
    assert main([*run, "num_steps=1"]) == 0
    assert told(tmp_path / "run")[0]["data/trained_tokens"] > 0


def test_a_part_of_a_split_is_read(tmp_path, texts):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train.jsonl").write_text(texts.read_text())
    assert [row["text"] for row in read_rows(f"{folder}:train[1:3]")] == ["The sky is blue.", "The sky is green."]


@pytest.mark.parametrize("split", ["train", "train[1:3]", "train[-1:]", "train[:50%]", "train[:34%]"])
def test_a_split_of_a_file_has_the_rows_that_the_datasets_library_takes(split, texts, tmp_path):
    expected = datasets.load_dataset("json", data_files=str(texts), split=split, cache_dir=str(tmp_path))
    assert [row["text"] for row in read_rows(f"{texts}:{split}")] == expected["text"]


@pytest.mark.parametrize(
    ("split", "words"), [("test", "a file has no split test; name train"), ("train[:x]", "cannot be cut")]
)
def test_another_split_of_a_file_is_refused(split, words, texts):
    with pytest.raises(ConfigError, match=re.escape(f"{texts}:{split}: {words}")):
        list(read_rows(f"{texts}:{split}"))


def fields_of(*more: str) -> SFTConfig:
    """The configuration of a command line."""
    _, overrides = parsed(["--model", "m", "--dataset", "d.jsonl", "--output-dir", "o", *more])
    return SFTConfig.from_cli_overrides(overrides).resolve()


def test_arguments_of_the_optimizer_are_those_of_optax():
    adamw = {name: one.default for name, one in inspect.signature(optax.adamw).parameters.items()}
    assert BETAS.items() <= adamw.items() and FIXED.items() <= adamw.items()
    given = {"learning_rate": 1e-3, "weight_decay": 0.2, "b1": 0.8, "eps": 1e-8}
    optimizer = fields_of("--optimizer", "adamw", "--optimizer-args", json.dumps(given)).optimizer_config
    assert (optimizer.lr, optimizer.weight_decay, optimizer.adam_betas) == (1e-3, 0.2, [0.8, adamw["b2"]])


def test_a_tracker_gets_its_arguments():
    config = fields_of("--tracker", "wandb", "--tracker-args", '{"project": "p", "name": "n"}')
    assert (config.logger, config.project_name, config.run_name) == (["console", "wandb"], "p", "n")


def test_a_run_is_resumed_on_request():
    assert [fields_of(*more).resume_from for more in (["--resume"], [])] == ["latest", "none"]


def test_fields_may_stand_on_both_sides_of_an_option():
    config = fields_of("batch_size=3", "--epochs", "2", "seed=7")
    assert (config.batch_size, config.num_epochs, config.seed) == (3, 2, 7)


def test_an_alpha_belongs_to_a_rank_that_is_set_as_a_field():
    lora = fields_of("--lora-alpha", "8", "model.lora.rank=4").model.lora
    assert (lora.rank, lora.alpha) == (4, 8)


def test_the_command_tells_its_version(capsys):
    import skyrl

    assert main(["version"]) == 0
    assert capsys.readouterr().out.strip() == skyrl.__version__
