"""Families of models, a file each. Importing the package registers all of them in `skyrl.tx.design.family.FAMILIES`.

Neither JAX nor torch nor transformers is loaded here.
"""

from skyrl.tx.design.family import FAMILIES
from skyrl.tx.families import deepseek_v3, gemma3, llama, mistral, olmo2, qwen2, qwen3, qwen3_5, qwen3_moe
from skyrl.tx.families.known import architectures, check_known, design_of, text_config

__all__ = [
    "FAMILIES",
    "architectures",
    "check_known",
    "deepseek_v3",
    "design_of",
    "gemma3",
    "llama",
    "mistral",
    "olmo2",
    "qwen2",
    "qwen3",
    "qwen3_5",
    "qwen3_moe",
    "text_config",
]
