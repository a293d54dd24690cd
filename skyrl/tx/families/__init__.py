"""Model families, one file each. Importing the package registers them all in `skyrl.tx.design.family.FAMILIES`.

These modules import neither JAX nor torch nor transformers.
"""

from skyrl.tx.design.family import FAMILIES
from skyrl.tx.families import deepseek_v3, gemma3, llama, mistral, olmo2, qwen2, qwen3, qwen3_5, qwen3_moe
from skyrl.tx.families.lookup import architectures, check_known, design_of, text_config

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
