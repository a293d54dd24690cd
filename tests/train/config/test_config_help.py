"""Help for the command line: every field with its type, default and meaning."""

import os
from dataclasses import dataclass, field

import pytest

from skyrl.config.machinery.help import describe_fields, render_help
from skyrl.train.config import AlgorithmConfig, SkyRLTrainConfig, make_config

HOME = os.path.expanduser("~/")


@pytest.mark.parametrize(
    "line",
    [
        "trainer.policy.model.lora.rank: int = 0",
        "trainer.policy.model.path: str | None = Qwen/Qwen2.5-1.5B-Instruct",
        "trainer.critic.optimizer_config.lr: float = 5e-06",
        "trainer.policy.optimizer_config.adam_betas: list[float] = [0.9, 0.999]",
        "trainer.policy.fsdp_config.reshard_after_forward: bool | int = true",
        "trainer.policy.fsdp_config.mixed_precision.param_dtype: str = bf16",
        "trainer.ckpt_path: str = ~/ckpts/",
        'data.train_data: list[str] = ["~/data/gsm8k/train.parquet"]',
        "generator.sampling_params.stop: list[str] | None = null",
        "generator.eval_sampling_params: SamplingParams | None = null",
        "generator.eval_sampling_params.temperature: float = 0.0",
        "generator.inference_engine.engine_init_kwargs: dict[str, Any] = {}",
    ],
)
def test_help_has_each_field_with_type_and_default(line):
    assert line in render_help(SkyRLTrainConfig).splitlines()


def test_help_says_what_each_field_means():
    described = list(describe_fields(SkyRLTrainConfig()))
    text = " ".join(render_help(SkyRLTrainConfig).split())
    assert len(described) > 250
    assert all(field.meaning and f"{field.path}: " in text and field.meaning in text for field in described)


def test_a_default_in_the_help_is_what_an_override_may_say():
    for described in describe_fields(SkyRLTrainConfig()):
        if ".mixed_precision." not in described.path and ".eval_sampling_params." not in described.path:
            config = SkyRLTrainConfig.from_cli_overrides([f"{described.path}={described.default}".replace("~/", HOME)])
            assert config == SkyRLTrainConfig()


def test_fields_of_ones_own_are_in_the_help():
    @dataclass
    class Mine(AlgorithmConfig):
        overlong: int = 7
        """Tokens at the end of a response that cost reward."""

        names: list[str] = field(default_factory=list)

    lines = render_help(make_config(algorithm_cls=Mine)).splitlines()
    assert "    Tokens at the end of a response that cost reward." in lines
    assert lines[lines.index("trainer.algorithm.overlong: int = 7") + 1].startswith("    Tokens at the end")
    assert "trainer.algorithm.names: list[str] = []" in lines


def test_lines_fit_their_width():
    prose = [line for line in render_help(SkyRLTrainConfig).splitlines() if line.startswith("    ")]
    assert prose and max(map(len, prose)) <= 100
