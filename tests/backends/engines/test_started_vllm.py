"""vLLM servers that are started from here: their command follows from the backend and from a trainer's fields."""

import asyncio
import logging
import re

import pytest
from pydantic import ValidationError

from skyrl.backends.engines.launcher.options import LaunchOptions
from skyrl.backends.engines.launcher.vllm import Served, devices_of, with_command
from skyrl.backends.skyrl_train_backend import SkyRLTrainBackendOverrides
from skyrl.backends.torch import TorchBackend, TorchBackendConfig
from skyrl.errors import RequestError
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.rl.run import train_rl
from skyrl.train.strategy.torch_backend import TorchStrategy
from tests.backends.engines.small_runs import APART, ENGINES, HERE, LORA, arguments, steps
from tests.backends.engines.vllm_stand_in import interpreter, started
from tests.live import make_tiny_model
from tests.waiting import until

REF = "trainer.placement.ref_num_"
LAUNCH = "trainer.torch.engines={launch: {python: /opt/vllm/bin/python}}"


def served(tmp_path, **changes) -> Served:
    given = {"model": tmp_path, "dtype": "float32", "longest": 64, "max_requests": 8, "max_logprobs": 20}
    given |= {
        "max_loras": 4,
        "max_lora_rank": 9,
        "on_gpu": False,
        "cache_gib": 2.0,
        "colocated": False,
        "development": False,
    }
    return Served(**given | changes)


def flags(options: LaunchOptions) -> dict[str, str | None]:
    """Values of the flags of a command, by their names; None where a flag has no value."""
    words = options.command[options.command.index("-m") + 2 :]
    values: dict[str, str | None] = {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            assert word not in values, "twice"
            values[word] = None if following.startswith("--") else following
    return values


def options(*given: str) -> TorchBackendConfig:
    config = SkyRLTrainConfig.from_cli_overrides([*HERE, APART, f"{LORA}rank=4", LAUNCH, *given]).resolve()
    assert not [*TorchStrategy().unsupported(config), *TorchStrategy().problems(config)]
    return TorchBackendConfig(**TorchStrategy().rl_options(config))


def problems(*given: str) -> list[str]:
    config = SkyRLTrainConfig.from_cli_overrides([*HERE, APART, f"{LORA}rank=4", *given]).resolve()
    return [*TorchStrategy().unsupported(config), *TorchStrategy().problems(config)]


def test_the_command_follows_from_the_backend(tmp_path):
    launch = with_command(LaunchOptions(python="/opt/python"), served(tmp_path))
    assert "/opt/python" in launch.command and launch.env == {"VLLM_CPU_KVCACHE_SPACE": "2"}
    assert flags(launch) == {
        "--model": str(tmp_path),
        "--dtype": "float32",
        "--max-model-len": "64",
        "--max-num-seqs": "8",
        "--max-logprobs": "20",
        "--stream-interval": "16",
        "--no-enable-chunked-prefill": None,
        "--max-num-batched-tokens": "8192",
        "--enable-lora": None,
        "--max-loras": "4",
        "--max-lora-rank": "16",
        "--host": "127.0.0.1",
        "--port": "{port}",
    }
    whole = flags(with_command(LaunchOptions(python="/opt/python"), served(tmp_path, max_loras=0, development=True)))
    on_gpu = flags(with_command(LaunchOptions(python="/opt/python"), served(tmp_path, on_gpu=True, longest=9000)))
    assert not {"--no-enable-chunked-prefill", "--max-num-batched-tokens"} & on_gpu.keys()
    long = flags(with_command(LaunchOptions(python="/opt/python"), served(tmp_path, longest=9000)))
    assert long["--max-num-batched-tokens"] == "9000"
    assert "--enable-lora" not in whole and whole["--worker-extension-cls"] == "skyrl_vllm_worker.Worker"


def test_arguments_are_spelled_as_vllm_spells_them(tmp_path):
    arguments = {"enforce_eager": True, "enable_prefix_caching": False, "seed": 3, "hf_overrides": {"a": 1}, "x": None}
    found = flags(with_command(LaunchOptions(python="python", arguments=arguments), served(tmp_path)))
    assert (found["--seed"], found["--hf-overrides"]) == ("3", '{"a": 1}')
    assert {"--enforce-eager", "--no-enable-prefix-caching"} <= found.keys() and "--x" not in found


def test_a_rank_that_vllm_does_not_serve_is_refused(tmp_path):
    with pytest.raises(RequestError, match=r"max_lora_rank=600 .* rank 512 at most"):
        with_command(LaunchOptions(python="python"), served(tmp_path, max_lora_rank=600))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"neither python nor command"),
        ({"python": "p", "command": ("x", "{port}")}, r"both python and command"),
        ({"command": ("x", "{port}"), "arguments": {"seed": 1}}, r"arguments=\{'seed': 1\} with command"),
        (
            {"python": "p", "arguments": {"--max-model-len": 9}},
            r"max-model-len=9 is another option's: .*_context_length",
        ),
    ],
)
def test_what_to_start_is_said_once(given, message):
    with pytest.raises(ValidationError, match=message):
        LaunchOptions(**given)


