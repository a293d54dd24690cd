"""Classes of one's own, assignment, and plain forms (dict, YAML) of a configuration."""

import copy
import pickle
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from skyrl.config.machinery.text import dump_yaml, load_yaml
from skyrl.train.config import (
    AlgorithmConfig,
    BaseConfig,
    ConfigError,
    GeneratorConfig,
    SkyRLTrainConfig,
    TrainerConfig,
    get_config_as_dict,
    get_config_as_yaml_str,
    make_config,
)


class Shape(Enum):
    LINEAR = "linear"
    COSINE = "cosine"


@dataclass
class OverlongConfig(BaseConfig):
    length: int = 512
    factor: float = 1.0


@dataclass
class MyAlgorithm(AlgorithmConfig):
    overlong: OverlongConfig = field(default_factory=lambda: OverlongConfig(length=64))
    shape: Shape = Shape.LINEAR
    folder: Path = Path("here")
    other_shape: Shape | None = None
    window: tuple[int, int] = (0, 1)


@dataclass
class MyTrainer(TrainerConfig):
    algorithm: MyAlgorithm = field(default_factory=MyAlgorithm)
    budget: float = 1.0


@dataclass
class MyGenerator(GeneratorConfig):
    tools: list[str] = field(default_factory=list)


def test_a_field_of_an_algorithm_class_is_set_from_the_command_line():
    config = make_config(algorithm_cls=MyAlgorithm).from_cli_overrides(["trainer.algorithm.overlong.factor=0.5"])
    assert asdict(config)["trainer"]["algorithm"]["overlong"] == {"length": 64, "factor": 0.5}


def test_a_custom_configuration_is_a_train_configuration_with_the_same_defaults():
    config = make_config(algorithm_cls=MyAlgorithm)()
    expected = asdict(SkyRLTrainConfig())
    mine = asdict(config)
    for name in ("overlong", "shape", "folder", "other_shape", "window"):
        mine["trainer"]["algorithm"].pop(name)
    assert isinstance(config, SkyRLTrainConfig) and mine == expected


def test_without_classes_the_configuration_is_the_usual_one():
    assert asdict(make_config()()) == asdict(SkyRLTrainConfig())


def test_a_trainer_class_wins_over_an_algorithm_class():
    config = make_config(algorithm_cls=AlgorithmConfig, trainer_cls=MyTrainer)()
    assert type(config.trainer) is MyTrainer and type(config.trainer.algorithm) is MyAlgorithm


def test_trainer_and_generator_classes_go_together():
    config = make_config(trainer_cls=MyTrainer, generator_cls=MyGenerator).from_cli_overrides(
        ["trainer.budget=2", "generator.tools=[search]"]
    )
    assert asdict(config)["trainer"]["budget"] == 2.0 and asdict(config)["generator"]["tools"] == ["search"]


def test_a_custom_configuration_is_resolved_and_checked_as_the_usual_one():
    config = make_config(algorithm_cls=MyAlgorithm).from_cli_overrides(["trainer.algorithm.use_kl_in_reward=true"])
    with pytest.raises(ConfigError, match="use_kl_in_reward=True and use_kl_loss=True"):
        config.resolve()


def test_members_of_an_enum_and_paths_are_written_as_text():
    algorithm = MyAlgorithm.from_cli_overrides(["shape=cosine", "folder=there", "other_shape=linear"])
    assert (algorithm.shape, algorithm.folder, algorithm.other_shape) == (Shape.COSINE, Path("there"), Shape.LINEAR)


def test_tuples_are_written_as_lists():
    assert MyAlgorithm.from_cli_overrides(["window=[2, 3]"]).window == (2, 3)


def test_a_value_for_a_section_without_fields_is_refused():
    @dataclass
    class Empty(BaseConfig):
        pass

    with pytest.raises(ConfigError, match="holds fields of Empty"):
        Empty.from_dict_config(3)  # pyright: ignore[reportArgumentType]


def test_members_of_an_enum_and_paths_are_text_in_yaml():
    algorithm = MyAlgorithm.from_cli_overrides(["shape=cosine", "folder=there"])
    assert MyAlgorithm.from_dict_config(yaml.safe_load(get_config_as_yaml_str(algorithm))) == algorithm


