"""Defects of what a run keeps: data order, checkpoints and metrics, as in `defects.py`.

The numbers are those of the list of known defects of trainers.
"""

from defects import Defect, Edit

CHECKPOINTS = "skyrl/train/checkpoints.py"
RUN = "skyrl/train/rl/run.py"
LOOP = "skyrl/train/run_loop.py"
TRAINER = "skyrl/train/rl/trainer.py"
SAVE = "                await self._save(wait=asked or exports or not cadence.beside)\n"
RENEWAL = """\
            if epoch_ends:
                await run.end_epoch()
"""
TESTS = "tests/train/"
CHECKPOINT_TESTS = TESTS + "test_train_checkpoints.py::"
OPTION_TESTS = TESTS + "test_rl_options.py::"
REFERENCE_TEST = OPTION_TESTS + "test_a_reference_that_follows_the_policy_is_resumed_and_leaves_exports_alone"
RESUME_TEST = TESTS + "test_rl_run.py::test_a_run_that_is_resumed_ends_as_one_that_was_not_interrupted"
TRACKING_TESTS = TESTS + "test_tracking.py::"

VERSIONS = "skyrl/backends/common/versions.py"
UPDATE = "skyrl/train/rl/update.py"
UPDATE_TESTS = TESTS + "test_rl_update.py::"
FAULT_TESTS = TESTS + "rollouts/test_rollout_faults.py::"

