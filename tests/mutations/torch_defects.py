"""Defects of the torch backend, as in `defects.py`: what ranks share, what tenants share, and what is noticed."""

from defects import Defect, Edit

TORCH = "skyrl/backends/torch/"
SHARDED = "tests/backends/test_torch_sharded.py::"
WORKER = "tests/backends/test_torch_worker.py::"
SAMPLING = "tests/backends/test_torch_sampling.py::"
COLLECTIVES = "tests/backends/test_torch_collectives.py::test_ranks_do_the_same_collectives_in_any_plan[two-40]"
NAMES = "tests/backends/test_skyrl_train_names.py::"
MEMORY = "tests/backends/test_torch_memory.py::"
MOVED = "tests/backends/test_moved_models.py::"
PROMPTS = "tests/backends/test_torch_prompts.py::"
FAULTS = "tests/backends/test_torch_faults.py::"
RANK_SAMPLERS = "tests/backends/test_torch_rank_samplers.py::"
WRITTEN = "tests/backends/test_torch_written_parts.py::"
OFFLOAD = "tests/backends/test_torch_offload.py::"
AGREEMENT = "tests/backends/test_torch_agreement.py::"

TORCH_DEFECTS = [
    Defect(
        "T1",
        "an idle rank adds the gradients of another's micro-batch",
        [Edit(TORCH + "training/passes.py", "        if not idle:\n", "        if True:\n")],
        [SHARDED + "test_models_learn_as_on_one_worker[fsdp-whole]"],
    ),
    Defect(
        "T2",
        "every rank keeps the first rank's share of moments",
        [
            Edit(
                TORCH + "workers/shares.py",
                "part = flat[self._rank * share : (self._rank + 1) * share]",
                "part = flat[:share]",
            )
        ],
        [SHARDED + "test_models_learn_as_on_one_worker[fsdp-adapter]"],
    ),
    Defect(
        "T3",
        "packed sequences see each other",
        [
            Edit(
                TORCH + "base_model/varlen.py",
                "zip(*(x.split([*lengths], 2) for x in",
                "zip(*(x.split([sum(lengths)], 2) for x in",
            )
        ],
        [WORKER + "test_models_of_other_attention_are_trained_one_sequence_at_a_time_and_not_sampled"],
    ),
    Defect(
        "T4",
        "each rank clips by the norm of its own part",
        [
            Edit(
                TORCH + "workers/worker.py",
                "norm = float((self.model.base.total(squares) + ",
                "norm = float((squares + ",
            )
        ],
        [SHARDED + "test_models_learn_as_on_one_worker[fsdp-whole]"],
    ),
    Defect(
        "T5",
        "several adapters are sampled without their scaling",
        [Edit(TORCH + "base_model/lora.py", "scaling if finite else", "1.0 if finite else")],
        [SAMPLING + "test_rows_of_several_adapters_and_the_base_model_are_sampled_as_alone"],
    ),
    Defect(
        "T6",
        "one of two tied weights is filled",
        [
            Edit(
                TORCH + "base_model/loading.py",
                "for owner, name in self._owners[id(parameter)]:",
                "for owner, name in self._owners[id(parameter)][:1]:",
            )
        ],
        ["tests/backends/test_torch_loading.py::test_tied_weights_are_filled_as_one"],
    ),
    Defect(
        "T7",
        "passes with other collectives meet in one dispatch",
        [
            Edit(
                TORCH + "workers/rendezvous.py",
                "    return TILE, sums is not None, sums is not None and inner",
                "    return (TILE,)",
            )
        ],
        [COLLECTIVES],
    ),
    Defect(
        "T8",
        "all layers begin with the same numbers",
        [Edit(TORCH + "base_model/lora.py", "zlib.crc32(path.encode()), layer]", "zlib.crc32(path.encode()), 0]")],
        [SAMPLING + "test_the_same_seeds_train_the_same_model_on_torch_and_on_jax"],
    ),
    Defect(
        "T9",
        "a worker that hangs while a snapshot is written is waited for for ever",
        [
            Edit(
                TORCH + "workers/group.py",
                "while not wait([outcome], limit_s).done:",
                "while not wait([outcome]).done:",
            )
        ],
        [FAULTS + "test_a_rank_that_dies_or_stops_is_noticed[snapshot-SIGSTOP]"],
    ),
    Defect(
        "T10",
        "a rank that failed between collectives lets the others wait",
        [
            Edit(
                TORCH + "workers/worker.py",
                "if rendezvous is not None and not isinstance(error, RequestError):",
                "if False:",
            )
        ],
        [FAULTS + "test_an_exception_on_one_rank_loses_the_group_that_meets_in_collectives[forward]"],
    ),
    Defect(
        "N1",
        "what is not persisted stays in memory without limit",
        [
            Edit(
                "skyrl/backends/skyrl_train_backend.py",
                "while self._versions.excess_bytes > 0 and",
                "while False and",
            )
        ],
        [NAMES + "test_the_oldest_of_what_is_in_memory_alone_goes_when_there_are_too_many"],
    ),
    Defect(
        "N2",
        "the whole loss counts as the policy's term",
        [Edit(TORCH + "training/passes.py", 'PG_LOSS: terms["policy"]', "PG_LOSS: sum(terms.values())")],
        [NAMES + "test_terms_of_an_objective_are_those_of_its_formula"],
    ),
    Defect(
        "T31",
        "weights are read of a model that no adapter can be on",
        [Edit(TORCH + "base_model/loading.py", "    _check_linear(model, folder)\n", "")],
        [
            "tests/backends/test_torch_loading.py::"
            "test_a_model_without_linear_maps_is_refused_by_name_before_weights_are_read[False-load]"
        ],
    ),
    Defect(
        "T32",
        "an adapter that is not finite is computed with in the rows of others",
        [
            Edit(
                TORCH + "base_model/lora.py",
                "finite = all(bool(x.isfinite().all()) for x in tensors.values())",
                "finite = True",
            )
        ],
        [
            "tests/backends/test_nan_neighbours.py::"
            "test_samples_and_prompt_scores_are_the_same_in_a_context_of_any_length[torch-400]"
        ],
    ),
    Defect(
        "T33",
        "ranks add up gradients of an adapter after each micro-batch",
        [
            Edit(
                TORCH + "workers/worker.py",
                "                view += gradients[name]\n",
                "                dist.all_reduce(gradients[name])\n                view += gradients[name]\n",
            )
        ],
        [
            "tests/backends/test_torch_collectives.py::"
            "test_gradients_of_adapters_are_added_up_once_for_all_passes_of_a_step[replicas-all]"
        ],
    ),
    Defect(
        "T34",
        "sequences that see each other are packed, where a model has attention of its own",
        [
            Edit(
                TORCH + "base_model/model_check.py", "own_attention=True, packs=False", "own_attention=True, packs=True"
            ),
            Edit(TORCH + "base_model/model.py", "abilities.packs and not check.keeps_apart()", "False"),
        ],
        [WORKER + "test_losses_and_gradients_of_packed_sequences_are_those_of_peft[gpt_oss]"],
    ),
    Defect(
        "T35",
        "adapters are on matrices that the layers of Mamba read by themselves",
        [
            Edit(
                TORCH + "base_model/lora.py",
                'isinstance(module, nn.Linear) and name.rpartition(".")[2] not in uncalled and',
                "isinstance(module, nn.Linear) and",
            )
        ],
        ["tests/backends/test_torch_unsampled.py::test_peft_computes_what_the_trained_adapter_does[mamba]"],
    ),
    Defect(
        "T36",
        "the API accepts samples of a model that is trained only",
        [Edit("skyrl/tinker/operations/sampling.py", "    service.info.check_samples()\n", "")],
        [
            "tests/tinker/test_api_sampling.py::"
            "test_a_backend_that_only_trains_refuses_samples_in_a_line_that_names_the_model"
        ],
    ),
    Defect(
        "T37",
        "a model is sampled without the state that it keeps beside keys and values",
        [
            Edit(
                TORCH + "base_model/model_check.py",
                "            return abilities._replace(packs=False, samples=False)\n",
                "            return abilities._replace(packs=False)\n",
            ),
            Edit(TORCH + "base_model/model.py", "abilities.samples and check.samples()", "abilities.samples"),
        ],
        ["tests/backends/test_torch_unsampled.py::test_samples_are_refused_with_the_models_name[falcon_h1]"],
    ),
    Defect(
        "T38",
        "packed sequences of a sliding window see one token too many in the kernel of a GPU",
        [Edit(TORCH + "base_model/varlen.py", "else window - 1, 0)", "else window, 0)")],
        ["tests/backends/test_torch_varlen.py::test_the_kernel_is_asked_for_what_each_sequence_alone_is[7]"],
    ),
    Defect(
        "M1",
        "a model that moves to JAX has its first moment in the place of the second",
        [
            Edit(
                "skyrl/backends/jax/models/checkpoint_format.py",
                'state.second_moment = self._tree(stored, "second_moment")',
                'state.second_moment = self._tree(stored, "first_moment")',
            )
        ],
        [MOVED + "test_the_next_step_after_a_move_is_the_one_without_it[untied-torch-jax-critic]"],
    ),
    Defect(
        "M2",
        "matrices of a model trained as a whole are moved as they are stored on JAX",
        [
            Edit(
                "skyrl/backends/jax/models/tensor_names.py",
                "return np.swapaxes(tensor, -1, -2) if turned else tensor",
                "return tensor.reshape(tensor.shape[::-1]) if turned else tensor",
            )
        ],
        [MOVED + "test_the_next_step_after_a_move_is_the_one_without_it[untied-torch-jax-whole]"],
    ),
    Defect(
        "M3",
        "a model that moves to torch counts its steps from 0",
        [Edit(TORCH + "models/checkpoints.py", "            stored.step,\n", "            0,\n")],
        [MOVED + "test_the_next_step_after_a_move_is_the_one_without_it[untied-jax-torch-critic]"],
    ),
    Defect(
        "M4",
        "checkpoints of JAX from before there was one layout are not read",
        [
            Edit(
                "skyrl/backends/jax/models/tensor_names.py",
                'return any("/" in name for name in tensors)',
                "return False",
            )
        ],
        [MOVED + "test_checkpoints_of_format_1_stay_readable[untied-jax-adapter-stacked]"],
    ),
    Defect(
        "T18",
        "a burst's rows do not see the tokens of its earlier steps",
        [
            Edit(
                TORCH + "base_model/attention.py",
                "            held[self._rows, :, self.positions[:, 0]] = new\n",
                "            held[self._rows, :, self.positions[:, 0]] = 0\n",
            )
        ],
        [SAMPLING + "test_greedy_tokens_and_all_scores_are_those_of_transformers"],
    ),
    Defect(
        "M5",
        "workers share the base weights although each has room for a copy",
        [Edit(TORCH + "base_model/memory.py", "        if not fits and sizes.has_layers:\n", "        if True:\n")],
        [MEMORY + "test_weights_are_replicated_where_they_fit_and_shared_where_not[80-1]"],
    ),
    Defect(
        "M6",
        "layers that are gathered are not planned for",
        [Edit(TORCH + "base_model/memory.py", "GATHERED_AT_ONCE * max(layers)", "0")],
        [MEMORY + "test_a_share_of_the_weights_is_planned_with_what_is_gathered[8]"],
    ),
    Defect(
        "M7",
        "a model that does not fit is loaded all the same",
        [Edit("skyrl/backends/common/memory_plan.py", "if self.left >= self.model:", "if True:")],
        [MEMORY + "test_an_explicit_share_that_does_not_fit_is_refused"],
    ),
    Defect(
        "M8",
        "a whole file is in the host's memory while a tensor is read",
        [
            Edit(
                TORCH + "base_model/loading.py",
                "        values = file.get_tensor(stored)\n",
                "        values = {each: file.get_tensor(each).clone() for each in file.keys()}[stored]\n",
            )
        ],
        ["tests/backends/test_torch_loading.py::test_a_load_takes_the_memory_of_the_model_and_of_one_tensor[bfloat16]"],
    ),
    Defect(
        "M9",
        "a decode call has no room of its own",
        [
            Edit(
                TORCH + "base_model/memory.py",
                "        return held + held // self._count + self._logits\n",
                "        return self._logits // 2\n",
            )
        ],
        [MEMORY + "test_other_phases_take_no_more_than_what_was_planned"],
    ),
    Defect(
        "M10",
        "gradients of packed sequences are not tried",
        [
            Edit(TORCH + "base_model/model.py", "abilities.packs and not check.keeps_apart()", "False"),
        ],
        [
            "tests/backends/test_torch_loading.py::"
            "test_a_model_whose_gradients_mix_where_sequences_are_packed_is_computed_one_by_one"
        ],
    ),
    Defect(
        "M11",
        "prompts that are read together see each other",
        [
            Edit(
                TORCH + "base_model/attention.py",
                "        if isinstance(self.view, Paged):\n            return _paged(",
                "        if not isinstance(self.view, Paged):\n"
                "            return _packed(call, query, key, value, Packed([query.shape[2]]), sliding_window), None\n"
                "        if isinstance(self.view, Paged):\n            return _paged(",
            )
        ],
        [PROMPTS + "test_prompts_of_one_version_are_read_together_and_sampled_as_alone"],
    ),
    Defect(
        "M12",
        "a burst leaves what it generated out of the pages",
        [
            Edit(
                TORCH + "base_model/attention.py",
                "        if not self._later:\n            return\n        positions",
                "        return\n        positions",
            )
        ],
        [SAMPLING + "test_greedy_tokens_and_all_scores_are_those_of_transformers[llama]"],
    ),
    Defect(
        "M13",
        "prompts fail for another that is read in the same call",
        [
            Edit(
                "skyrl/backends/common/sampling/prefill.py",
                "            failed |= _read_pieces(runner, version, [prompt])\n",
                "            failed[prompt] = error\n",
            )
        ],
        [PROMPTS + "test_a_prompt_that_cannot_be_read_fails_alone"],
    ),
    Defect(
        "M14",
        "ranks begin a command of which one of them cannot do its part",
        [Edit(TORCH + "workers/agreement.py", "        if any(unable):\n", "        if False:\n")],
        [AGREEMENT + "test_a_rank_that_cannot_do_its_part_keeps_its_reason_and_the_others_do_not_begin"],
    ),
    Defect(
        "M15",
        "micro-batches fail with another of their dispatch that a rank refuses",
        [Edit(TORCH + "workers/group.py", "            if not waiting:\n", "            if True:\n")],
        [AGREEMENT + "test_in_a_thousand_random_plans_ranks_begin_as_much_and_only_bad_tiles_fail"],
    ),
    Defect(
        "M16",
        "FSDP adds up gradients in the type that the model computes in",
        [
            Edit(
                TORCH + "base_model/base_weights.py",
                "            parameter.requires_grad_(True)\n        try:",
                "            parameter.requires_grad_(False)\n        try:",
            )
        ],
        ["tests/backends/test_torch_reduction.py::test_gradients_are_added_up_in_float32[float32 parts]"],
    ),
    Defect(
        "M17",
        "parts of ranks are joined in another order",
        [
            Edit(
                "skyrl/backends/common/models/training_files.py",
                "for file in sorted(name for name in files if PART.fullmatch(name)):",
                "for file in sorted((name for name in files if PART.fullmatch(name)), reverse=True):",
            )
        ],
        [WRITTEN + "test_each_rank_writes_its_parts_and_one_process_reads_the_whole[2]"],
    ),
    Defect(
        "M18",
        "a rank's file is missing in the manifest",
        [
            Edit(
                "skyrl/utils/files/atomic_folders.py",
                "    entries = dict(written or {})\n",
                "    entries = dict(list((written or {}).items())[1:])\n",
            )
        ],
        [WRITTEN + "test_each_rank_writes_its_parts_and_one_process_reads_the_whole[2]"],
    ),
    Defect(
        "M19",
        "one worker samples everything that begins alike",
        [
            Edit(
                "skyrl/backends/common/sampling/rank_samplers.py",
                "self._load[known] < self._load[least] + max(1, request.num_samples)",
                "True",
            )
        ],
        [RANK_SAMPLERS + "test_requests_that_begin_alike_are_shared_out_and_cancelled_ones_make_room"],
    ),
    Defect(
        "M20",
        "a worker that hangs is not noticed while another answers",
        [
            Edit(
                TORCH + "workers/group.py",
                "heard = min(self._heard.get(each, since) for each in ranks)",
                "heard = max(self._heard.values(), default=since)",
            )
        ],
        [RANK_SAMPLERS + "test_answers_of_one_rank_do_not_extend_the_deadline_of_another"],
    ),
    Defect(
        "M21",
        "the critic's workers are on the policy's GPUs",
        [
            Edit(
                "skyrl/config/torch_options.py",
                "sum(trainer.gpus(name) for name in before)",
                "0",
            )
        ],
        ["tests/train/test_models_apart.py::test_each_has_as_many_workers_as_its_gpus_after_those_before_it"],
    ),
    Defect(
        "M22",
        "a model comes back as zeros",
        [Edit(TORCH + "workers/buffers.py", "host.copy_(values)", "host.zero_()")],
        [OFFLOAD + "test_a_model_that_leaves_the_device_learns_and_is_saved_bit_for_bit[one-adapter]"],
    ),
    Defect(
        "M23",
        "what is in host memory is on the device as well",
        [Edit(TORCH + "workers/buffers.py", "            del self._made[handle], values\n", "")],
        [OFFLOAD + "test_what_leaves_the_device_is_freed_there"],
    ),
    Defect(
        "M24",
        "versions that are sampled come back to a device that engines use",
        [Edit(TORCH + "workers/worker.py", "self._buffers.lent(version[1])", "self._buffers[version[1]]")],
        [OFFLOAD + "test_samples_and_checkpoints_bring_nothing_back[adapter]"],
    ),
    Defect(
        "M25",
        "engines that leave no room for the base weights are started all the same",
        [Edit(TORCH + "base_model/memory.py", "    plan.check_shared()\n", "")],
        [MEMORY + "test_engines_that_leave_no_room_for_what_stays_are_refused"],
    ),
]
