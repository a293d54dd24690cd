"""Environments: what a rollout acts in. `env.py` has the protocol; each environment is a file beside it."""

from skyrl.envs.env import ENVS, Env, EnvError, Message, StepResult, check_settings, env_class, make_env, settings_of
from skyrl.envs.tasks import (
    aime,
    arithmetic,
    gsm8k,
    gsm8k_multi_turn,
    lcb,
    llm_as_a_judge,
    math_boxed,
    search,
    searchcode,
    text2sql,
)
from skyrl.envs.threads import EnvWorkers

__all__ = [
    "ENVS",
    "Env",
    "EnvError",
    "EnvWorkers",
    "Message",
    "StepResult",
    "aime",
    "arithmetic",
    "check_settings",
    "env_class",
    "gsm8k",
    "gsm8k_multi_turn",
    "lcb",
    "llm_as_a_judge",
    "make_env",
    "math_boxed",
    "search",
    "searchcode",
    "settings_of",
    "text2sql",
]
