"""Configuration of training. It is typed and checked. A file, the command line and Python have the same fields.

    config = SkyRLTrainConfig.from_cli_overrides(["trainer.policy.model.lora.rank=32", "trainer.epochs=2"])
    config = config.resolve()

A field has its type, bounds, default and text, the backends that reject it, and the options of a backend that follow
from it, all in one place (`machinery.uses`). `machinery.base` describes how to add a field, a rule or your own class.
`skyrl.train.config` is the documented import path of these classes. Nothing here loads a model, so every part of the
system may import it.
"""

from skyrl.config.algorithm import (
    AlgorithmConfig,
    CISPOConfig,
    ClipCovConfig,
    DynamicSamplingConfig,
    KLCovConfig,
    KLCtrlConfig,
    OffPolicyCorrectionConfig,
    SAPOConfig,
)
from skyrl.config.environment import (
    EnvironmentConfig,
    GSM8kLLMJudgeEnvConfig,
    SearchEnvConfig,
    SkyRLGymConfig,
    Text2SQLEnvConfig,
)
from skyrl.config.generator import ChatTemplateConfig, EvalSamplingParams, GeneratorConfig, SamplingParams
from skyrl.config.inference import InferenceEngineConfig
from skyrl.config.machinery.base import BaseConfig, get_config_as_dict, get_config_as_yaml_str
from skyrl.config.megatron import (
    DEFAULT_MEGATRON_OPTIMIZER_KWARGS,
    DEFAULT_TRANSFORMER_CONFIG_KWARGS,
    MegatronConfig,
    MegatronDDPConfig,
    MegatronLoraConfig,
    MegatronTorchProfilerConfig,
)
from skyrl.config.models import (
    CriticConfig,
    FSDPConfig,
    MixedPrecisionConfig,
    ModelConfig,
    OptimizerConfig,
    PlacementConfig,
    PolicyConfig,
    RefConfig,
    SkyRLLoraConfig,
)
from skyrl.config.root import DataConfig, SkyRLTrainConfig, make_config
from skyrl.config.rules.geometry import BatchGeometry
from skyrl.config.sft import DPOConfig, SFTConfig
from skyrl.config.trainer import FullyAsyncConfig, TrainerConfig
from skyrl.errors import ConfigError

__all__ = [
    "DEFAULT_MEGATRON_OPTIMIZER_KWARGS",
    "DEFAULT_TRANSFORMER_CONFIG_KWARGS",
    "AlgorithmConfig",
    "BaseConfig",
    "BatchGeometry",
    "CISPOConfig",
    "ChatTemplateConfig",
    "ClipCovConfig",
    "ConfigError",
    "CriticConfig",
    "DPOConfig",
    "DataConfig",
    "DynamicSamplingConfig",
    "EnvironmentConfig",
    "EvalSamplingParams",
    "FSDPConfig",
    "FullyAsyncConfig",
    "GSM8kLLMJudgeEnvConfig",
    "GeneratorConfig",
    "InferenceEngineConfig",
    "KLCovConfig",
    "KLCtrlConfig",
    "MegatronConfig",
    "MegatronDDPConfig",
    "MegatronLoraConfig",
    "MegatronTorchProfilerConfig",
    "MixedPrecisionConfig",
    "ModelConfig",
    "OffPolicyCorrectionConfig",
    "OptimizerConfig",
    "PlacementConfig",
    "PolicyConfig",
    "RefConfig",
    "SAPOConfig",
    "SFTConfig",
    "SamplingParams",
    "SearchEnvConfig",
    "SkyRLGymConfig",
    "SkyRLLoraConfig",
    "SkyRLTrainConfig",
    "Text2SQLEnvConfig",
    "TrainerConfig",
    "get_config_as_dict",
    "get_config_as_yaml_str",
    "make_config",
]
