"""Refusals and warnings of settings that are not known, not served or not installed."""

import copy
import os
import pickle
import re
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import transformers

from skyrl.algorithms.advantages import AdvantageEstimatorRegistry, Advantages
from skyrl.algorithms.kl import KL_ESTIMATORS
from skyrl.algorithms.policy_losses import PolicyLossRegistry
from skyrl.config.trackers import choose_trackers
from skyrl.train.config import ConfigError, SFTConfig, SkyRLTrainConfig, TrainerConfig
from skyrl.train.lr_schedules import SCHEDULES
from skyrl.train.strategy.validate import validate, validate_sft

A = "trainer.algorithm."
JAX = ["trainer.strategy=jax", "trainer.logger=console"]


def check(*overrides: str) -> None:
    validate(SkyRLTrainConfig.from_cli_overrides([*JAX, *overrides]).resolve())


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        check(*overrides)
    return str(error.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (A + "policy_loss_type=dual_clp", "no policy loss named 'dual_clp'; known: .*; did you mean dual_clip?"),
        (A + "advantage_estimator=rlo", "no advantage estimator named 'rlo'; known: .*; did you mean rloo?"),
        (A + "kl_estimator_type=k33", "no KL estimator named 'k33'; known: abs, k1, k2, k3.*did you mean k3?"),
        (A + "policy_loss_type=nowhere:loss", "no policy loss at 'nowhere:loss' (No module named 'nowhere'); known:"),
        (A + "advantage_estimator=json:advantage", "no advantage estimator at 'json:advantage' ("),
        ("trainer.policy.optimizer_config.scheduler=cosin", "did you mean cosine?"),
        ("trainer.critic.optimizer_config.scheduler=linar", "did you mean linear?"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_one(override, message):
    pattern = re.escape(override) + ": .*" + ".*".join(re.escape(part) for part in message.split(".*"))
    assert re.search(pattern, refusal(override))


def test_a_way_out_is_named_with_an_unknown_name():
    assert refusal(A + "policy_loss_type=mine").endswith("registered before, or named as module:function")


def test_names_of_ones_own_are_accepted_when_registered():
    PolicyLossRegistry.register("test-validated")(lambda x: x.logprobs)
    AdvantageEstimatorRegistry.register("test-validated")(lambda x: Advantages(x.rewards, x.rewards))
    KL_ESTIMATORS.register("test-validated")(lambda logprobs, reference: logprobs - reference)
    check(*(A + name + "=test-validated" for name in ("policy_loss_type", "advantage_estimator", "kl_estimator_type")))


def test_names_of_ones_own_are_accepted_as_module_and_function():
    check(*(A + name + "=operator:add" for name in ("policy_loss_type", "advantage_estimator", "kl_estimator_type")))


def needs_nothing_else(name: str) -> bool:
    """Return True if transformers makes and runs a schedule of warm-up and number of steps alone."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    try:
        schedule = transformers.get_scheduler(name, optimizer, num_warmup_steps=2, num_training_steps=9)
        optimizer.step()
        schedule.step()
    except (TypeError, ValueError):
        return False
    return True


def test_the_known_schedules_are_those_of_transformers_that_need_no_other_argument():
    names = [kind.value for kind in transformers.SchedulerType]
    assert sorted(SCHEDULES) == sorted(name for name in names if needs_nothing_else(name))


def test_a_strategy_that_is_not_served_is_refused_with_those_that_are():
    message = refusal("trainer.strategy=megatron")
    assert message.startswith("trainer.strategy=megatron is not served yet: it would need megatron-core, ")
    assert "CUDA" in message
    assert "trainer.strategy=jax" in message and "trainer.strategy=torch" in message


def test_a_strategy_that_is_left_out_is_the_one_that_is_served():
    assert SkyRLTrainConfig().trainer.strategy == "fsdp2"
    assert SkyRLTrainConfig().resolve().trainer.strategy == "jax"


def given_in_the_constructor(strategy: str) -> SkyRLTrainConfig:
    return SkyRLTrainConfig(trainer=TrainerConfig(strategy=strategy))


def set_later(strategy: str) -> SkyRLTrainConfig:
    config = SkyRLTrainConfig()
    config.trainer.strategy = strategy
    return config


def laid_over(strategy: str) -> SkyRLTrainConfig:
    return SkyRLTrainConfig.from_cli_overrides([f"trainer.strategy={strategy}"])


@pytest.mark.parametrize("made", [given_in_the_constructor, set_later, laid_over])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda config: pickle.loads(pickle.dumps(config))])
def test_a_strategy_that_is_given_is_kept_though_it_is_the_default(made, copied):
    assert copied(made("fsdp2")).resolve().trainer.strategy == "fsdp2"
    with pytest.raises(ConfigError, match="strategy=megatron is not served yet"):
        validate(copied(made("megatron")).resolve())


def test_every_problem_is_named_at_once():
    overrides = [A + "policy_loss_type=x", A + "advantage_estimator=y", "trainer.strategy=megatron"]
    assert len(refusal(*overrides).splitlines()) == 3


def test_the_jax_strategy_is_accepted_in_silence():
    check()


@pytest.mark.parametrize(
    ("loss", "override"),
    [
        ("regular", "eps_clip_high=1e+30"),
        ("dual_clip", "clip_ratio_c=1e+30"),
        ("clip_cov", "eps_clip_high=1e+30"),
    ],
)
def test_a_setting_of_the_policy_loss_that_is_too_large_is_refused(loss, override):
    message = refusal(f"{A}policy_loss_type={loss}", f"{A}loss_reduction=token_mean", A + override)
    setting = override.rpartition(".")[2]
    assert f"trainer.algorithm: policy_loss_type='{loss}': {setting} must be a number of at most 1e+09" in message


@pytest.mark.parametrize("kind", ["a file", "read-only"])
def test_a_checkpoint_folder_that_cannot_be_written_is_refused_before_loading(kind):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        (Path(folder) / "a file").touch()
        (Path(folder) / "read-only").mkdir(mode=0o555)
        path, user = Path(folder) / kind / "run", os.geteuid()
        told = f"ckpt_path={path}: {path.parent} is no folder that this user may write to; name another folder"
        config = SFTConfig.from_cli_overrides(["train_datasets=[x.jsonl]", f"ckpt_path={path}"]).resolve()
        os.seteuid(65534 if user == 0 else user)  # root may write everywhere
        try:
            assert refusal(f"trainer.ckpt_path={path}") == f"trainer.{told}"
            with pytest.raises(ConfigError, match=re.escape(told)):
                validate_sft(config)
        finally:
            os.seteuid(user)


@pytest.mark.parametrize("name", ["ckpt_path", "export_path"])
def test_a_folder_in_a_store_that_is_not_served_is_refused(name):
    assert refusal(f"trainer.{name}=ftp://bucket/run") == (
        f"trainer.{name}: path=ftp://bucket/run: ftp:// is not served; use s3://, gs://, az:// or a folder on a disk"
    )
    config = SFTConfig.from_cli_overrides(["train_datasets=[x.jsonl]", f"{name}=ftp://bucket/run"]).resolve()
    with pytest.raises(ConfigError, match=f"^{name}: path=ftp://bucket/run: ftp:// is not served"):
        validate_sft(config)


@pytest.mark.parametrize("name", ["ckpt_path", "export_path"])
def test_a_folder_in_a_bucket_without_its_library_is_refused_with_the_command_that_installs_it(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    message = refusal(f"trainer.{name}=s3://bucket/run")
    assert message.startswith(f"trainer.{name}: path=s3://bucket/run: ")
    assert "pip install 'skyrl[buckets]'" in message


def install(folder: Path, *packages: str) -> None:
    for package in packages:
        (folder / package).mkdir()
        (folder / package / "__init__.py").write_text("")


@pytest.mark.parametrize("name", ["wandb", "mlflow", "swanlab"])
def test_a_tracker_that_is_not_installed_is_left_out_with_the_install_command(name):
    found = choose_trackers([name, "console"], {"WANDB_API_KEY": "k", "SWANLAB_API_KEY": "k"})
    assert found.usable == ["console"]
    assert found.unusable == {name: f"the package is not installed; pip install {name}"}


def test_a_folder_that_a_tracker_left_behind_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert choose_trackers("wandb", {"WANDB_API_KEY": "k"}).usable == []


@pytest.mark.parametrize(
    ("name", "environment"),
    [
        ("wandb", {"WANDB_API_KEY": "k"}),
        ("wandb", {"WANDB_MODE": "offline"}),
        ("swanlab", {"SWANLAB_API_KEY": "k"}),
        ("swanlab", {"SWANLAB_MODE": "local"}),
        ("mlflow", {}),
        ("tensorboard", {}),
        ("console", {}),
    ],
)
def test_an_installed_tracker_with_all_it_needs_is_used(name, environment, tmp_path, monkeypatch):
    install(tmp_path, name)
    monkeypatch.syspath_prepend(tmp_path)
    assert choose_trackers(name, environment) == ([name], {})


@pytest.mark.parametrize(
    ("name", "environment", "way_out"),
    [
        ("wandb", {}, "set WANDB_API_KEY, or WANDB_MODE=offline"),
        ("wandb", {"WANDB_API_KEY": ""}, "set WANDB_API_KEY"),
        ("wandb", {"WANDB_MODE": "online"}, "set WANDB_API_KEY"),
        ("swanlab", {}, "set SWANLAB_API_KEY, or SWANLAB_MODE=local"),
    ],
)
def test_an_installed_tracker_without_a_key_is_left_out_with_a_way_out(
    name, environment, way_out, tmp_path, monkeypatch
):
    install(tmp_path, name)
    monkeypatch.syspath_prepend(tmp_path)
    found = choose_trackers([name, "console"], environment)
    assert found.usable == ["console"]
    assert found.unusable[name].startswith("it has no key; ") and way_out in found.unusable[name]


def test_a_key_may_be_in_the_file_that_logging_in_writes(tmp_path, monkeypatch):
    install(tmp_path, "wandb")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / ".netrc").write_text("machine api.wandb.ai\n  login user\n  password k\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert choose_trackers("wandb", {"HOME": str(tmp_path)}).usable == ["wandb"]


def test_a_tracker_that_is_asked_for_twice_is_used_once():
    assert choose_trackers(["console", "console"]).usable == ["console"]


def test_a_run_goes_on_without_a_tracker_that_is_not_there():
    with pytest.warns(UserWarning, match="trainer.logger=wandb: the package is not installed; .* goes on without it"):
        check("trainer.logger=[wandb, console]")
