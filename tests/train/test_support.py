"""Every field is read or refused: the metadata of fields against the source and against validation."""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import skyrl
from skyrl.config.machinery.help import describe_fields
from skyrl.config.machinery.uses import JAX, TORCH, Status, use_of
from skyrl.train.config import ConfigError, FSDPConfig, MixedPrecisionConfig, SkyRLTrainConfig
from skyrl.train.policies.sampling_options import OWN
from skyrl.train.strategy.jax_backend import JaxStrategy
from skyrl.train.strategy.validate import validate
from tests.train.config.table import PATHS, another

ROOT = Path(skyrl.__file__).parent
READERS = ("algorithms", "config", "envs", "train")
"""Folders whose files read a configuration."""
OTHERS = {
    JAX: ("config/torch_options.py", "train/strategy/torch_backend.py"),
    TORCH: ("train/strategy/jax_backend.py",),
}
"""Files that read fields for another backend than the key."""
FIELDS = [field.path for field in describe_fields(SkyRLTrainConfig())]
ROW_OF = dict(PATHS)
ONLY_ONE_VALUE = ["trainer.sequence_parallel_backend", "generator.inference_engine.backend"]
NAMED = [
    "data",
    "trainer.strategy",
    "trainer.jax",
    "trainer.policy.model.path",
    "trainer.policy.model.lora.rank",
    "trainer.critic.model.path",
    "trainer.ref.model.path",
    "trainer.policy.optimizer_config.lr",
    "trainer.policy.optimizer_config.scheduler",
    "trainer.policy.optimizer_config.num_warmup_steps",
    "trainer.critic.optimizer_config.lr",
    "trainer.algorithm",
    "trainer.fully_async",
    "trainer.one_step_off",
    "trainer.seed",
    "trainer.resume_mode",
    "trainer.resume_path",
    "trainer.ckpt_path",
    "trainer.max_ckpts_to_keep",
    "trainer.ckpt_interval",
    "trainer.hf_save_interval",
    "trainer.export_path",
    "trainer.bf16",
    "trainer.flash_attn",
    "trainer.epochs",
    "trainer.update_epochs_per_batch",
    "trainer.train_batch_size",
    "trainer.policy_mini_batch_size",
    "trainer.critic_mini_batch_size",
    "trainer.micro_train_batch_size_per_gpu",
    "trainer.micro_forward_batch_size_per_gpu",
    "trainer.update_ref_every_epoch",
    "trainer.eval_batch_size",
    "trainer.eval_before_train",
    "trainer.eval_interval",
    "trainer.max_prompt_length",
    "trainer.project_name",
    "trainer.run_name",
    "trainer.logger",
    "trainer.dump_eval_results",
    "generator.n_samples_per_prompt",
    "generator.max_turns",
    "generator.max_input_length",
    "generator.chat_template",
    "generator.chat_template_kwargs",
    "generator.sampling_params.max_generate_length",
    "generator.sampling_params.temperature",
    "generator.sampling_params.stop",
    "generator.sampling_params.logprobs",
    "generator.use_conversation_multi_turn",
    "generator.append_eos_token_after_stop_str_in_multi_turn",
    "generator.eval_sampling_params.max_generate_length",
    "generator.eval_sampling_params.temperature",
    "generator.eval_n_samples_per_prompt",
    "generator.zero_reward_on_non_stop",
    "generator.apply_overlong_filtering",
    "generator.step_wise_trajectories",
    "environment",
]
"""Fields, or whole sections, that the work on algorithms and on the trainer is about."""


CALLED = {"sampling_params": ("params",), "eval_sampling_params": ("params",)}
"""Other names by which the source calls a section."""


def status_of(path: str, by: str = JAX) -> Status:
    return use_of(SkyRLTrainConfig, path, by).status


def paths_with(status: Status) -> list[str]:
    return [path for path in FIELDS if status_of(path) is status]


def test_the_fields_of_the_public_table_exist():
    assert {path for path, _ in PATHS} <= set(FIELDS)


@cache
def names_read_for(by: str) -> set[str]:
    """Attributes and keys that the source reads for a backend, also as "section.name" where the text says so.

    Algorithms also get options as keyword-only arguments. Checks of a section's own fields (`problems`) do not count.
    """
    names = set[str]()
    for path in (path for folder in READERS for path in sorted((ROOT / folder).rglob("*.py"))):
        file = path.relative_to(ROOT).as_posix()
        if file not in OTHERS[by] and not file.startswith(("config/machinery/", "config/rules/")):
            names |= names_read_by(file)
    return names | {f"params.{name}" for name in OWN}


