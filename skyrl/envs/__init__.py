"""Environments: what a rollout acts in. `env` has the protocol, `making` finds and makes one, `reward_function` makes
one of a plain function; each environment is a file in `tasks`; `services` has what some of them ask.
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
    "no_reward",
    "search",
    "searchcode",
    "settings_of",
    "text2sql",
]