def test_engines_get_their_gpus_one_after_the_other(monkeypatch):
    launch = LaunchOptions(python="p", count=2, gpus=2, first_gpu=1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [devices_of(launch, number) for number in (0, 1)] == [
        {"CUDA_VISIBLE_DEVICES": "1,2"},
        {"CUDA_VISIBLE_DEVICES": "3,4"},
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,3")
    assert devices_of(launch, 0) == {"CUDA_VISIBLE_DEVICES": "5,3"}
    with pytest.raises(RequestError, match=r"engine 1 is to have .* has 3; lower engines\.launch\.count"):
        devices_of(launch, 1)
    assert devices_of(LaunchOptions(python="p"), 0) == {}


def test_a_trainers_fields_are_arguments_of_the_engines():
    given = [f"{ENGINES}num_engines=2", f"{ENGINES}tensor_parallel_size=2", f"{ENGINES}data_parallel_size=2"]
    given += [f"{ENGINES}expert_parallel_size=4", f"{ENGINES}max_num_seqs=7", f"{ENGINES}fully_sharded_loras=true"]
    given += [f"{ENGINES}enforce_eager=false", f"{ENGINES}gpu_memory_utilization=0.5"]
    given += [f"{ENGINES}engine_init_kwargs={{seed: 3}}", f"{ENGINES}distributed_executor_backend=mp"]
    engines = options(*given).engines
    assert engines.launch is not None
    assert (engines.launch.count, engines.max_requests, engines.count) == (2, 7, 2)
    assert engines.launch.arguments == {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 2,
        "enforce_eager": False,
        "gpu_memory_utilization": 0.5,
        "max_num_batched_tokens": 8192,
        "enable_prefix_caching": True,
        "enable_expert_parallel": True,
        "fully_sharded_loras": True,
        "distributed_executor_backend": "mp",
        "seed": 3,
    }


@pytest.mark.filterwarnings("ignore:.*generator.sampling_params")
@pytest.mark.parametrize(
    ("given", "mode"),
    [
        ({}, None),
        ({"temperature": 0.7}, "processed_logprobs"),
        ({"temperature": 0.7, "top_p": 0.9}, None),
        ({"temperature": 0.7, "additional_kwargs": "{presence_penalty: 0.5}"}, None),
    ],
)
def test_engines_of_a_trainer_report_the_log_probabilities_that_it_trains_on(given, mode):
    params = [f"generator.sampling_params.{name}={value}" for name, value in given.items()]
    launch = options(*params).engines.launch
    assert launch is not None and launch.arguments.get("logprobs_mode") == mode
    launch = options(*params, f"{ENGINES}engine_init_kwargs={{logprobs_mode: raw_logprobs}}").engines.launch
    assert launch is not None and launch.arguments["logprobs_mode"] == "raw_logprobs"


def test_engines_of_a_run_have_gpus_beside_its_own():
    gpus = "trainer.placement.policy_num_gpus_per_node=2"
    launch = options(gpus, f"{REF}gpus_per_node=2", f"{ENGINES}tensor_parallel_size=2").engines.launch
    assert launch is not None and (launch.gpus, launch.first_gpu) == (2, 2)


def test_engines_of_two_runs_have_nothing_to_do_with_each_other():
    one, again, other = (options(f"trainer.ckpt_path=/tmp/{name}").engines.folder for name in ("a", "a", "b"))
    assert one == again != other
    assert options(f"{LORA}lora_sync_path=/shared").engines.folder == "/shared"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([f"{ENGINES}tensor_parallel_size=2"], "tensor_parallel_size=2 without vLLM servers that are started here"),
        (
            [f"{ENGINES}enforce_eager=false", "trainer.torch.engines={launch: {command: ['x{port}']}}"],
            "how such an engine computes is said where it is started",
        ),
        ([LAUNCH, f"{ENGINES}external_server_urls=[http://a]"], "leave one of them out"),
        ([LAUNCH, f"{ENGINES}engine_init_kwargs={{enforce_eager: true}}"], "enforce_eager=true"),
        ([LAUNCH, "trainer.placement.policy_num_nodes=2", f"{REF}nodes=2"], "started on this machine alone"),
    ],
)
def test_fields_without_effect_are_refused(given, message):
    assert any(message.lower() in problem.lower() for problem in problems(*given)), problems(*given)