def test_a_class_that_is_no_dataclass_is_refused_with_the_decorator():
    class Undecorated(AlgorithmConfig):
        extra: int = 1

    with pytest.raises(TypeError, match="Undecorated has extra, which are no fields yet; decorate it with @dataclass"):
        Undecorated.from_dict_config({"extra": 2})


def test_a_class_may_add_rules_without_fields():
    class Strict(AlgorithmConfig):
        def problems(self):
            yield from super().problems()
            if self.gamma != 1:
                yield f"gamma={self.gamma}: 1 in this project"

    with pytest.raises(ConfigError, match=r"gamma=0\.5: 1 in this project"):
        Strict(gamma=0.5).resolve()


def test_assignment_checks_the_value():
    config = SkyRLTrainConfig()
    with pytest.raises(ConfigError, match=r"epochs='3': give a whole number"):
        config.trainer.epochs = "3"  # pyright: ignore[reportAttributeAccessIssue]
    assert config.trainer.epochs == 1


def test_construction_checks_the_value():
    with pytest.raises(ConfigError, match=r"gamma=2: give 1 or less"):
        AlgorithmConfig(gamma=2)


def test_assignment_to_a_misspelt_field_is_refused():
    with pytest.raises(AttributeError, match="TrainerConfig has no field 'epoch'; did you mean epochs"):
        SkyRLTrainConfig().trainer.epoch = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_a_section_is_not_replaced_by_a_mapping():
    with pytest.raises(ConfigError, match=r"give one, such as TrainerConfig\.from_dict_config"):
        SkyRLTrainConfig().trainer = {"epochs": 2}  # pyright: ignore[reportAttributeAccessIssue]


def test_two_configurations_share_nothing():
    one, other = SkyRLTrainConfig(), SkyRLTrainConfig()
    one.trainer.policy.megatron_config.transformer_config_kwargs["recompute_modules"].append("mlp")
    one.data.train_data.append("a")
    assert other == SkyRLTrainConfig()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda config: pickle.loads(pickle.dumps(config))])
@pytest.mark.parametrize("config", [SkyRLTrainConfig(), SkyRLTrainConfig().resolve()], ids=["given", "resolved"])
def test_a_configuration_is_copied_and_pickled(config, copied):
    assert copied(config) == config


def test_a_dict_is_returned_as_it_is():
    given = {"a": 1}
    assert get_config_as_dict(given) is given


def test_the_dict_of_a_configuration_is_a_copy():
    config = SkyRLTrainConfig()
    get_config_as_dict(config)["data"]["train_data"].append("a")
    assert config == SkyRLTrainConfig()


@pytest.mark.parametrize("config", [SkyRLTrainConfig(), SkyRLTrainConfig().resolve()], ids=["given", "resolved"])
def test_a_configuration_comes_back_from_its_yaml(tmp_path, config):
    (tmp_path / "config.yaml").write_text(get_config_as_yaml_str(config))
    assert SkyRLTrainConfig.from_file(tmp_path / "config.yaml") == config


def test_yaml_of_a_configuration_holds_its_values():
    config = SkyRLTrainConfig.from_cli_overrides(["trainer.run_name=on", "trainer.policy.optimizer_config.lr=1e-6"])
    assert yaml.safe_load(get_config_as_yaml_str(config)) == get_config_as_dict(config)


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.sampled_from(["1e-6", "on", "null", "~", "007", "0x1f", "1_000", "12:30", "2024-01-01", "=", ".5", "-.inf"]),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=8,
)


@pytest.mark.full
@settings(max_examples=500)
@example({"\x85": "a\u2028b"})
@given(PLAIN)
def test_plain_values_come_back_from_yaml(value):
    assert load_yaml(dump_yaml(value)) == value


@pytest.mark.full
@settings(max_examples=500)
@example("\x85")
@given(PLAIN)
def test_other_readers_of_yaml_read_the_same(value):
    assert yaml.safe_load(dump_yaml(value)) == value
