"""The recipes of tinker-cookbook that are run, with what has to become of the metrics of each.

What an option says of the server's model, learning rate or length is as far as the recipe's own command line goes: no
recipe is changed. Values may name `{log}`, the folder of the recipe's log, and `{state}` and `{sampler}`, the last
checkpoint of the recipe that comes `after`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MODEL = "Qwen/Qwen3-8B"

GIVEN = {"model_name": MODEL, "log_path": "{log}"}


@dataclass(frozen=True)
class Recipe:
    """A run of one recipe, and what has to become of one of its metrics."""

    name: str
    module: str
    """Below `tinker_cookbook.recipes`, or a file of ours."""
    options: Mapping[str, str]
    metric: str
    by: float
    """By how much it has to rise, or to fall if negative, from the mean of the first steps to that of the last; 0: it
    only has to be there."""
    resumed: bool = False
    """Kill it after some steps and start it again."""
    needs: Sequence[str] = field(default=())
    """Further metrics that must be there."""
    below: Mapping[str, float] = field(default_factory=dict)
    """Metrics that must be smaller than this, in absolute value, at every step."""
    after: str = ""
    """The recipe whose last checkpoint this one takes."""
    data: tuple[str, Mapping[str, str]] | None = None
    """Module that makes its data, and the options of that."""


TEACHER = "Qwen/Qwen3.6-35B-A3B"
"""Name that prompt_distillation samples the model by."""

LOOP = {"batch_size": "16", "learning_rate": "3e-3", "save_every": "6"}
RL = {"batch_size": "8", "group_size": "8", "max_tokens": "14", "learning_rate": "4e-3", "max_steps": "16"}
MATH = {
    **{"env": "gsm8k", "groups_per_batch": "8", "group_size": "8", "max_tokens": "14", "learning_rate": "4e-3"},
    **{"max_steps": "16", "eval_every": "0", "save_every": "8"},
}
"""Its data are those of rl_loop. The loss is the recipe's default, stable_reinforce."""
SDFT = {
    **{"groups_per_batch": "8", "max_tokens": "40", "learning_rate": "1e-3", "max_steps": "8", "lora_rank": "32"},
    **{"eval_every": "0", "save_every": "0"},
}
"""The model is its own teacher, which is shown the right letter."""

RECIPES = (
    Recipe("sl_loop", "sl_loop", {**LOOP, "max_steps": "12"}, "train_mean_nll", -1.0, resumed=True),
    *(
        Recipe(f"rl_loop {loss}", "rl_loop", {**RL, "loss_fn": loss}, "reward/total", 0.2)
        for loss in ("importance_sampling", "cispo", "gspo")
    ),
    Recipe("rl_loop", "rl_loop", RL, "reward/total", 0.2),
    Recipe("math_rl", "math_rl.train", MATH, "env/all/reward/total", 0.2),
    Recipe(
        "math_rl asynchronous",
        "math_rl.train",
        {**MATH, "max_steps_off_policy": "1"},
        "env/all/reward/total",
        0.2,
    ),
    Recipe(
        "math_rl streamed",
        "math_rl.train",
        {**MATH, "stream_minibatch_config.groups_per_batch": "8", "stream_minibatch_config.num_minibatches": "4"},
        "env/all/reward/total",
        0.2,
    ),
    Recipe(
        "math_rl arithmetic",
        "math_rl.train",
        {**MATH, "env": "arithmetic", "max_tokens": "5", "learning_rate": "1e-2"},
        "env/all/format",
        0.2,
        needs=("env/all/correct",),
    ),
    Recipe(
        "sl_basic",
        "sl_basic",
        {"max_steps": "6", "save_every": "3", "eval_every": "3", "learning_rate": "3e-3"},
        "train_mean_nll",
        -0.5,
        needs=("test/nll",),
    ),
    Recipe(
        "rl_basic",
        "rl_basic",
        {"max_steps": "3", "max_tokens": "14", "save_every": "2", "eval_every": "2", "learning_rate": "1e-2"},
        "env/all/reward/total",
        0.07,
    ),
    Recipe(
        "dpo",
        "preference.dpo.train",
        {"dataset": "hhh", "batch_size": "16", "learning_rate": "2e-3", "max_steps": "10"},
        "dpo_loss",
        -0.3,
        needs=("accuracy",),
    ),
    Recipe(
        "weights",
        "tests/cookbook/weights.py",
        {"checkpoint": "{state}", "sampler": "{sampler}"},
        "difference/trained",
        0,
        below={"difference/merged": 1e-4, "difference/adapter": 1e-4},
        after="sl_loop",
    ),
    Recipe(
        "rl_numerics_check",
        "rl_numerics_check.train",
        {
            **{"renderer_name": "qwen3_disable_thinking", "groups_per_batch": "2", "group_size": "4"},
            **{"max_tokens": "40", "max_trajectory_tokens": "3072", "task.num_pages_min": "2"},
            **{"task.num_pages_max": "4", "task.page_chars": "600", "learning_rate": "1e-3", "max_steps": "4"},
            **{"save_every": "0"},
        },
        "env/all/turns_per_episode",
        0,
        below={"optim/kl_sample_train_v1": 1e-3},
        needs=("env/all/pages_read",),
    ),
    Recipe(
        "guess_number",
        "multiplayer_rl.guess_number.train",
        {
            **{"renderer_name": "qwen3", "batch_size": "4", "group_size": "8", "max_tokens": "16"},
            **{"learning_rate": "4e-3", "max_steps": "12", "eval_every": "0", "save_every": "0"},
        },
        "env/all/reward/total",
        1.0,
    ),
    Recipe(
        "preference.shorter",
        "preference.shorter.train",
        {
            **{"renderer_name": "qwen3_disable_thinking", "batch_size": "4", "group_size": "8", "max_tokens": "40"},
            **{"learning_rate": "4e-3", "max_steps": "10", "eval_every": "0"},
        },
        "env/all/ac_tokens_per_turn",
        -4,
    ),
    Recipe(
        "prompt_distillation",
        "prompt_distillation.train",
        {"file_path": "{log}.jsonl", "batch_size": "16", "learning_rate": "3e-3", "max_steps": "12"},
        "train_mean_nll",
        -0.7,
        data=("prompt_distillation.create_data", {"output_file": "{log}.jsonl"}),
    ),
    Recipe("sdft", "sdft.train", SDFT, "sdft/mean_teacher_entropy", 0),
    Recipe(
        "sdft reverse",
        "sdft.train",
        {**SDFT, "reverse": "True", "learning_rate": "4e-3", "max_steps": "16"},
        "sdft/reverse_kl_mean",
        -0.015,
    ),
    Recipe(
        "text_arena",
        "multiplayer_rl.text_arena.train",
        {
            **{"renderer_name": "qwen3_disable_thinking", "batch_size": "32", "num_train_datapoints": "320"},
            **{"num_test_datapoints": "8", "max_tokens": "8", "learning_rate": "4e-3", "max_steps": "10"},
            **{"eval_every": "9", "save_every": "0"},
        },
        "env/all/reward/total",
        0,
        needs=("test/env/all/reward/total",),
    ),
)