@cache
def names_read_by(file: str) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        match node:
            case ast.Attribute(attr=name, ctx=ast.Load(), value=value):
                names.add(name)
                match value:
                    case ast.Attribute(attr=section) | ast.Name(id=section):
                        names.add(f"{section}.{name}")
                    case _:
                        pass
            case ast.Subscript(slice=ast.Constant(value=str(name)), ctx=ast.Load()):
                names.add(name)
            case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value=str(name)), *_]):
                names.add(name)
            case ast.FunctionDef() if file.startswith("algorithms/"):
                names |= {argument.arg for argument in node.args.kwonlyargs}
            case _:
                pass
    return names


@pytest.mark.parametrize("by", [JAX, TORCH])
def test_every_field_that_is_not_refused_is_read(by):
    unread = []
    for path in FIELDS:
        section, name = path.split(".")[-2:]
        places = {other.split(".")[-2] for other in FIELDS if other.endswith(f".{name}")}
        wanted = {name} if len(places) == 1 else {f"{called}.{name}" for called in (section, *CALLED.get(section, ()))}
        if status_of(path, by) is Status.READ and not wanted & names_read_for(by):
            unread.append(path)
    assert unread == []


def test_a_name_that_a_file_reads_of_another_section_does_not_count():
    assert "sampling_params.max_generate_length" in names_read_by("train/strategy/jax_backend.py")
    assert "engine.max_generate_length" not in names_read_by("train/strategy/jax_backend.py")


@pytest.mark.parametrize("path", paths_with(Status.WHERE_AVAILABLE))
def test_what_holds_where_available_is_said(path):
    assert f"{path}: " in JaxStrategy().where_available(SkyRLTrainConfig())


REFUSED = sorted(set(paths_with(Status.REFUSED)) & set(ROW_OF) - set(ONLY_ONE_VALUE))
"""Fields that hold values, and more than one."""


def messages(path: str, value: object) -> list[str]:
    overrides = {"trainer.strategy": "jax", path: value}
    return [
        message
        for message in JaxStrategy().unsupported(SkyRLTrainConfig.from_cli_overrides(overrides))
        if message.startswith(f"{path}=")
    ]


@pytest.mark.parametrize("path", REFUSED)
def test_a_refused_field_is_refused_when_it_is_set_with_the_reason_and_a_way_out(path):
    (message,) = messages(path, another(path, ROW_OF[path]))
    assert "cannot be honoured with trainer.strategy=jax: " in message
    assert any(way in message for way in ("leave ", "set ", "write ", "use ", "puts ", "=true"))


@pytest.mark.parametrize("path", [path for path in ROW_OF if path not in paths_with(Status.REFUSED)])
def test_a_field_that_is_honoured_is_not_refused(path):
    assert messages(path, another(path, ROW_OF[path])) == []


@pytest.mark.parametrize("name", NAMED)
def test_a_field_that_the_trainer_and_its_algorithms_are_about_is_never_refused(name):
    fields = [path for path in FIELDS if path == name or path.startswith(f"{name}.")]
    assert fields
    assert not [path for path in fields if status_of(path) is Status.REFUSED]


def test_the_defaults_are_never_refused():
    config = SkyRLTrainConfig.from_cli_overrides(["trainer.strategy=jax"]).resolve()
    assert list(JaxStrategy().unsupported(config)) == []


def test_validation_refuses_what_the_strategy_cannot_honour():
    overrides = ["trainer.strategy=jax", "trainer.logger=console", "trainer.disable_fast_tokenizer=true"]
    config = SkyRLTrainConfig.from_cli_overrides(overrides).resolve()
    with pytest.raises(
        ConfigError, match=r"disable_fast_tokenizer=True cannot be honoured .* leave it at False"
    ) as error:
        validate(config)
    assert len(str(error.value).splitlines()) == 1


def test_sections_that_are_set_in_code_are_looked_into():
    config = SkyRLTrainConfig()
    config.trainer.policy.fsdp_config = FSDPConfig(mixed_precision=MixedPrecisionConfig(buffer_dtype="bf16"))
    (message,) = JaxStrategy().unsupported(config)
    assert message.startswith("trainer.policy.fsdp_config.mixed_precision.buffer_dtype=bf16 cannot be honoured")


def test_a_field_of_ones_own_is_never_refused():
    @dataclass
    class Sharding(FSDPConfig):
        groups: int = 2

    config = SkyRLTrainConfig()
    config.trainer.policy.fsdp_config = Sharding(groups=3)
    assert list(JaxStrategy().unsupported(config)) == []
