"""Defects of what there is one of, as in `defects.py`: the file lock, the back-off, the folders of a user."""

from defects import Defect, Edit

REMOTE = "skyrl/utils/files/remote_folders.py"
REMOTE_TESTS = "tests/utils/test_remote_folders.py::"
HOSTILE = "test_a_hostile_archive_is_refused_and_the_model_stays"
SMALL_DEFECTS = [
    Defect(
        "P7a",
        "rows without options are decoded by a program of their own",
        [
            Edit("skyrl/backends/jax/sampling/programs.py", "    assert rows.options is not None\n", ""),
            Edit(
                "skyrl/backends/jax/sampling/programs.py",
                "    early = steps < rows.options.min_tokens\n",
                "    if rows.options is None:\n"
                "        return sample_tokens(logits, numbers, rows.temperature, rows.top_k, rows.top_p)\n"
                "    early = steps < rows.options.min_tokens\n",
            ),
            Edit("skyrl/backends/jax/sampling/runner.py", "if rows.options is None:", "if False:"),
            Edit("skyrl/backends/jax/sampling/runner.py", "self._blocks, options=True)", "self._blocks)"),
        ],
        [
            "tests/backends/test_sampler_options.py::test_options_need_no_program_of_their_own",
            "tests/backends/test_sampler.py::test_after_the_warm_up_requests_over_the_whole_domain_compile_nothing[100]",
        ],
    ),
    Defect(
        "claim-inherited",
        "a forked child that outlives its parent keeps the folder that the parent had claimed",
        [Edit("skyrl/utils/locks/file_lock.py", "fcntl.lockf if of_process else fcntl.flock", "fcntl.flock")],
        [
            "tests/utils/test_file_lock.py::"
            "test_a_forked_child_does_not_keep_the_folder_that_its_dead_parent_had_claimed"
        ],
    ),
    Defect(
        "best-forgotten",
        "a run that goes on does not know its best checkpoint, which then goes with the old ones",
        [Edit("skyrl/train/checkpoints.py", "self._ranking and self._ranking.restored(found.best)", "None")],
        [
            "tests/train/test_train_checkpoints.py::"
            "test_a_resumed_run_knows_its_best_and_one_that_is_compared_otherwise_begins_anew"
        ],
    ),
    Defect(
        "late-snapshot",
        "a checkpoint that is written beside the steps is of what the models are when it is their turn",
        [
            Edit(
                "skyrl/train/policies/on_backend.py",
                "self._client.begin(SaveCheckpoint(",
                "self._client.run(SaveCheckpoint(",
            )
        ],
        ["tests/train/test_train_policy_saves.py::test_a_save_that_was_begun_is_of_the_model_as_it_was_then"],
    ),
    Defect(
        "endless-doubling",
        "pauses between attempts double without a limit",
        [Edit("skyrl/utils/backoff.py", ", longest_s)", ", math.inf)")],
        ["tests/utils/test_backoff.py::test_pauses_double_up_to_the_longest"],
    ),
    Defect(
        "archive-link",
        "links in an archive are unpacked",
        [Edit("skyrl/utils/files/tar_folder.py", "if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or", "if")],
        [f"tests/backends/test_tar_checkpoints.py::{HOSTILE}[torch-link-.tar]"],
    ),
    Defect(
        "archive-bomb",
        "a gzipped archive is unpacked without a limit",
        [Edit("skyrl/utils/files/tar_folder.py", "if self._left < 0:", "if False:")],
        ["tests/utils/test_tar_folder.py::test_zeros_without_end_after_the_files_are_not_read_to_their_end"],
    ),
    Defect(
        "archive-tail",
        "what follows the end of an archive is not looked at",
        [Edit("skyrl/utils/files/tar_folder.py", "if reader.filled > tar.offset:", "if False:")],
        ["tests/utils/test_tar_folder.py::test_what_follows_the_end_is_refused[a second member]"],
    ),
    Defect(
        "archive-reread",
        "a version is read again from a folder of its tar's name",
        [
            Edit(
                "skyrl/backends/common/models/store.py",
                "with self.archives.as_folder(path, is_sampled=True) as folder:",
                "for folder in [path]:",
            )
        ],
        ["tests/backends/test_tar_checkpoints.py::test_a_version_that_left_memory_is_read_from_its_tar_again[torch]"],
    ),
    Defect(
        "bucket-manifest-first",
        "the manifest of a folder in a bucket is sent whether another process has sent one or not",
        [Edit(REMOTE, '"create" if older is None else older.only_this', '"overwrite"')],
        [
            REMOTE_TESTS + "test_the_manifest_is_sent_last_and_only_if_there_is_none",
            REMOTE_TESTS + "test_of_two_that_send_at_once_one_is_refused_and_the_other_is_whole",
        ],
    ),
    Defect(
        "bucket-in-place",
        "objects of the older folder are overwritten before the newer is whole",
        [Edit(REMOTE, 'f"{named[:16]}-{base}"', "base")],
        [
            REMOTE_TESTS + "test_the_older_folder_is_whole_until_the_newer_is",
            REMOTE_TESTS + "test_a_late_write_of_an_older_upload_damages_no_newer_folder",
        ],
    ),
    Defect(
        "bucket-late-removal",
        "an object has the name of one that an older upload may still remove",
        [Edit(REMOTE, "if replaced else sha256", "if False else sha256")],
        [REMOTE_TESTS + "test_a_late_removal_of_an_older_upload_damages_no_newer_folder"],
    ),
    Defect(
        "bucket-again",
        "objects that are complete are sent again",
        [Edit(REMOTE, "(found.size, found.sha256) ==", "found is")],
        [REMOTE_TESTS + "test_what_a_killed_sender_leaves_is_no_folder_and_is_not_sent_again"],
    ),
    Defect(
        "bucket-lost-answer",
        "a conditional put whose answer was lost counts as another process's",
        [Edit(REMOTE, "if store.get(key) != manifest:", "if True:")],
        [REMOTE_TESTS + "test_a_store_that_fails_at_times_loses_nothing[cut after]"],
    ),
    Defect(
        "bucket-claim-taken",
        "a run takes a folder of a bucket from one that gives signs of life",
        [
            Edit("skyrl/utils/locks/remote_claim.py", "return now is None", "return True"),
            Edit("skyrl/utils/locks/remote_claim.py", '"create" if found is None else found.only_this', '"overwrite"'),
        ],
        ["tests/utils/test_remote_claim.py::test_one_of_another_machine_that_gives_signs_of_life_is_left"],
    ),
    Defect(
        "bucket-marker-first",
        "a checkpoint in a bucket is named the newest before it is sent",
        [
            Edit("skyrl/train/checkpoints.py", "        self.place.send(target)\n", ""),
            Edit(
                "skyrl/train/checkpoints.py",
                "        self._remove_old(step,",
                "        self.place.send(target)\n        self._remove_old(step,",
            ),
        ],
        ["tests/train/test_bucket_checkpoints.py::test_a_bucket_that_is_down_in_mid_save_leaves_the_checkpoint_before"],
    ),
    Defect(
        "bucket-metrics-lost",
        "a run that goes on on another machine has no metrics of before",
        [Edit("skyrl/train/checkpoints.py", "            self.place.take_back(METRICS_FILE)\n", "")],
        ["tests/train/test_bucket_checkpoints.py::test_another_machine_goes_on"],
    ),
    Defect(
        "data-folder-ignored",
        "SKYRL_DATA has no effect",
        [Edit("skyrl/utils/files/paths.py", 'os.environ.get("SKYRL_DATA") or ', "")],
        ["tests/tinker/test_config.py::test_the_environment_names_another_data_folder"],
    ),
    Defect(
        "import-does-not-wait",
        "an adapter is not uploaded to a server that is still starting",
        [
            Edit(
                "skyrl/utils/adapters/on_server.py",
                "answer.status_code != 503 or not pause_s.isdecimal()",
                "True or not pause_s.isdecimal()",
            )
        ],
        ["tests/tinker/test_adapter_import.py::test_an_import_waits_for_a_server_that_is_starting_and_says_so_once"],
    ),
]
