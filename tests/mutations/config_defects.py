"""Defects of the training configuration: what is accepted and does nothing, or something else; as in `defects.py`.

The numbers are those of the list of known defects of trainers, section by section.
"""

from defects import Defect, Edit

CONFIG = "skyrl/config/"
CONFIG_TESTS = "tests/train/config/"
TRAIN = "skyrl/train/"
TRAIN_TESTS = "tests/train/"

CONFIG_DEFECTS = [
    Defect(
        "F1.7",
        "a nested override of the training configuration drops defaults that its parent gives",
        [
            Edit(
                CONFIG + "machinery/base.py",
                "below = spec.base() if current is None else current",
                "below = spec.config_class()",
            )
        ],
        [
            CONFIG_TESTS + "test_config_overrides.py::test_a_lora_rank_alone_keeps_the_path_of_the_policy",
            CONFIG_TESTS + "test_config_overrides.py::test_a_weight_decay_alone_keeps_the_learning_rate_of_the_critic",
            CONFIG_TESTS
            + "test_config_overrides.py::test_an_evaluation_temperature_alone_keeps_the_length_of_training",
        ],
    ),
    Defect(
        "F1.7b",
        "values of a mapping of overrides become text and are read again",
        [
            Edit(
                CONFIG + "machinery/text.py",
                "pairs = list(overrides.items())",
                "pairs = [(key, Written(str(value))) for key, value in overrides.items()]",
            )
        ],
        [CONFIG_TESTS + "test_config_overrides.py::test_values_of_a_mapping_never_become_text"],
    ),
    Defect(
        "F1.12",
        "runs share a folder for checkpoints by default, so that a new one goes on from another's",
        [
            Edit(
                CONFIG + "trainer.py",
                "os.path.join(self.ckpt_path, self.project_name, self.run_name)",
                "self.ckpt_path",
            )
        ],
        [CONFIG_TESTS + "test_config_resolve.py::test_a_run_has_a_folder_of_its_own_for_checkpoints_by_default"],
    ),
    Defect(
        "F1.12b",
        "a folder for checkpoints that was given is not the one that is used",
        [Edit(CONFIG + "trainer.py", "if self.ckpt_path == TrainerConfig().ckpt_path:", "if True:")],
        [CONFIG_TESTS + "test_config_resolve.py::test_a_folder_for_checkpoints_that_is_given_is_used_as_it_is"],
    ),
    Defect(
        "F1.13b",
        "token masks alone are not seen as corrections that need the sampler's log-probabilities",
        [Edit(CONFIG + "corrections.py", "                self.token_mask_is_threshold_low,\n", "")],
        [
            CONFIG_TESTS + "test_config_rules.py::test_what_cannot_be_done_is_refused_with_its_values",
            "tests/algorithms/test_corrections.py::test_each_option_alone_asks_for_the_rollouts_logprobs",
        ],
    ),
    Defect(
        "F1.13c",
        "the old name of token weights caps ratios at its default, which is negative",
        [Edit(CONFIG + "algorithm.py", "if self.use_tis and self.tis_imp_ratio_cap <= 0:", "if False:")],
        [CONFIG_TESTS + "test_config_rules.py::test_what_cannot_be_done_is_refused_with_its_values"],
    ),
    Defect(
        "F1.14",
        "a sampling parameter is accepted and does nothing",
        [Edit(TRAIN + "policies/sampling_options.py", "repetition_penalty=params.repetition_penalty, ", "")],
        [
            TRAIN_TESTS + "test_support.py::test_every_field_that_is_not_refused_is_read",
            TRAIN_TESTS + "test_sampling_options.py::test_penalties_are_those_of_the_configuration",
        ],
    ),
    Defect(
        "F1.14b",
        "an option that is said to be read is not",
        [
            Edit(
                TRAIN + "strategy/jax_backend.py",
                'trainer.gradient_checkpointing if trainer.is_given(CHECKPOINTING) else "auto"',
                '"auto"',
            )
        ],
        [
            TRAIN_TESTS + "test_jax_options.py::test_an_option_follows_from_other_fields",
        ],
    ),
    Defect(
        "F1.15",
        "batch sizes that do not divide over the ranks are accepted and fail in the first step",
        [Edit(CONFIG + "rules/geometry.py", "if rows % self.ranks:", "if rows < self.ranks:")],
        [CONFIG_TESTS + "test_config_geometry.py::test_validated_means_runnable_and_refused_means_not"],
    ),
    Defect(
        "F1.18",
        "validation changes the configuration that it validates",
        [
            Edit(
                CONFIG + "machinery/base.py",
                "        config = copy.deepcopy(self)\n        _raise_if_any(problem for",
                "        config = self\n        _raise_if_any(problem for",
            )
        ],
        [CONFIG_TESTS + "test_config_resolve.py::test_resolving_leaves_the_configuration_as_it_was"],
    ),
    Defect(
        "F1.22",
        "an estimator that compares samples trains on one sample without a word",
        [Edit(CONFIG + "rules/root.py", "if algorithm.advantage_estimator in GROUP_ESTIMATORS:", "if False:")],
        [CONFIG_TESTS + "test_config_rules.py::test_what_cannot_be_done_is_refused_with_its_values"],
    ),
    Defect(
        "F1.23",
        "the docs name a field that does not exist",
        [
            Edit(
                "docs/algorithms.md",
                "trainer.algorithm.off_policy_correction.tis_ratio_type",
                "trainer.algorithm.off_policy.tis_ratio_type",
            )
        ],
        [TRAIN_TESTS + "test_config_page.py::test_keys_that_the_docs_name_exist"],
    ),
    Defect(
        "F1.23b",
        "the page of fields names one that does not exist",
        [Edit("docs/config.md", "| `colocate_policy_ref` |", "| `colocate_critic_reward` |")],
        [TRAIN_TESTS + "test_config_page.py::test_the_page_is_what_its_command_writes"],
    ),
    Defect(
        "server-takes-defaults",
        "a server that is given one field of a trainer's configuration takes the defaults of all others",
        [Edit("skyrl/config/torch_options.py", "in followed.items() if name in names}", "in followed.items()}")],
        [
            "tests/train/test_torch_options.py::"
            "test_a_server_takes_from_a_field_what_follows_from_it_and_nothing_else[trainer.rope_theta]"
        ],
    ),
    Defect(
        "checkpointing-when-given",
        "gradient checkpointing is off unless it is given",
        [
            Edit(
                "skyrl/config/torch_options.py",
                '"gradient_checkpointing": trainer.gradient_checkpointing,',
                '"gradient_checkpointing": trainer.is_given("gradient_checkpointing"),',
            )
        ],
        ["tests/train/test_torch_options.py::test_layers_are_computed_again_as_documented_unless_it_is_switched_off"],
    ),
]