GPUS = "trainer.placement.policy_num_gpus_per_node"
REFUSED_ON_RAY = r"^trainer\.torch\.engines\.launch and workers on Ray \({}\): .*external_server_urls.*{}"
CLUSTER = REFUSED_ON_RAY.format("RAY_ADDRESS=head:6379", r"unset RAY_ADDRESS.*trainer\.torch\.workers=processes")


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        (["trainer.torch.workers=ray"], r"trainer\.torch\.workers=ray"),
        (["trainer.placement.policy_num_nodes=2", f"{REF}nodes=2"], r"trainer\.placement\.policy_num_nodes=2"),
        (
            ["trainer.placement.colocate_policy_ref=false", f"{REF}nodes=2", "trainer.algorithm.use_kl_loss=true"],
            r"trainer\.placement\.ref_num_nodes=2",
        ),
    ],
)
def test_engines_are_not_started_beside_workers_on_ray(monkeypatch, given, cause):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (problem,) = problems(LAUNCH, *given)
    assert re.match(REFUSED_ON_RAY.format(cause, "to "), problem), problem


def test_engines_are_not_started_beside_workers_on_a_cluster_that_the_environment_names(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    (problem,) = problems(LAUNCH, f"{GPUS}=1")
    assert re.match(CLUSTER, problem), problem


def test_workers_are_processes_beside_a_cluster_if_that_is_given(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    found = options(f"{GPUS}=2", f"{REF}gpus_per_node=2", "trainer.torch.workers=processes")
    assert (found.workers, found.num_workers) == ("processes", 2)


def test_a_server_starts_engines_only_beside_workers_of_its_machine(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    given = {f"{ENGINES}num_engines": 2, "engines": {"launch": {"python": "/opt/python"}}}
    assert SkyRLTrainBackendOverrides.model_validate(given).workers == "in_process"
    assert SkyRLTrainBackendOverrides.model_validate({**given, GPUS: 2, "workers": "processes"}).num_workers == 2
    with pytest.raises(ValueError, match=CLUSTER.removeprefix("^")):
        SkyRLTrainBackendOverrides.model_validate({**given, GPUS: 2})


def test_a_server_takes_the_same_fields():
    launch = {"launch": {"python": "/opt/python"}, "folder": "/shared"}
    config = SkyRLTrainBackendOverrides.model_validate(
        {f"{ENGINES}num_engines": 2, f"{ENGINES}tensor_parallel_size": 2, "engines": launch}
    )
    assert config.engines.launch is not None and config.engines.folder == "/shared"
    assert (config.engines.launch.count, config.engines.launch.arguments["tensor_parallel_size"]) == (2, 2)
    with pytest.raises(ValueError, match="tensor_parallel_size=2 without vLLM servers that are started here"):
        SkyRLTrainBackendOverrides.model_validate({f"{ENGINES}tensor_parallel_size": 2})


@pytest.mark.full
def test_engines_end_with_a_backend_that_is_interrupted_as_it_opens(tmp_path):
    model, python = make_tiny_model(tmp_path / "tiny"), interpreter(tmp_path)

    def progress(message: str) -> None:
        if message.startswith("waiting for"):
            until(lambda: started(tmp_path), "an engine is started")
            raise KeyboardInterrupt

    engines = {"launch": {"python": str(python)}, "folder": str(tmp_path / "shared")}
    config = TorchBackendConfig.model_validate({"max_context_length": 64, "engines": engines})
    with pytest.raises(KeyboardInterrupt):
        TorchBackend(str(model), config, progress)
    assert not list((tmp_path / "shared.engines").glob("*.json"))


@pytest.mark.full
@pytest.mark.parametrize(
    ("rank", "colocated", "temperature"),
    [(4, False, 0.7), (0, False, 1.0), (4, True, 1.0)],
    ids=["adapter", "whole model", "colocated"],
)
def test_grpo_starts_its_engines_and_they_end_with_it(tmp_path, caplog, rank, colocated, temperature):
    model, python = make_tiny_model(tmp_path / "tiny"), interpreter(tmp_path)
    place = f"trainer.placement.colocate_all={str(colocated).lower()}"
    given = arguments(tmp_path, model, place, f"{LORA}rank={rank}", f"{LORA}lora_sync_path={tmp_path}/shared")
    given += [f"{ENGINES}num_engines=2", f"{ENGINES}max_num_seqs=16"]
    given += [f"trainer.torch.engines={{max_loras: 2, launch: {{python: {python}}}}}"]
    given += [f"generator.sampling_params.temperature={temperature}"]
    with caplog.at_level(logging.WARNING):
        run = asyncio.run(train_rl(SkyRLTrainConfig.from_cli_overrides(given).resolve()))
    assert run.global_step == len(steps(tmp_path)) == 2
    assert "are drawn by this backend" not in caplog.text
    starts = started(tmp_path)
    assert len(starts) == 2
    assert all(("VLLM_SERVER_DEV_MODE" in one["environment"]) is (colocated or not rank) for one in starts)
    assert not list((tmp_path / "shared.engines").glob("*.json"))
