"""Configuration of training. It is typed and checked. A file, the command line and Python have the same fields.

    config = SkyRLTrainConfig.from_cli_overrides(["trainer.policy.model.lora.rank=32", "trainer.epochs=2"])
    config = config.resolve()

Nothing here loads a model, so every part of the system may import it. `machinery.base` describes how to add a field, a
rule or your own configuration class.
"""

from skyrl.errors import ConfigError
from skyrl.train.config.algorithm import AlgorithmConfig, DynamicSamplingConfig, KLCtrlConfig
from skyrl.train.config.corrections import OffPolicyCorrectionConfig
from skyrl.train.config.environment import (
    EnvironmentConfig,
    GSM8kLLMJudgeEnvConfig,
    SearchEnvConfig,
    SkyRLGymConfig,
    Text2SQLEnvConfig,
)
from skyrl.train.config.generator import ChatTemplateConfig, EvalSamplingParams, GeneratorConfig, SamplingParams
from skyrl.train.config.inference import InferenceEngineConfig
from skyrl.train.config.machinery.base import BaseConfig, get_config_as_dict, get_config_as_yaml_str
from skyrl.train.config.megatron import (
    DEFAULT_MEGATRON_OPTIMIZER_KWARGS,
    DEFAULT_TRANSFORMER_CONFIG_KWARGS,
    MegatronConfig,
    MegatronDDPConfig,
    MegatronLoraConfig,
    MegatronTorchProfilerConfig,
)
from skyrl.train.config.models import (
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
from skyrl.train.config.policy_losses import CISPOConfig, ClipCovConfig, KLCovConfig, SAPOConfig
from skyrl.train.config.root import DataConfig, SkyRLTrainConfig, make_config
from skyrl.train.config.rules.geometry import BatchGeometry
from skyrl.train.config.sft import DPOConfig, SFTConfig
from skyrl.train.config.trainer import FullyAsyncConfig, TrainerConfig

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
