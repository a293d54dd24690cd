"""`skyrl plan`: its report, JSON and errors."""

import json
from importlib.util import find_spec

import pytest

from skyrl import cli

SIZES = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
MODEL = json.dumps(SIZES)


@pytest.fixture
def run(capsys):
    def run(*arguments: str) -> tuple[int, str, str]:
        status = cli.main(["plan", *arguments])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


@pytest.mark.parametrize(("devices", "backend"), [("h100:4", "torch"), ("v5e:4", "jax")])
def test_the_three_best_layouts_are_shown_fastest_first(run, devices, backend):
    status, text, _ = run(MODEL, "--devices", devices, "--json")
    found = json.loads(text)
    assert (status, found["backend"], len(found["layouts"])) == (0, backend, 3)
    assert found["layouts_tried"] >= 3
    seconds = [sum(1 / one[name]["tokens_per_s"][0] for name in ("training", "decoding")) for one in found["layouts"]]
    assert seconds == sorted(seconds)


def test_a_report_says_memory_rates_limits_and_hours(run):
    status, text, _ = run(MODEL, "--devices", "h100:1", "--tokens", "36e8")
    assert status == 0
    (found,) = json.loads(run(MODEL, "--devices", "h100:1", "--tokens", "36e8", "--json")[1])["layouts"]
    slow, fast = found["training"]["tokens_per_s"]
    assert found["training"]["hours"] == pytest.approx([1e6 / fast, 1e6 / slow])
    kinds = ("base weights", "KV cache", "training call", "decode call", "models", "versions")
    assert [line.split("  ")[2] for line in text.splitlines() if line.startswith("    ") and "GFLOP" not in line] == [
        *kinds
    ]
    assert f"limited by {found['training']['limit']}" in text
    assert "Rates are 25% to 70% (training)" in text


def test_the_given_layout_and_options_are_planned(run, tmp_path):
    (tmp_path / "config.json").write_text(MODEL)
    given = {
        "tensor_parallel_size": 2,
        "max_lora_rank": 8,
        "kv_cache_gib": 1,
        "config_overrides": {"num_hidden_layers": 2},
    }
    status, text, error = run(str(tmp_path), "--devices", "h100:2", "--backend-config", json.dumps(given), "--json")
    assert status == 0, error
    (found,) = json.loads(text)["layouts"]
    assert found["layout"] == {"workers": "processes", "num_workers": 2, "tensor_parallel_size": 2}
    assert json.loads(text)["parameters"] < 4e6 and json.loads(text)["trains"] == "adapters of rank 8"


def test_this_machine_has_a_plan_and_no_rates(run):
    status, text, _ = run(MODEL, "--backend", "jax", "--backend-config", '{"memory_limit_gib": 8}')
    assert status == 0 and "jax on this machine" in text and "No rates" in text
    assert "optimizer step" in text and "    training call" not in text
    assert "memory of training calls is not compiled (--compile does that for TPUs, H100 and H200)" in text


def test_a_server_is_planned_with_its_options_and_not_started(tmp_path, capsys):
    (tmp_path / "config.json").write_text(MODEL)
    options = ["--base-model", str(tmp_path), "--backend=jax", '--backend-config={"memory_limit_gib": 8}']
    assert cli.main(["serve", "--plan", *options]) == 0
    assert "jax on this machine" in capsys.readouterr().out
    assert cli.main(["serve", "--plan"]) == 1
    assert "--base-model is not given" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "h10"], "there is no such preset"),
        (["--backend", "troch"], "backend=troch: it has no planner (known: jax, "),
        (["--backend-config", "{"], "--backend-config={: not JSON"),
        (["--backend-config", "[]"], "--backend-config=[]: no object"),
        (
            ["--backend-config", '{"max_lora_rnk": 8}'],
            "max_lora_rnk: there is no such option; did you mean max_lora_rank?",
        ),
        (["--length", "0"], "--length=0: a sequence has at least one token"),
        (["--tokens", "-1"], "--tokens=-1: not above 0"),
        (["--devices", "h100", "--backend-config", '{"memory_limit_gib": 0.1}'], "nothing fits: 1 layout(s) tried"),
        (["--devices", "h100:2", "--backend-config", '{"tensor_parallel_size": 2}', "--full"], "train adapters only"),
        (
            ["--devices", "v5e:4", "--backend-config", '{"tensor_parallel_size": 8}'],
            "are 8 devices, and --devices has 4",
        ),
        (["--devices", "h100", "--compile"], "--compile: the torch backend plans without compiling"),
        (["--devices", "a100", "--backend", "jax", "--compile"], "--compile: there is no compiler for 1 x a100 here"),
        (["--devices", "h100:3", "--backend-config", '{"tensor_parallel_size": 3}'], "tensor_parallel_size=3 does not"),
    ],
)
def test_wrong_options_are_rejected_in_one_line(run, arguments, message):
    backend = [] if "--backend" in arguments or "--devices" in arguments else ["--backend", "jax"]
    status, text, error = run(MODEL, *backend, *arguments)
    assert status == 1 and text == ""
    assert message in error and error.count("\n") == 1


@pytest.mark.skipif(find_spec("libtpu") is not None, reason="libtpu is installed")
def test_compiling_for_a_tpu_without_its_compiler_is_one_line(run):
    status, _, error = run(MODEL, "--devices", "v5e:4", "--compile")
    assert status == 1 and error.count("\n") == 1 and "--compile: TPU devices need a compiler" in error


def test_a_folder_without_a_configuration_is_rejected(run, tmp_path):
    status, _, error = run(str(tmp_path), "--devices", "h100")
    assert status == 1 and f"MODEL={tmp_path}: the folder has no config.json" in error


def test_an_unknown_architecture_is_rejected_without_names_of_temporary_files(run):
    for backend in ("jax", "torch"):
        status, _, error = run(json.dumps(SIZES | {"architectures": ["No"], "model_type": "no"}), "--backend", backend)
        assert status == 1 and error.count("\n") == 1 and "/tmp" not in error and "MODEL" in error
