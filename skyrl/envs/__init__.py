"""Environments of rollouts.

`env` defines the interface, `making` creates environments by name, and `reward_function` creates one from a plain
function. Each environment is a file in `tasks`. `services` contains the servers and databases that some environments
use.
"""

from skyrl.envs.env import ENVS, Env, EnvError, Message, StepResult
from skyrl.envs.making import check_settings, env_class, make_env, settings_of
from skyrl.envs.tasks import (
    aime,
    arithmetic,
    gsm8k,
    gsm8k_multi_turn,
    lcb,
    llm_as_a_judge,
    math_boxed,
    no_reward,
    search,
    searchcode,
    text2sql,
)
from skyrl.envs.threads import EnvWorkers
from skyrl.envs.tool_env import ToolEnv
from skyrl.envs.tools import tool

__all__ = [
    "ENVS",
    "Env",
    "EnvError",
    "EnvWorkers",
    "Message",
    "StepResult",
    "ToolEnv",
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
    "no_reward",
    "search",
    "searchcode",
    "settings_of",
    "text2sql",
    "tool",
]