RUN_DEFECTS = [
    Defect(
        "T3.1",
        "a version is dropped under the samples that wait for it",
        [Edit(VERSIONS, "if version in self._claims and version in {", "if False and version in {")],
        ["tests/conformance/test_versions.py::test_samples_that_wait_are_drawn_from_the_version_that_they_asked_for"],
    ),
    Defect(
        "T3.2",
        "another attempt at a trajectory samples the same text",
        [Edit("skyrl/train/rollouts/rollouts.py", "again = attempt > 1 and", "again = False and")],
        [FAULT_TESTS + "test_another_attempt_is_sampled_with_another_seed_unless_told_otherwise[True]"],
    ),
    Defect(
        "T2.1",
        "the optimizer steps without a token to train on",
        [
            Edit(
                UPDATE,
                "            if not self._trains(weights, fields):\n                continue\n",
                "",
            )
        ],
        [UPDATE_TESTS + "test_no_step_is_taken_where_no_token_is_trained_on"],
    ),
    Defect(
        "T2.2",
        "the zero-variance filter keeps prompts from the critic",
        [Edit(UPDATE, "self._train_critic(batch, batch.mask, ", "self._train_critic(batch, mask, ")],
        [UPDATE_TESTS + "test_a_critic_learns_from_prompts_that_the_filter_leaves_out"],
    ),
    Defect(
        "T2.6",
        "a batch in which every prompt has one sample left ends the run",
        [Edit(UPDATE, "        except NothingToCompare:\n            raise\n", "")],
        [UPDATE_TESTS + "test_a_batch_in_which_no_prompt_keeps_two_samples_is_a_skipped_step"],
    ),
    Defect(
        "T2.7",
        "every step scores the batch before it trains on it",
        [Edit(UPDATE, "self._on_policy = _steps_once(config.trainer) and not (", "self._on_policy = False and not (")],
        [UPDATE_TESTS + "test_forward_passes_are_made_for_what_the_training_pass_does_not_tell"],
    ),
    Defect(
        "H1",
        "modules of the working directory are not found",
        [Edit("skyrl/train/commands.py", "    sys.path.append(os.getcwd())", "    os.getcwd()")],
        [TESTS + "test_first_contact.py::test_the_pages_commands_train_with_the_pages_environment"],
    ),
    Defect(
        "H5",
        "a value that equals the default counts as left out",
        [
            Edit(
                "skyrl/config/machinery/base.py",
                "        _mark(config, spec.name, getattr(config, spec.name))\n",
                "",
            )
        ],
        [TESTS + "test_validation.py::test_a_strategy_that_is_given_is_kept_though_it_is_the_default"],
    ),
    Defect(
        "F1.5b",
        "the zero-variance filter does nothing in a run",
        [Edit("skyrl/train/rl/update.py", "if self._algorithm.zero_variance_filter:", "if False:")],
        [OPTION_TESTS + "test_the_zero_variance_filter_leaves_prompts_whose_samples_are_alike_out_of_the_loss[True]"],
    ),
    Defect(
        "F1.6a",
        "a reference that follows the policy is in no checkpoint",
        [Edit(RUN, ", REFERENCE: reference}", "}")],
        [REFERENCE_TEST],
    ),
    Defect(
        "F1.6b",
        "a resumed run measures divergence from the base model again",
        [Edit(RUN, "if (checkpoint.path / REFERENCE).is_dir():", "if False:")],
        [REFERENCE_TEST],
    ),
    Defect(
        "F1.6c",
        "the policy becomes the reference by way of the folder of exports, which is removed",
        [
            Edit(LOOP, RENEWAL, ""),
            Edit(LOOP, SAVE, f"{SAVE}{RENEWAL}"),
            Edit(
                RUN,
                'tempfile.mkdtemp(prefix="skyrl-reference-")',
                'f"{self.config.trainer.export_path}/global_step_{self.trainer.global_step}"',
            ),
        ],
        [REFERENCE_TEST],
    ),
    Defect(
        "F1.12c",
        "a run goes on from a checkpoint of another model or algorithm",
        [Edit("skyrl/train/run_identity.py", "    if differing:\n", "    if False:\n")],
        [CHECKPOINT_TESTS + "test_a_checkpoint_of_another_model_or_algorithm_is_refused_with_both_values"],
    ),
    Defect(
        "F1.12d",
        "a resumed run begins its data anew",
        [Edit("skyrl/train/data/epoch_order.py", "        self._state = state.copy()\n", "")],
        [TESTS + "test_prompt_order.py::test_a_resumed_order_goes_on_as_an_uninterrupted_one"],
    ),
    Defect(
        "F1.12e",
        "a checkpoint in a bucket is written to a local folder of that name",
        [Edit("skyrl/train/places.py", "Bucket(str(path)) if is_url(path) else ", "")],
        [CHECKPOINT_TESTS + "test_a_store_that_is_not_served_is_refused_rather_than_made_a_folder"],
    ),
    Defect(
        "F1.12f",
        "a checkpoint counts as the newest before it is on disk",
        [
            Edit(
                CHECKPOINTS,
                "        with replacing_folder(target) as folder:\n",
                "        self.place.write(MARKER, str(step).encode())\n"
                "        with replacing_folder(target) as folder:\n",
            )
        ],
        [CHECKPOINT_TESTS + "test_a_killed_save_leaves_the_newest_checkpoint_whole"],
    ),
    Defect(
        "F1.12g",
        "the checkpoints of another run in the same folder are removed",
        [Edit(CHECKPOINTS, "if old <= step and self._run_of(_name(old)) == self.run_id]", "if old <= step]")],
        [CHECKPOINT_TESTS + "test_checkpoints_of_another_run_and_folders_of_others_are_never_removed"],
    ),
    Defect(
        "F1.12h",
        "the coefficient that KL control has come to is not resumed",
        [Edit(RUN, '        update.kl_controller.value = state["kl_coefficient"]\n', "")],
        [RESUME_TEST + "[ppo-fsdp2]"],
    ),
    Defect(
        "F1.12i",
        "generators of random numbers begin anew in a resumed run",
        [
            Edit(RUN, "update.generator.bit_generator.state, generator = state", "_, generator = state"),
            Edit(TRAINER, "        self.generator.bit_generator.state = state.generator\n", ""),
        ],
        [
            RESUME_TEST + "[clip_cov, whole-fsdp2]",
            OPTION_TESTS + "test_a_run_that_replaces_prompts_without_a_signal_is_resumed_bit_for_bit",
        ],
    ),
    Defect(
        "F1.12j",
        "a resumed run leaves the metrics of those before it behind",
        [Edit(RUN, "resumed_step=step or None", "resumed_step=None")],
        [TESTS + "test_rl_run.py::test_metrics_of_every_step_are_there_once_after_a_resume"],
    ),
    Defect(
        "C.9a",
        "a disk that is full at a checkpoint is an internal error with a traceback",
        [Edit("skyrl/backends/executor/executor.py", ", of_storage=True", "")],
        ["tests/backends/test_client.py::test_a_disk_that_refuses_a_checkpoint_is_a_storage_error"],
    ),
    Defect(
        "C.10a",
        "nothing is said of a tracker that fails",
        [Edit("skyrl/train/tracking/tracker.py", "except (Exception, SystemExit):", "except ZeroDivisionError:")],
        [TRACKING_TESTS + "test_a_tracker_that_fails_is_said_once_and_stops_nothing"],
    ),
    Defect(
        "C.10b",
        "a number that is not finite makes a line that is no JSON",
        [Edit("skyrl/train/tracking/tracker.py", "return number if math.isfinite(number) else None", "return number")],
        [TRACKING_TESTS + "test_numbers_of_any_library_are_written_and_what_is_none_as_null"],
    ),
]
