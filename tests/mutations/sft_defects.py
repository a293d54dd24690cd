"""Defects of supervised fine-tuning, which train on the wrong tokens or with the wrong weight, as in `defects.py`."""

from defects import Defect, Edit

SFT = "skyrl/train/sft/"
TESTS = "tests/train/sft/"
MASKS = TESTS + "test_sft_masks.py::"
LEFT = "tests/train/test_left_models.py::"
ROWS = TESTS + "test_sft_rows.py::"
BATCHES = TESTS + "test_sft_batches.py::"
CHATS = "tests/train/test_chat_rows.py::"
ENCODINGS = "tests/train/test_encodings.py::"
FILES = "tests/train/test_chat_files.py::"
DATA = "skyrl/train/data/"
TRAINER = TESTS + "test_sft_trainer.py::"

SFT_DEFECTS = [
    Defect(
        "SFT.1",
        "the prompt is taken for the beginning of the conversation without looking",
        [Edit(SFT + "conversations.py", "if agree == len(before) or text.startswith(shorter):", "if True:")],
        [
            MASKS + "test_a_message_that_the_template_renders_differently_once_there_is_more_is_refused",
            MASKS + "test_a_prompt_that_is_not_the_beginning_of_the_conversation_is_refused",
        ],
    ),
    Defect(
        "SFT.2",
        "rows that have nothing to train on disappear without a word",
        [Edit(SFT + "datasets.py", "left_out.setdefault(example, []).append(number)", "continue")],
        [ROWS + "test_rows_that_are_left_out_are_counted_by_reason_and_named"],
    ),
    Defect(
        "SFT.3",
        "the mask is not cut with the tokens",
        [Edit(SFT + "examples.py", "mask[: self.max_length], truncated", "mask, truncated")],
        [ROWS + "test_truncation_cuts_tokens_and_mask_at_the_same_place"],
    ),
    Defect(
        "SFT.4",
        "each row's loss is a mean of its own, so that short answers count for more",
        [
            Edit(
                SFT + "batches.py",
                "return weighted_data(examples, [scale] * len(examples))",
                "return [_datum(example, 1.0 / len(examples) / example.trained_tokens) for example in examples]",
            )
        ],
        [
            BATCHES + "test_the_loss_of_a_batch_is_the_mean_over_trained_tokens_in_any_order_and_however_it_is_cut",
            TRAINER + "test_20_steps_equal_torch",
        ],
    ),
    Defect(
        "SFT.5",
        "the mask is that of the token that predicts instead of the token that is predicted",
        [Edit(SFT + "batches.py", "example.mask[1:].astype", "example.mask[:-1].astype")],
        [BATCHES + "test_each_token_predicts_the_next_one", TRAINER + "test_20_steps_equal_torch"],
    ),
    Defect(
        "SFT.6",
        "a short batch at the end of an epoch is left out",
        [
            Edit(
                "skyrl/train/data/epoch_order.py",
                "rows - rows % batch_size if whole_batches else rows",
                "rows - rows % batch_size",
            )
        ],
        [TRAINER + "test_a_short_batch_at_the_end_of_an_epoch_trains_on_what_is_there"],
    ),
    Defect(
        "SFT.7",
        "a resumed run has the weights of its checkpoint but begins with the first step",
        [Edit(SFT + "trainer.py", "self.global_step = found.step", "self.global_step = 0")],
        [TRAINER + "test_a_run_killed_after_any_step_and_resumed_equals_the_uninterrupted_one_bit_for_bit"],
    ),
    Defect(
        "SFT.8",
        "a trailing question of the user is left in the row, and nothing is said of it",
        [Edit(SFT + "examples.py", 'messages[-1]["role"] != "assistant"', "not messages")],
        [ROWS + "test_rows_that_are_left_out_are_counted_by_reason_and_named"],
    ),
    Defect(
        "USE.1",
        "a run that begins anew writes its model over that of another run",
        [Edit("skyrl/train/results.py", "if keep_earlier:", "if False:")],
        [LEFT + "test_a_run_that_begins_anew_keeps_the_model_of_the_one_before"],
    ),
    Defect(
        "USE.2",
        "a run that a signal ended leaves a model as if it had finished",
        [Edit("skyrl/train/run_loop.py", "(is_last and self._interruption.signal is None)", "run.global_step > 0")],
        ["tests/train/test_run_loop.py::test_a_run_that_a_signal_ends_leaves_no_model"],
    ),
    Defect(
        "USE.3",
        "an adapter is left where the merged model was asked for",
        [Edit("skyrl/train/results.py", "rank > 0 and not is_merged", "rank > 0")],
        [LEFT + "test_an_adapter_is_merged_on_request"],
    ),
    Defect(
        "USE.4",
        "an export of RL has the base model's configuration where the run had another",
        [Edit("skyrl/train/runs/export.py", "if of_rl and (overrides :=", "if not of_rl and (overrides :=")],
        ["tests/train/test_export_command.py::test_a_checkpoint_of_rl_is_exported_with_its_overrides"],
    ),
    Defect(
        "SFT.9",
        "arguments of calls that are JSON text stay text",
        [Edit(DATA + "chats.py", "        arguments = parsed(arguments, place)\n", "        pass\n")],
        [
            CHATS + "test_forms_of_an_answer_are_trained_on_as_what_they_mean",
            CHATS + "test_arguments_are_trained_on_as_an_object",
        ],
    ),
    Defect(
        "SFT.10",
        "nulls that Arrow added are trained on",
        [Edit(DATA + "chats.py", "padded = isinstance(value, Struct)", "padded = False")],
        [FILES + "test_every_file_is_trained_on_as_its_rows_are"],
    ),
    Defect(
        "SFT.11",
        "nulls of a row are taken for Arrow's",
        [Edit(DATA + "chats.py", "padded = isinstance(value, Struct)", "padded = True")],
        [FILES + "test_nulls_of_a_row_stay_where_the_file_tells_them_from_arrows"],
    ),
    Defect(
        "SFT.12",
        "reasoning that the template leaves out is lost without a word",
        [Edit(DATA + "template_form.py", "return MARKER in text and", "return")],
        [CHATS + "test_reasoning_that_the_template_does_not_render_is_refused"],
    ),
    Defect(
        "SFT.13",
        "a misspelt role is trained on",
        [Edit(DATA + "chats.py", "if role not in ROLES:", "if not isinstance(role, str):")],
        [CHATS + "test_what_is_wrong_with_a_message_is_told_with_file_row_and_column"],
    ),
    Defect(
        "SFT.14",
        "only the first row of an environment is checked",
        [
            Edit(
                "skyrl/train/rl/environment_check.py",
                "(prompt.env_class, _kind(prompt.extras, DEPTH))",
                "prompt.env_class",
            )
        ],
        ["tests/train/test_environment_check.py::test_a_row_in_the_middle_that_lacks_a_column_is_named"],
    ),
    Defect(
        "SFT.15",
        "a message of weight 0 is trained on",
        [
            Edit(
                SFT + "conversations.py",
                'for number in said if messages[number].get("weight", 1)]',
                "for number in said]",
            )
        ],
        [MASKS + "test_a_message_of_weight_0_is_not_trained_on"],
    ),
    Defect(
        "late-data-check",
        "changed data are refused only after the model was loaded",
        [Edit("skyrl/train/sft/trainer.py", "        order.check_same(found.state)\n", "        pass\n")],
        [
            "tests/train/test_train_commands.py::test_other_data_in_the_folder_of_a_run_are_refused_before_weights_are_read"
        ],
    ),
    Defect(
        "second-hash",
        "the data of a resumed run are hashed for the check and for the trainer",
        [Edit("skyrl/train/sft/trainer.py", "self._data = order or DataOrder", "self._data = DataOrder")],
        ["tests/train/test_train_commands.py::test_the_data_of_a_run_that_is_resumed_are_hashed_once"],
    ),
    Defect(
        "no-other-names",
        "names of other trainers lead to no field",
        [
            Edit(
                "skyrl/config/machinery/base.py",
                "    meant = field_meant(where, field_paths(whole))\n    alike",
                "    meant = None\n    alike",
            )
        ],
        ["tests/train/test_other_names.py::test_a_name_of_trl_leads_to_the_field_that_the_page_pairs_it_with"],
    ),
    Defect(
        "other-names-end",
        "only the last part of another trainer's path is looked up",
        [
            Edit(
                "skyrl/config/machinery/other_names.py",
                "for start in range(len(parts)):",
                "for start in [len(parts) - 1]:",
            )
        ],
        ["tests/train/test_other_names.py::test_a_path_of_verl_leads_to_the_field_that_the_page_pairs_it_with"],
    ),
    Defect(
        "T16",
        "the token that begins a sequence is added to a text that has it",
        [
            Edit(
                SFT + "conversations.py",
                "return token_ids if token_ids[: len(self._first)] == self._first else [",
                "return [",
            )
        ],
        [ENCODINGS + "test_special_tokens_that_a_tokenizer_adds_on_both_sides_are_there_once"],
    ),
    Defect(
        "T17",
        "a completion of text is encoded apart from its prompt",
        [
            Edit(
                SFT + "conversations.py",
                "self._begun(prompt + completion)",
                "self._begun(prompt) + self._encode(completion)",
            )
        ],
        [ENCODINGS + "test_the_first_space_of_a_completion_is_there_once"],
    ),
    Defect(
        "T19",
        "a prompt that shares a token with its answer is refused",
        [
            Edit(
                SFT + "conversations.py",
                "if agree == len(before) or text.startswith(shorter):",
                "if agree == len(before):",
            )
        ],
        [MASKS + "test_a_message_whose_first_letters_share_a_token_with_the_prompt_is_trained_on_with_that_token"],
    ),
]
