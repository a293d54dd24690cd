"""Check of a run's rows by their environments, before a model is loaded.

The constructor of an environment (`Env.__init__`) checks its row. Rows are of the same kind if they have the same
environment, and values of the same types in the same columns. For a row of each kind, the environment is created and
closed. This finds a column that only some rows lack.
"""

import copy
import logging
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from skyrl.config import SkyRLTrainConfig
from skyrl.envs import make_env, settings_of
from skyrl.errors import ConfigError
from skyrl.train.rollouts.episode import FATAL, Prompt
from skyrl.utils.chats import columns_of
from skyrl.utils.own_code import place_of

log = logging.getLogger(__name__)

KINDS = 64
"""Maximum number of kinds of rows to check."""
DEFECTS = (*FATAL, ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError)
"""Errors that creating an environment raises again for the same row."""
DEPTH = 4
"""Maximum depth of nested objects to inspect."""


async def check_rows(config: SkyRLTrainConfig, prompts: Iterable[Prompt]) -> None:
    """Create and close the environment of one row of each kind.

    Raises ConfigError if an environment rejects a row, reads a column that the row lacks, or has another defect. The
    message names file and row. Other errors are only logged here, because rollouts may retry after them.
    """
    first = {}
    for prompt in prompts:
        first.setdefault((prompt.env_class, _kind(prompt.extras, DEPTH)), prompt)
    for prompt in islice(first.values(), KINDS):
        try:
            await _make(config, prompt)
        except ConfigError as error:
            raise ConfigError(f"{prompt.source}: {error}") from error
        except KeyError as error:
            raise ConfigError(
                f"{prompt.source}: environment {prompt.env_class!r} raised KeyError: {error} when it was made for this "
                f"row, which has the columns {columns_of(prompt.extras)}; add what it reads"
            ) from error
        except DEFECTS as error:
            raise ConfigError(
                f"{prompt.source}: environment {prompt.env_class!r} cannot be made for this row ({place_of(error)}); "
                "correct its __init__"
            ) from error
        except Exception as error:
            log.warning(
                "%s: environment %r cannot be made for this row now: %s",
                prompt.source,
                prompt.env_class,
                place_of(error),
            )


async def _make(config: SkyRLTrainConfig, prompt: Prompt) -> None:
    extras = {**copy.deepcopy(dict(prompt.extras)), "max_turns": config.generator.max_turns}
    settings = settings_of(config.environment.skyrl_gym, prompt.env_class)
    env = make_env(prompt.env_class, settings, extras)
    try:
        await env.close()
    except Exception as error:
        log.debug("environment %r did not close: %r", prompt.env_class, error)


def _kind(value: Any, depth: int) -> Any:
    if isinstance(value, Mapping) and depth:
        return frozenset((key, _kind(member, depth - 1)) for key, member in value.items() if member is not None)
    return type(value).__name__
