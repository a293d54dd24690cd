"""Defects that break a promise of the project, as small edits of our source, each with a test that must fail.

To add one, write the shortest edit that reintroduces the defect, and name the cheapest test that detects it. Keep a few
for each promise and package: every edit has to match the source.
"""

from typing import NamedTuple


class Defect(NamedTuple):
    """Replace `old`, which occurs once in `file`, by `new`: `test` must fail."""

    name: str
    effect: str
    test: str
    file: str
    old: str
    new: str


DEFECTS = [
    # Numbers equal those of independent references.
    Defect(
        "loss-mean",
        "gradients are divided by the number of sequences of a request",
        "tests/backends/test_jax_backend.py::test_a_batch_in_one_request_equals_the_same_batch_in_several",
        "skyrl/backends/common/models/operations.py",
        "                self.add_gradients(state, gradients)\n",
        "                divided = __import__('jax').tree.map(lambda x: x / len(operation.data), gradients)\n"
        "                self.add_gradients(state, divided)\n",
    ),
    Defect(
        "bfloat16-sums",
        "gradient sums are kept in bfloat16",
        "tests/backends/test_jax_backend.py::test_a_batch_in_one_request_equals_the_same_batch_in_several",
        "skyrl/backends/jax/training/programs.py",
        "lambda a, b: jax.tree.map(jnp.add, a, b)",
        'lambda a, b: jax.tree.map(lambda x, y: (x + y).astype("bfloat16").astype(x.dtype), a, b)',
    ),
    Defect(
        "bfloat16-normaliser",
        "the log-sum-exp is computed in bfloat16",
        "tests/tx/models/test_qwen3.py::"
        "test_log_probabilities_over_150_thousand_tokens_are_accurate_over_a_bfloat16_base",
        "skyrl/tx/layers/logprobs.py",
        "        normaliser = jax.nn.logsumexp(logits, axis=-1, keepdims=True)\n",
        "        normaliser = jax.nn.logsumexp(logits.astype(jnp.bfloat16), axis=-1, keepdims=True)\n"
        "        normaliser = normaliser.astype(jnp.float32)\n",
    ),
    Defect(
        "initial-fan-in",
        "the fan-in of the initial LoRA matrix A counts all stacked layers",
        "tests/tx/test_lora.py::test_initial_a_has_the_spread_of_pefts_in_every_layer",
        "skyrl/tx/lora.py",
        "        bound = np.float32(1 / np.sqrt(target.in_features))\n",
        "        bound = np.float32(1 / np.sqrt(target.in_features * len(target.stack.layers or [0])))\n",
    ),
    Defect(
        "packed-attention",
        "sequences packed into one tile attend to each other",
        "tests/conformance/test_gradients.py::test_the_gradient_of_a_loss[jax-untied-cross_entropy-attn]",
        "skyrl/tx/layers/packed_attention.py",
        "    return (causal & (own[:, :, None] == segments[:, None, :keys]))[:, None, None]\n",
        "    return (causal & (own[:, :, None] >= -1))[:, None, None]\n",
    ),
    Defect(
        "splash-segments",
        "on a TPU, sequences packed into one tile attend to each other",
        "tests/tx/layers/test_splash_attention.py::test_results_and_gradients_are_those_of_float64[packed-mixed]",
        "skyrl/tx/layers/splash_attention.py",
        "segment_ids=SegmentIds(own, own)",
        "segment_ids=SegmentIds(own * 0, own * 0)",
    ),
    Defect(
        "rounded-attention",
        "training rounds attention weights to bfloat16 and decoding does not, so fresh ratios are not 1",
        "tests/tx/layers/test_attention_bfloat16.py::test_attention_over_bfloat16_is_that_of_float64_rounded_once",
        "skyrl/tx/layers/packed_attention.py",
        "            weights,  # not rounded",
        "            weights.astype(value.dtype).astype(jnp.float32),  # not rounded",
    ),
    Defect(
        "llama3-rotations",
        "frequencies of Llama 3.1 are not scaled",
        "tests/backends/test_families.py::test_logits_equal_those_of_transformers[20000-False-LlamaForCausalLM]",
        "skyrl/tx/design/rotations.py",
        '    "llama3": _llama3,\n',
        '    "llama3": _default,\n',
    ),
    Defect(
        "peft-names",
        "adapters on shared experts and dense layers are not named, so PEFT ignores them",
        "tests/backends/test_families.py::test_our_adapter_in_peft_gives_the_same_logits[DeepseekV3ForCausalLM]",
        "skyrl/tx/io/peft.py",
        "lora_config, modules, parameters)",
        "lora_config, modules)",
    ),
    Defect(
        "jax-merge",
        "a merged export of the JAX backend omits the scaling",
        "tests/train/test_export_command.py::test_a_merged_export_is_base_and_adapter_to_transformers[jax]",
        "skyrl/tx/io/export.py",
        "        product *= np.float32(scaling)\n",
        "",
    ),
    Defect(
        "torch-merge",
        "a merged export of the torch backend omits the scaling",
        "tests/train/test_export_command.py::test_a_merged_export_is_base_and_adapter_to_transformers[torch]",
        "skyrl/backends/torch/workers/model_files.py",
        "np.float32(self._kind.lora_config.scaling) * (a @ b).T",
        "(a @ b).T",
    ),
    Defect(
        "torch-read-rows",
        "each worker reads the rows of the first one",
        "tests/backends/test_torch_written_parts.py::test_a_checkpoint_is_read_by_the_ranks[shared]",
        "skyrl/backends/torch/workers/shares.py",
        "bounds = place * rows, (place + 1) * rows",
        "bounds = 0, rows",
    ),
    Defect(
        "torch-scaling",
        "the torch backend trains adapters without their scaling",
        "tests/conformance/test_gradients.py::test_the_gradient_of_a_loss[torch-untied-cross_entropy-attn]",
        "skyrl/backends/torch/base_model/lora.py",
        "inner, b, alpha=self._scaling)",
        "inner, b, alpha=1.0)",
    ),
    Defect(
        "torch-expert-tenants",
        "a token of one tenant is multiplied with the adapters that all tenants have on its expert",
        "tests/backends/test_torch_expert_adapters.py::"
        "test_samples_have_the_log_probabilities_of_merged_weights[qwen3_moe]",
        "skyrl/backends/torch/base_model/lora.py",
        "mask[routing.tokens * len(mask) // routing.count]",
        "mask[0]",
    ),
    Defect(
        "weight-decay",
        "weight decay is independent of the learning rate",
        "tests/conformance/test_optimizer_steps.py::test_three_steps_are_those_of_torch[torch-untied-betas]",
        "skyrl/backends/common/adamw.py",
        "1.0 - params.learning_rate * params.weight_decay",
        "1.0 - params.weight_decay",
    ),
    Defect(
        "tied-weights",
        "only one of two tied weights is loaded",
        "tests/backends/test_torch_loading.py::test_tied_weights_are_filled_as_one",
        "skyrl/backends/torch/base_model/loading.py",
        "for owner, name in self._owners[id(parameter)]:",
        "for owner, name in self._owners[id(parameter)][:1]:",
    ),
    Defect(
        "burst-attention",
        "decode steps of a burst do not attend to tokens of earlier steps",
        "tests/backends/test_torch_sampling.py::test_greedy_tokens_and_all_scores_are_those_of_transformers",
        "skyrl/backends/torch/base_model/attention.py",
        "self._cells[heads], new.reshape(-1, width))",
        "self._cells[heads], 0 * new.reshape(-1, width))",
    ),
    Defect(
        "min-p",
        "min_p is compared with the probability of a token, not with its ratio to the likeliest token",
        "tests/tx/test_sampling.py::test_min_p_keeps_the_tokens_that_transformers_keeps[0.02]",
        "skyrl/tx/sampling.py",
        "jnp.exp(tempered) >= min_p[:, None]",
        "jax.nn.softmax(tempered) >= min_p[:, None]",
    ),
    Defect(
        "shared-page",
        "a sample starts with an empty page if its prompt ends within a page",
        "tests/backends/test_family_sampling.py::"
        "test_forks_of_a_prompt_and_its_return_after_eviction_have_the_log_probabilities_of_training[LlamaForCausalLM]",
        "skyrl/backends/common/sampling/sampler.py",
        "self._runner.copy_pages(copies)",
        "self._runner.copy_pages([])",
    ),
    Defect(
        "kl-gradient",
        "the KL term has no gradient",
        "tests/algorithms/test_objective.py::test_kl_and_entropy_terms_change_the_gradient[use_kl_loss]",
        "skyrl/algorithms/objective.py",
        "self.kl_estimator(x.logprobs,",
        "self.kl_estimator(stop_gradient(x.logprobs),",
    ),
    Defect(
        "kl-reduction",
        "the KL term is not reduced as the policy loss is",
        "tests/algorithms/test_objective.py::test_the_objective_is_the_reduction_of_policy_plus_kl_minus_entropy",
        "skyrl/algorithms/objective.py",
        "self.kl_coef * x.weights *",
        "self.kl_coef *",
    ),
    Defect(
        "k3-clamp",
        "the k3 estimate and its gradient are clamped at large divergences",
        "tests/algorithms/test_kl.py::test_k3_keeps_its_gradient_where_the_divergence_is_large",
        "skyrl/algorithms/kl.py",
        "    return xp.expm1(inside) + math.exp(MAX_LOG_RATIO) * beyond - difference\n",
        "    return xp.clip(xp.expm1(inside) + math.exp(MAX_LOG_RATIO) * beyond - difference, -10.0, 10.0)\n",
    ),
    Defect(
        "padded-mean",
        "the mean of advantages includes padding",
        "tests/algorithms/test_advantages.py::test_whitening_ignores_padding_in_the_mean_as_well_as_in_the_variance",
        "skyrl/algorithms/arrays.py",
        "xp.sum(select(mask, values)) / xp.maximum(total, xp.ones_like(total))",
        "xp.mean(values)",
    ),
    Defect(
        "uncut-mask",
        "the mask is not truncated with the tokens",
        "tests/train/sft/test_sft_rows.py::test_truncation_cuts_tokens_and_mask_at_the_same_place",
        "skyrl/train/sft/examples.py",
        "mask[: self.max_length], truncated",
        "mask, truncated",
    ),
    Defect(
        "shifted-mask",
        "the mask of a token is applied to the token after it",
        "tests/train/sft/test_sft_batches.py::test_each_token_predicts_the_next_one",
        "skyrl/train/sft/batches.py",
        "example.mask[1:].astype",
        "example.mask[:-1].astype",
    ),
    Defect(
        "appended-eos",
        "an appended end-of-sequence token is trained on, as if sampled with probability 1",
        "tests/train/rollouts/test_rollout_tokens.py::test_an_appended_end_of_sequence_token_is_not_trained_on",
        "skyrl/train/rollouts/rows.py",
        "    if rows:\n        _append(rows[-1], Segment(closing))\n",
        "    if rows:\n        _append(rows[-1], Segment(closing, True, [0.0] * len(closing), 0))\n",
    ),
    Defect(
        "late-length-check",
        "the length of an input is checked one turn late",
        "tests/train/rollouts/test_rollout_episode.py::"
        "test_an_input_that_is_too_long_is_never_sampled_from_and_one_that_just_fits_is[steps]",
        "skyrl/train/rollouts/episode.py",
        "if len(prompt_ids) > limit:",
        "if len(self.turns[-1].prompt_ids if self.turns else prompt_ids) > limit:",
    ),
    Defect(
        "stale-samples",
        "samples that exceed max_staleness are trained on",
        "tests/train/test_rl_sources.py::test_who_drops_trains_on_nothing_older_than_allowed_and_says_what_is_left_out",
        "skyrl/train/rl/rollout_source.py",
        'if self._policy == "drop":\n            self._drop_stale()',
        "if False:\n            pass",
    ),
    # Tenants are isolated.
    Defect(
        "shared-decay",
        "weight decay of one tenant shrinks the weights of all",
        "tests/conformance/test_training.py::test_a_step_of_one_model_leaves_every_bit_of_another[jax]",
        "skyrl/backends/jax/backend.py",
        "            state.step += 1\n",
        "            state.step += 1\n"
        "            decay = 1 - params.learning_rate * params.weight_decay\n"
        "            for other in map(self._models.peek, self._models):\n"
        "                if other is not state:\n"
        "                    decayed = jax.tree.map(lambda leaf: leaf * decay, other.adapter.weights)\n"
        "                    other.adapter = other.adapter._replace(weights=decayed)\n",
    ),
    Defect(
        "swapped-gradients",
        "models in one call get the gradients of each other",
        "tests/backends/test_jax_tenants.py::test_a_stack_of_models_gives_each_what_it_gets_alone",
        "skyrl/backends/jax/training/microbatches.py",
        "zip(jax.device_get(outputs), gradients[: len(some)], strict=False)",
        "zip(jax.device_get(outputs), gradients[: len(some)][::-1], strict=False)",
    ),
    Defect(
        "shared-prefixes",
        "a tenant's prompt is answered from the cache of another tenant",
        "tests/backends/test_sampler_batching.py::test_nothing_is_shared_between_tenants_or_versions",
        "skyrl/backends/common/sampling/sampler.py",
        "        return job.request.tenant, self._versions",
        "        return 0, self._versions",
    ),
    Defect(
        "shared-salt",
        "tenants share cached prefixes on engines",
        "tests/backends/engines/test_sync_check.py::test_requests_of_two_tenants_share_no_salt",
        "skyrl/backends/engines/requests.py",
        "salt=blake2b(request.tenant.encode(), digest_size=16).hexdigest(),",
        'salt="all",',
    ),
    Defect(
        "nan-neighbour",
        "rows of an adapter that is not finite reach other rows of a decode call",
        "tests/conformance/test_isolation.py::"
        "test_a_version_is_sampled_and_scored_beside_one_of_nan_as_alone[torch-untied-17]",
        "skyrl/backends/torch/base_model/lora.py",
        "finite = all(bool(x.isfinite().all()) for x in tensors.values())",
        "finite = True",
    ),
    Defect(
        "stored-key",
        "a key in a request to load weights is stored",
        "tests/tinker/test_doors.py::test_no_secret_is_anywhere_but_where_it_was_put",
        "skyrl/tinker/requests/training.py",
        'if operation.name != "load_weights":',
        "if operation:",
    ),
    Defect(
        "writable-mounts",
        "code in the sandbox may write to files of the trainer",
        "tests/utils/test_sandbox_escapes.py::"
        "test_full_holds_only_mounts_that_are_read_only_or_its_own_memory_or_harmless_devices",
        "skyrl/utils/sandbox/namespaces.py",
        "_MS_RDONLY | _MS_NOSUID | _MS_NODEV",
        "_MS_NOSUID | _MS_NODEV",
    ),
    # Published versions are frozen.
    Defect(
        "alias-version",
        "a published version is an alias of the weights in training",
        "tests/backends/test_jax_backend.py::test_a_version_samples_the_same_after_more_training_and_unloading",
        "skyrl/backends/jax/backend.py",
        "            state.step += 1\n",
        "            state.step += 1\n"
        "            for version in list(self._versions._resident):\n"
        "                self._versions.publish(version, state.adapter)\n",
    ),
    Defect(
        "kept-old-version",
        "publishing under an existing name keeps the old weights",
        "tests/conformance/test_versions.py::"
        "test_samples_that_wait_are_drawn_from_the_version_that_they_asked_for[torch-published-again]",
        "skyrl/backends/common/versions.py",
        "            self.drop(version)\n            self._keep(version, adapter)\n",
        "            if version not in self._resident:\n                self._keep(version, adapter)\n",
    ),
    Defect(
        "stale-prefixes",
        "cached keys and values of a version serve the next version with its name",
        "tests/backends/test_sampler_batching.py::test_a_name_that_is_published_again_shares_nothing_with_what_it_was",
        "skyrl/backends/common/sampling/sampler.py",
        "self._versions.content(job.slot), 0 if",
        "job.request.version, 0 if",
    ),
    Defect(
        "wrong-stamp",
        "samples are stamped with the first version, not with the version in their slot",
        "tests/conformance/test_versions.py::"
        "test_samples_are_stamped_with_the_version_and_the_base_that_they_were_drawn_from",
        "skyrl/backends/common/versions.py",
        "return None if slot == BASE_SLOT else self._slots[slot].published",
        "return None if slot == BASE_SLOT else next(iter(self._slots.values())).published",
    ),
    Defect(
        "collected-version",
        "a version is collected while a sample waits for it",
        "tests/tinker/test_surplus.py::test_version_that_a_sample_waits_for_stays",
        "skyrl/tinker/requests/samples.py",
        "return {**self._service.version_use.last(), **pending}",
        "return self._service.version_use.last()",
    ),
    # Options are honoured or refused.
    Defect(
        "any-base-model",
        "a request for another base model is accepted and the served model trained",
        "tests/tinker/test_api_training.py::test_unknown_base_model_fails_and_names_the_served_ones",
        "skyrl/tinker/operations/models.py",
        "    admission.service.check_base_model(request.base_model)\n    config = request.lora_config\n",
        "    config = request.lora_config\n",
    ),
    Defect(
        "unchecked-lengths",
        "targets and inputs of different lengths reach the engine",
        "tests/algorithms/test_checks.py::test_a_bad_pass_is_refused_by_name",
        "skyrl/algorithms/checks/requests.py",
        "    _check_lengths(data, max_context_length)\n",
        "",
    ),
    Defect(
        "ignored-option",
        "a sampling option that the backend does not support is ignored",
        "tests/conformance/test_samples.py::test_a_sampling_option_is_served_or_refused_by_its_name[fake-min_p]",
        "skyrl/backends/executor/sampling_options.py",
        "if name not in facts.sampling_options:",
        "if False:",
    ),
    Defect(
        "ignored-penalty",
        "repetition_penalty of the trainer is ignored",
        "tests/train/test_sampling_options.py::test_penalties_are_those_of_the_configuration",
        "skyrl/train/policies/sampling_options.py",
        "for name in OWN}",
        'for name in OWN - {"repetition_penalty"}}',
    ),
    # Acknowledged requests are durable and take effect once.
    Defect(
        "arrival-order",
        "requests of a model run in order of arrival, so that a step may overtake its pass",
        "tests/tinker/test_scheduler.py::test_a_model_runs_in_seq_id_order_whatever_order_its_requests_arrive_in",
        "skyrl/tinker/engine/scheduler.py",
        "            self._line_up(line, seq_id, operation, now)\n",
        "            self._queue(operation, seq_id)\n",
    ),
    Defect(
        "snapshot-ahead",
        "a snapshot claims a request that it does not contain",
        "tests/tinker/test_engine_recovery.py::"
        "test_a_model_whose_engine_is_lost_again_and_again_ends_as_one_whose_engine_never_was",
        "skyrl/tinker/engine/maintenance.py",
        "        seq_id = self._scheduler.finished(model_id)\n",
        "        seq_id = self._scheduler.finished(model_id)\n"
        "        seq_id = seq_id if seq_id is None else seq_id + 1\n",
    ),
    Defect(
        "snapshot-without-gradients",
        "a snapshot lacks gradients that no optimizer step has used yet",
        "tests/conformance/test_saved_state.py::"
        "test_a_model_revived_from_its_snapshot_elsewhere_goes_on_bit_for_bit[jax-with pending gradients]",
        "skyrl/backends/common/models/store.py",
        "        state = copy.copy(state)\n",
        "        state = copy.copy(state)\n        state.drop_sums()\n",
    ),
    Defect(
        "repeated-commit",
        "jobs whose commit was not confirmed are repeated",
        "tests/tinker/test_db.py::test_a_group_whose_commit_is_not_confirmed_is_not_done_again",
        "skyrl/tinker/database/database.py",
        "error.connection_invalidated or not said_by_database or code",
        "error.connection_invalidated or code",
    ),
    Defect(
        "no-fence",
        "a server writes to its database although another server has taken it over",
        "tests/tinker/test_fence.py::test_a_server_that_another_has_followed_writes_nothing_and_says_so",
        "skyrl/tinker/database/database.py",
        "                self.fence.check(session)\n",
        "",
    ),
    Defect(
        "uncounted-crash",
        "requests that crash all processes at once are retried forever",
        "tests/tinker/test_crash_record.py::"
        "test_a_pass_of_which_the_whole_server_dies_three_times_fails_by_name_and_its_model_goes_on",
        "skyrl/tinker/processes/crash_record.py",
        "        if life > self._lives:\n",
        "        if False:\n",
    ),
    Defect(
        "no-guard",
        "a round of collection removes any amount of data",
        "tests/tinker/test_trash.py::test_a_round_that_would_take_too_much_takes_none_and_says_so_once",
        "skyrl/tinker/checkpoints/guard.py",
        "return self.nameless + self.surplus > max(FEW, SHARE * self.total)",
        "return False",
    ),
    Defect(
        "overwritten-manifest",
        "a manifest in a bucket overwrites that of another process",
        "tests/utils/test_remote_folders.py::test_the_manifest_is_sent_last_and_only_if_there_is_none",
        "skyrl/utils/files/remote_folders.py",
        '"create" if older is None else older.only_this',
        '"overwrite"',
    ),
    Defect(
        "early-marker",
        "a checkpoint is named the newest before it is on disk",
        "tests/train/test_train_checkpoints.py::test_a_killed_save_leaves_the_newest_checkpoint_whole",
        "skyrl/train/checkpoints.py",
        "        with replacing_folder(target) as folder:\n",
        "        self.place.write(MARKER, str(step).encode())\n        with replacing_folder(target) as folder:\n",
    ),
    Defect(
        "restarted-steps",
        "a resumed run restarts at step 0 with the weights of its checkpoint",
        "tests/train/sft/test_sft_trainer.py::"
        "test_a_run_killed_after_any_step_and_resumed_equals_the_uninterrupted_one_bit_for_bit",
        "skyrl/train/sft/trainer.py",
        "self.global_step = found.step",
        "self.global_step = 0",
    ),
    Defect(
        "repeated-tokens",
        "tokens that a lost engine has delivered are sampled again",
        "tests/backends/engines/test_continuation.py::"
        "test_what_was_delivered_before_a_kill_is_kept_and_nothing_is_drawn_twice",
        "skyrl/backends/engines/continuation.py",
        "    if not pieces or not can_go_on(ticket.draw):\n",
        "    if True:\n",
    ),
    Defect(
        "waiting-ranks",
        "ranks wait forever for a rank that failed between collectives",
        "tests/backends/test_torch_faults.py::"
        "test_an_exception_on_one_rank_loses_the_group_that_meets_in_collectives[forward]",
        "skyrl/backends/torch/workers/worker.py",
        "if is_common and not isinstance(error, RequestError):",
        "if False:",
    ),
    # Queue, memory and disk are bounded.
    Defect(
        "unbounded-versions",
        "versions stay in memory without a limit",
        "tests/backends/test_sampler_versions.py::test_versions_that_are_stored_keep_to_the_bytes_that_they_may_take",
        "skyrl/backends/common/versions.py",
        "        excess = self.excess_bytes\n",
        "        excess = 0\n",
    ),
    Defect(
        "unbounded-results",
        "results stay in memory without a limit",
        "tests/tinker/test_futures.py::test_single_answers_of_many_take_no_more_than_twice_the_cap_and_the_newest",
        "skyrl/tinker/requests/futures.py",
        "<= 2 * self._max_bytes:",
        "<= 2**60:",
    ),
    Defect(
        "unbounded-stored-results",
        "results are stored without a limit in bytes",
        "tests/tinker/test_retention.py::"
        "test_results_past_their_bytes_go_the_oldest_first_but_none_of_the_last_ten_minutes",
        "skyrl/tinker/checkpoints/retention.py",
        "max(now - rules.config.result_retention_sec, min(rules.results_since, now - RESULT_AGE_S))",
        "now - rules.config.result_retention_sec",
    ),
    Defect(
        "no-memory-plan",
        "a model that does not fit into memory is loaded",
        "tests/backends/test_torch_memory.py::test_an_explicit_share_that_does_not_fit_is_refused",
        "skyrl/backends/common/memory_plan.py",
        "if self.left >= self.model:",
        "if True:",
    ),
    Defect(
        "decompression-bomb",
        "a body is decompressed although its stated size exceeds the limit",
        "tests/tinker/test_bombs.py::test_a_bomb_that_says_its_size_is_refused_before_it_is_decompressed",
        "skyrl/tinker/wire/codec.py",
        "zstandard.frame_content_size(body) > max_bytes",
        "False",
    ),
    # Nothing is compiled after warm-up.
    Defect(
        "tile-per-length",
        "each length of a sequence has a tile, and so a program, of its own",
        "tests/backends/test_jax_backend.py::test_losses_their_settings_and_hyper_parameters_compile_nothing",
        "skyrl/backends/common/packing.py",
        "next(length for length in self.lengths(tokens, wide) if length >= tokens)",
        "tokens",
    ),
    Defect(
        "short-warm-up",
        "the warm-up ends after its first piece",
        "tests/backends/test_jax_tenants.py::test_an_idle_backend_reaches_all_its_programs_by_itself",
        "skyrl/backends/jax/backend.py",
        "next(self._warm_up, ENDED) is not ENDED",
        "next(self._warm_up, None) is not None",
    ),
    # Tenants share fairly.
    Defect(
        "free-prompts",
        "prompts are not charged to their tenant",
        "tests/backends/test_fair_queue.py::"
        "test_tenants_that_wait_are_given_tokens_by_their_weights_up_to_one_sample_of_each",
        "skyrl/backends/executor/fair_queue.py",
        "        self.charge(tenant, self._lines[tenant][request_id].cost)\n",
        "",
    ),
    Defect(
        "no-window",
        "all samples of a tenant's flood go to the backend at once",
        "tests/tinker/test_scheduler.py::"
        "test_of_a_tenants_flood_no_more_goes_than_its_window_and_the_rest_as_that_ends",
        "skyrl/tinker/engine/scheduler.py",
        "not tenant.waiting or tenant.used >= self._tokens",
        "not tenant.waiting",
    ),
    Defect(
        "starved-sample",
        "small samples pass a large one that waits for memory forever",
        "tests/backends/test_sampler_batching.py::test_small_requests_that_never_end_do_not_starve_a_large_one",
        "skyrl/backends/common/sampling/sampler.py",
        "            job.lacks_room = True\n            return\n",
        "            return\n",
    ),
    Defect(
        "half-of-all",
        "a tenant may take half of a limit whatever other tenants hold",
        "tests/tinker/test_quota.py::test_tenants_that_come_and_go_end_with_equal_parts",
        "skyrl/utils/quota.py",
        "return max(0, limit - (self.total - self._held.get(tenant, 0))) // 2",
        "return limit // 2",
    ),
]
