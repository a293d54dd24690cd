"""Every field has a reader or is refused: the table of the JAX strategy against the source and against validation."""

import ast
import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from skyrl.train.config import ConfigError, FSDPConfig, MixedPrecisionConfig, SkyRLTrainConfig
from skyrl.train.config.machinery.help import describe_fields
from skyrl.train.strategy.jax_backend import JaxStrategy
from skyrl.train.strategy.jax_fields import JAX_SUPPORT
from skyrl.train.strategy.support import Status, find, unsupported
from skyrl.train.strategy.torch_fields import TORCH_SUPPORT
from skyrl.train.strategy.validate import validate
from tests.train.config.table import PATHS, another

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


def paths_with(status: Status) -> list[str]:
    return [path for path in FIELDS if find(JAX_SUPPORT, path)[1].status is status]


def test_every_field_of_every_class_has_one_status():
    assert {path for path, _ in PATHS} <= set(FIELDS)
    for path in FIELDS:
        assert isinstance(find(JAX_SUPPORT, path)[1].status, Status)


@pytest.mark.parametrize("table", [JAX_SUPPORT, TORCH_SUPPORT], ids=["jax", "fsdp2"])
def test_every_row_of_a_table_decides_about_a_field(table):
    assert {find(table, path)[0] for path in FIELDS} == set(table)


def test_a_field_that_no_row_is_about_has_no_status():
    with pytest.raises(KeyError, match=r"trainer\.epochs"):
        find({"data": JAX_SUPPORT["data"]}, "trainer.epochs")


@cache
def names_read_by(module: str) -> set[str]:
    """Attributes and keys that a module reads, also as "section.name" where the text says so.

    Algorithms also get options as keyword-only arguments.
    """
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    names = set()
    for node in ast.walk(ast.parse(Path(spec.origin).read_text())):
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
            case ast.FunctionDef() if module.startswith("skyrl.algorithms."):
                names |= {argument.arg for argument in node.args.kwonlyargs}
            case _:
                pass
    return names


@pytest.mark.parametrize(
    ("table", "path"),
    [
        *((JAX_SUPPORT, path) for path in FIELDS if find(JAX_SUPPORT, path)[1].status is Status.CONSUMED),
        *((TORCH_SUPPORT, path) for path in FIELDS if find(TORCH_SUPPORT, path)[1].status is Status.CONSUMED),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_module_that_consumes_a_field_reads_it(table, path):
    name = path.rpartition(".")[2]
    sections = {other.split(".")[-2] for other in FIELDS if other.endswith(f".{name}")}
    support = find(table, path)[1]
    section = support.section or path.split(".")[-2]
    wanted = name if len(sections) == 1 else f"{section}.{name}"  # a name alone may be another section's
    assert wanted in names_read_by(support.by)


def test_a_name_that_a_module_does_not_mention_is_not_read_by_it():
    assert "wrap_policy" not in names_read_by("skyrl.train.strategy.jax_backend")


def test_a_name_that_a_module_reads_of_another_section_is_not_read_by_it():
    assert "sampling_params.max_generate_length" in names_read_by("skyrl.train.strategy.jax_backend")
    assert "engine.max_generate_length" not in names_read_by("skyrl.train.strategy.jax_backend")


@pytest.mark.parametrize("path", paths_with(Status.WHERE_AVAILABLE))
def test_what_holds_where_available_is_said(path):
    assert f"{path}: " in JaxStrategy().where_available(SkyRLTrainConfig())


REFUSED = sorted(set(paths_with(Status.REFUSED)) & set(ROW_OF) - set(ONLY_ONE_VALUE))
"""Fields that hold values, and more than one."""


def messages(path: str, value: object) -> list[str]:
    overrides = {"trainer.strategy": "jax", path: value}
    return [
        message
        for message in unsupported(SkyRLTrainConfig.from_cli_overrides(overrides), JAX_SUPPORT)
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
    assert not [path for path in fields if find(JAX_SUPPORT, path)[1].status is Status.REFUSED]


def test_the_defaults_are_never_refused():
    config = SkyRLTrainConfig.from_cli_overrides(["trainer.strategy=jax"]).resolve()
    assert list(unsupported(config, JAX_SUPPORT)) == []


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
    (message,) = unsupported(config, JAX_SUPPORT)
    assert message.startswith("trainer.policy.fsdp_config.mixed_precision.buffer_dtype=bf16 cannot be honoured")


def test_a_field_of_ones_own_is_never_refused():
    @dataclass
    class Sharding(FSDPConfig):
        groups: int = 2

    config = SkyRLTrainConfig()
    config.trainer.policy.fsdp_config = Sharding(groups=3)
    assert list(unsupported(config, JAX_SUPPORT)) == []
