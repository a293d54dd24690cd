"""Defects that silently train or sample the wrong model, as small edits of our source, with the tests that see them.

Numbers follow the list of known defects that the tests were written against. To add one, write the shortest edit that
brings its symptom back and name a test of that symptom.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Edit:
    """Replace `old`, which occurs once in `file`, by `new`."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Defect:
    id: str
    what: str
    edits: list[Edit]
    tests: list[str]


BACKEND = "skyrl/backends/jax/backend.py"
OPERATIONS = "skyrl/backends/common/models/operations.py"
STEP = "skyrl/backends/jax/training/programs.py"
PASSES = "skyrl/backends/jax/training/microbatches.py"
CHECKS = "skyrl/algorithms/checks/requests.py"
JAX_TESTS = "tests/backends/test_jax_backend.py::"
GRADIENTS = "tests/conformance/test_gradients.py::"
TRAINING = "tests/conformance/test_training.py::"
TENANTS = "tests/backends/test_jax_tenants.py::"
SAMPLER = "skyrl/backends/common/sampling/sampler.py"
VERSIONS = "skyrl/backends/common/versions.py"
WRITER = "skyrl/backends/common/background_writer.py"
BATCHING = "tests/backends/test_sampler_batching.py::"
RECOVERY = "tests/tinker/test_engine_recovery.py::"
CRASH_RECORD = "skyrl/tinker/processes/crash_record.py"
BLAMED = "tests/tinker/test_crash_record.py::"
FAILING = "tests/tinker/test_failing_database.py::"

DEFECTS = [
    Defect(
        "C1.0",
        "each sequence's loss is divided by the sum of its weights, so custom losses train on garbage",
        [
            Edit(
                STEP,
                "        return token_losses.sum(), PassOutput",
                "        totals = jnp.zeros(len(tile.tokens)).at[tile.segments].add(tile.weights.sum(1))\n"
                "        divided = token_losses / jnp.maximum(totals[tile.segments], 1e-9)\n"
                "        return divided.sum(), PassOutput",
            )
        ],
        [GRADIENTS + "test_a_loss_of_the_clients_own[jax-untied]"],
    ),
    Defect(
        "C1.1",
        "sampling an older version overwrites the live training weights",
        [
            Edit(
                OPERATIONS,
                "    def discard_gradients(self, model_id: str) -> None:",
                "    def submit(self, operation) -> None:\n"
                "        super().submit(operation)\n"
                "        for state in map(self._models.peek, self._models):\n"
                "            old = self._versions._resident.get(getattr(operation, 'version', None))\n"
                "            if old is not None and hasattr(operation, 'prompt'):\n"
                "                state.adapter = old\n\n"
                "    def discard_gradients(self, model_id: str) -> None:",
            )
        ],
        [JAX_TESTS + "test_sampling_an_older_version_leaves_the_training_weights"],
    ),
    Defect(
        "C1.2",
        "a published version is an alias of the live weights",
        [
            Edit(
                BACKEND,
                "            state.step += 1\n",
                "            state.step += 1\n"
                "            for version in list(self._versions._resident):\n"
                "                self._versions.publish(version, state.adapter)\n",
            )
        ],
        [JAX_TESTS + "test_a_version_samples_the_same_after_more_training_and_unloading"],
    ),
    Defect(
        "C1.3",
        "weight decay of one tenant shrinks the weights of all",
        [
            Edit(
                BACKEND,
                "            state.step += 1\n",
                "            state.step += 1\n"
                "            decay = 1 - params.learning_rate * params.weight_decay\n"
                "            for other in map(self._models.peek, self._models):\n"
                "                if other is not state:\n"
                "                    decayed = jax.tree.map(lambda leaf: leaf * decay, other.adapter.weights)\n"
                "                    other.adapter = other.adapter._replace(weights=decayed)\n",
            )
        ],
        [TRAINING + "test_a_step_of_one_model_leaves_every_bit_of_another[jax]"],
    ),
    Defect(
        "C1.4",
        "a new model starts with the gradients of a deleted one",
        [
            Edit(
                OPERATIONS,
                "        self._models.remove(operation.model_id)\n",
                "        self.leftover = self._models.peek(operation.model_id).gradient_sums\n"
                "        self._models.remove(operation.model_id)\n",
            ),
            Edit(
                OPERATIONS,
                "            self._models.put(model_id, self.fresh_state(kind, seed))\n",
                "            state = self.fresh_state(kind, seed)\n"
                "            state.gradient_sums = getattr(self, 'leftover', None)\n"
                "            self._models.put(model_id, state)\n",
            ),
        ],
        [TRAINING + "test_a_model_that_is_made_again_has_no_gradients_of_its_predecessor[jax]"],
    ),
    Defect(
        "C1.5",
        "the fan-in of the initial A counts all stacked layers",
        [
            Edit(
                "skyrl/tx/lora.py",
                "        bound = np.float32(1 / np.sqrt(target.in_features))\n",
                "        bound = np.float32(1 / np.sqrt(target.in_features * len(target.stack.layers or [0])))\n",
            )
        ],
        ["tests/tx/test_lora.py::test_initial_a_has_the_spread_of_pefts_in_every_layer"],
    ),
    Defect(
        "C1.8",
        "the log-sum-exp is computed in bfloat16",
        [
            Edit(
                "skyrl/tx/layers/logprobs.py",
                "        normaliser = jax.nn.logsumexp(logits, axis=-1, keepdims=True)\n",
                "        normaliser = jax.nn.logsumexp(logits.astype(jnp.bfloat16), axis=-1, keepdims=True)\n"
                "        normaliser = normaliser.astype(jnp.float32)\n",
            )
        ],
        [
            "tests/tx/models/test_qwen3.py::"
            "test_log_probabilities_over_150_thousand_tokens_are_accurate_over_a_bfloat16_base"
        ],
    ),
    Defect(
        "C1.9",
        "gradients are divided by the number of sequences of the request",
        [
            Edit(
                OPERATIONS,
                "                self.add_gradients(state, gradients)\n",
                "                divided = __import__('jax').tree.map(lambda x: x / len(operation.data), gradients)\n"
                "                self.add_gradients(state, divided)\n",
            )
        ],
        [
            JAX_TESTS + "test_a_batch_in_one_request_equals_the_same_batch_in_several",
            GRADIENTS + "test_the_gradient_of_a_loss[jax-untied-cross_entropy-attn]",
        ],
    ),
    Defect(
        "C1.10",
        "requests run in the order of arrival, so an optimizer step may overtake the pass before it",
        [
            Edit(
                "skyrl/tinker/engine/scheduler.py",
                "            self._line_up(line, seq_id, operation, now)\n",
                "            self._queue(operation, seq_id)\n",
            )
        ],
        ["tests/tinker/test_scheduler.py::test_a_model_runs_in_seq_id_order_whatever_order_its_requests_arrive_in"],
    ),
    Defect(
        "C1.12",
        "prompt log-probabilities lack the first token's entry",
        [
            Edit(
                "skyrl/backends/common/sampling/sequences.py",
                "            scores.prompt_logprobs,\n",
                "            None if scores.prompt_logprobs is None else scores.prompt_logprobs[1:],\n",
            )
        ],
        ["tests/backends/test_sampler.py::test_prompt_logprobs_equal_hugging_faces_and_begin_with_nan"],
    ),
    Defect(
        "C1.15",
        "images are dropped silently and the text around them is trained on",
        [
            Edit(
                "skyrl/tinker/wire/codec.py",
                '        raise RequestError(_only_text(kind or "unknown"))\n',
                "        return np.zeros(0, np.int32)\n",
            )
        ],
        ["tests/tinker/test_wire.py::test_a_faulty_protobuf_request_keeps_its_place_and_says_why"],
    ),
    Defect(
        "C1.16",
        "any base model is accepted and the served one trained instead",
        [
            Edit(
                "skyrl/tinker/operations/models.py",
                "    admission.service.check_base_model(request.base_model)\n    config = request.lora_config\n",
                "    config = request.lora_config\n",
            )
        ],
        ["tests/tinker/test_api_training.py::test_unknown_base_model_fails_and_names_the_served_ones"],
    ),
    Defect(
        "C1.17",
        "targets of another length than the input reach the engine",
        [Edit(CHECKS, "    _check_lengths(data, max_context_length)\n", "")],
        ["tests/algorithms/test_checks.py::test_a_bad_pass_is_refused_by_name"],
    ),
    Defect(
        "C1.17b",
        "seeds beyond 32 bits fail",
        [Edit(CHECKS, "not -(2**63) <= seed < 2**63", "not -(2**31) <= seed < 2**31")],
        ["tests/algorithms/test_checks.py::test_any_int64_is_a_seed"],
    ),
    Defect(
        "C1.18",
        "gradient sums are kept in bfloat16",
        [
            Edit(
                STEP,
                'jit("add", lambda a, b: jax.tree.map(jnp.add, a, b))',
                'jit("add", lambda a, b: jax.tree.map(lambda x, y: (x + y).astype("bfloat16").astype(x.dtype), a, b))',
            )
        ],
        [JAX_TESTS + "test_a_batch_in_one_request_equals_the_same_batch_in_several"],
    ),
    Defect(
        "C1.18b",
        "adapters are kept in bfloat16",
        [Edit("skyrl/tx/lora.py", "jnp.asarray(matrix, jnp.float32)", "jnp.asarray(matrix, jnp.bfloat16)")],
        [JAX_TESTS + "test_state_is_float32_over_a_bfloat16_base"],
    ),
    Defect(
        "C1.19",
        "running out of memory destroys a donated accumulator, and training fails until a restart",
        [
            Edit(
                OPERATIONS,
                "            output, gradients = yield from self.run_pass(self._checked(operation, state), state)\n",
                "            model, self.accumulator = state, getattr(self, 'accumulator', state)\n"
                "            state = self.accumulator\n"
                "            self.accumulator = None\n"
                "            output, gradients = yield from self.run_pass(self._checked(operation, state), state)\n"
                "            state = self.accumulator = model\n",
            ),
        ],
        ["tests/backends/test_out_of_memory.py::test_running_out_of_memory_fails_one_request_and_nothing_else"],
    ),
    Defect(
        "P5.1",
        "a snapshot claims a request that came after it",
        [
            Edit(
                "skyrl/tinker/engine/maintenance.py",
                "        seq_id = self._scheduler.finished(model_id)\n",
                "        seq_id = self._scheduler.finished(model_id)\n"
                "        seq_id = seq_id if seq_id is None else seq_id + 1\n",
            )
        ],
        [RECOVERY + "test_a_model_whose_engine_is_lost_again_and_again_ends_as_one_whose_engine_never_was"],
    ),
    Defect(
        "P5.2",
        "a snapshot lacks the gradients that no optimizer step has taken yet",
        [
            Edit(
                "skyrl/backends/common/models/store.py",
                "        state = copy.copy(state)\n",
                "        state = copy.copy(state)\n        state.drop_sums()\n",
            )
        ],
        [
            "tests/conformance/test_saved_state.py::"
            "test_a_model_revived_from_its_snapshot_elsewhere_goes_on_bit_for_bit[jax-with pending gradients]"
        ],
    ),
    Defect(
        "P5.3",
        "a failed optimizer step that is repeated leaves the gradients that it had cleared",
        [
            Edit(
                "skyrl/backends/executor/executor.py",
                '            if operation.gradients == "dropped":\n',
                "            if False:\n",
            )
        ],
        [RECOVERY + "test_a_model_whose_engine_is_lost_again_and_again_ends_as_one_whose_engine_never_was"],
    ),
    Defect(
        "P5.4",
        "a request is done although those that follow it have failed for want of it",
        [
            Edit(
                "skyrl/tinker/engine/scheduler.py",
                '            self._queue(_rejected(operation, error, "kept"), None)\n',
                "            self._queue(operation, None)\n",
            )
        ],
        ["tests/tinker/test_scheduler.py::test_a_request_that_arrives_after_its_followers_failed_is_refused"],
    ),
    Defect(
        "P5.5",
        "a model that was unloaded is unloaded again before the saves that it still owes",
        [
            Edit(
                "skyrl/tinker/requests/replay.py",
                "        elif request.is_done and request.seq_id is None:\n",
                "        elif False:\n",
            )
        ],
        ["tests/tinker/test_revival.py::test_an_unloading_that_overtook_a_save_does_not_come_before_it"],
    ),
    Defect(
        "P5.6",
        "requests overtake the revival of their model",
        [
            Edit(
                "skyrl/tinker/requests/replay.py",
                "        history.session, model.tenant, model.model_id, request.seq_id,",
                "        history.session, model.session_id, model.model_id, request.seq_id,",
            )
        ],
        ["tests/tinker/test_api_recovery.py::test_a_revival_waits_in_the_same_lane_as_the_requests_that_follow_it"],
    ),
    Defect(
        "P5.7",
        "a refusal that was answered is not known any more after a restart",
        [
            Edit(
                "skyrl/tinker/database/log/request_log.py",
                "            refusal = _taken(entry, kind)\n",
                "            return Logged(entry.request_id, _taken(entry, kind))\n",
            )
        ],
        ["tests/tinker/test_api_recovery.py::test_a_refused_seq_id_keeps_its_outcome_and_breaks_nothing"],
    ),
    Defect(
        "B7.1",
        "a tenant's prompts are answered from another tenant's cache",
        [Edit(SAMPLER, "        return job.request.tenant, self._versions", "        return 0, self._versions")],
        [BATCHING + "test_nothing_is_shared_between_tenants_or_versions"],
    ),
    Defect(
        "B7.2",
        "keys and values of a version are used for the one that took its name",
        [Edit(SAMPLER, "self._versions.content(job.slot), 0 if", "job.request.version, 0 if")],
        [BATCHING + "test_a_name_that_is_published_again_shares_nothing_with_what_it_was"],
    ),
    Defect(
        "B7.3",
        "samples of one prompt write into the page that they share",
        [Edit(SAMPLER, "copies.append((prompt.path[full].page, own[0]))", "own[0] = prompt.path[full].page")],
        [BATCHING + "test_a_request_samples_the_same_alone_and_beside_others_that_come_and_go"],
    ),
    Defect(
        "B7.4",
        "samples of the base model beside an adapter's are sampled with the adapter",
        [
            Edit(
                "skyrl/backends/jax/sampling/adapter_stacks.py",
                "groups[0].places[BASE_SLOT] = -1",
                "groups[0].places[BASE_SLOT] = 0",
            )
        ],
        ["tests/backends/test_sampler_versions.py::test_versions_and_the_base_sampled_together_are_as_each_alone"],
    ),
    Defect(
        "C3.1",
        "gradients of models that share a call go to a neighbour",
        [
            Edit(
                PASSES,
                "for output, gradients in results[: len(works)]]",
                "for output, gradients in results[len(works) - 1 :: -1]]",
            )
        ],
        [TENANTS + "test_a_stack_of_models_gives_each_what_it_gets_alone"],
    ),
    Defect(
        "C3.2",
        "a model that waits on the host or on disk loses its gradient sums",
        [
            Edit(
                "skyrl/backends/jax/models/state.py",
                "first, second, self.step, sums, self.sequences)",
                "first, second, self.step, None)",
            )
        ],
        ["tests/backends/test_offload.py::test_a_model_that_is_used_comes_back_as_it_was"],
    ),
    Defect(
        "C3.3",
        "a model that is changed while it is about to leave comes back as it was before",
        [
            Edit(
                "skyrl/backends/common/offload.py",
                "            self._keep(model)\n            self._working.add(model)\n",
                "            self._working.add(model)\n",
            )
        ],
        ["tests/backends/test_offload.py::test_what_a_model_becomes_while_it_was_about_to_leave_is_kept"],
    ),
    Defect(
        "C3.4",
        "sequences that are packed into one tile see each other",
        [
            Edit(
                "skyrl/tx/layers/packed_attention.py",
                "    return (causal & (own[:, :, None] == segments[:, None, :keys]))[:, None, None]\n",
                "    return (causal & (own[:, :, None] >= -1))[:, None, None]\n",
            )
        ],
        [GRADIENTS + "test_the_gradient_of_a_loss[jax-untied-cross_entropy-attn]"],
    ),
    Defect(
        "C3.5",
        "tokens that need a gradient do not reach the vocabulary projection's backward pass",
        [
            Edit(
                "skyrl/backends/common/packing.py",
                "    arrays.trained[...] = trained.sum()\n",
                "    arrays.trained[...] = trained.sum() // 2\n",
            )
        ],
        [GRADIENTS + "test_the_gradient_of_a_loss[jax-untied-cross_entropy-attn]"],
    ),
    Defect(
        "C3.6",
        "weights of tenants are accepted and mean nothing",
        [
            Edit(
                "skyrl/utils/fairness.py",
                "        return round(cost * SCALE / self._weights.get(tenant, 1))\n",
                "        return round(cost * SCALE)\n",
            )
        ],
        ["tests/utils/test_fairness.py::test_tenants_are_served_in_proportion_to_their_weights"],
    ),
    Defect(
        "C3.7",
        "what gradient checkpointing decides on is not what is compiled",
        [Edit("skyrl/backends/jax/training/program_choice.py", "graphs[modes[length]]", "graphs[False]")],
        ["tests/backends/test_memory.py::test_auto_runs_the_mode_that_fits_and_short_tiles_without"],
    ),
    Defect(
        "poisoned-cache",
        "pages that carry the error of a program that failed on the device are kept, so every later sample fails",
        [
            Edit(
                "skyrl/backends/jax/sampling/runner.py",
                "        except Exception:  # any device error\n            return True",
                "        except Exception:  # any device error\n            return False",
            )
        ],
        [BATCHING + "test_a_cache_that_a_failed_program_has_poisoned_is_made_again"],
    ),
    Defect(
        "bf16-attention",
        "training rounds attention weights to bfloat16 and decoding does not, so ratios of fresh samples are not 1",
        [
            Edit(
                "skyrl/tx/layers/packed_attention.py",
                "            weights,  # not rounded",
                "            weights.astype(value.dtype).astype(jnp.float32),  # not rounded",
            )
        ],
        ["tests/tx/layers/test_attention_bfloat16.py::test_attention_over_bfloat16_is_that_of_float64_rounded_once"],
    ),
    Defect(
        "exact-float32",
        "products of float32 base weights are rounded to TF32 on a GPU",
        [
            Edit(
                "skyrl/backends/jax/defaults.py",
                '"highest" if on_host or exact else "high"',
                '"highest" if on_host else "high"',
            )
        ],
        ["tests/backends/test_defaults.py::test_products_are_exact_where_base_weights_are_float32"],
    ),
    Defect(
        "nan-past-the-table",
        "padding of a prompt reads pages of others past its table, so a tenant's NaN reaches a neighbour",
        [
            Edit(
                "skyrl/tx/layers/cached_attention.py",
                " & (place < pages.table.shape[1] * pages.size)[None, None]",
                "",
            )
        ],
        [
            "tests/backends/test_nan_neighbours.py::test_samples_and_prompt_scores_are_the_same_in_a_context_of_any_length[jax-400]"
        ],
    ),
    Defect(
        "one-piece-warm-up",
        "the warm-up ends after its first piece, so first requests wait for programs to be compiled",
        [Edit(BACKEND, "next(self._warm_up, ENDED) is not ENDED", "next(self._warm_up, None) is not None")],
        [TENANTS + "test_an_idle_backend_reaches_all_its_programs_by_itself"],
    ),
    Defect(
        "predecessor-not-waited-for",
        "a server that is started while the one before it ends is refused",
        [
            Edit(
                "skyrl/utils/locks/lease.py",
                "patience_s = ENDING_S if holder.startswith(ENDING) else NOTICE_S",
                "patience_s = 0.0",
            )
        ],
        ["tests/tinker/test_launcher.py::test_start_waits_for_a_server_that_is_stopping"],
    ),
    Defect(
        "paths-told",
        "messages to tenants name folders of the server",
        [
            Edit(
                "skyrl/tinker/requests/outcomes.py",
                "told = replace(result, error=self._service.redact(result.error))",
                "told = replace(result, error=result.error)",
            )
        ],
        ["tests/tinker/test_redaction.py::test_a_damaged_checkpoint_is_named_without_its_folder"],
    ),
    Defect(
        "nan-tokens",
        "a model whose weights are not finite is sampled: it answers token 0 again and again",
        [
            Edit(
                "skyrl/tinker/requests/samples.py",
                "if any(np.isnan(one.logprobs).any() for one in result.sequences):",
                "if False:",
            )
        ],
        ["tests/tinker/test_sdk_errors.py::test_a_sample_beside_a_nan_version_is_unchanged[jax]"],
    ),
    Defect(
        "version-read-inline",
        "the engine stands still while a version is read from the disk",
        [
            Edit(
                VERSIONS,
                "            reading = self._load(path)\n",
                "            reading = self._load(path)\n            reading.exception()\n",
            )
        ],
        [JAX_TESTS + "test_others_are_sampled_while_a_version_is_read_from_a_disk_that_does_not_answer"],
    ),
    Defect(
        "versions-without-limit",
        "versions stay in memory whatever they take",
        [Edit(VERSIONS, "        excess = self.excess_bytes\n", "        excess = 0\n")],
        ["tests/backends/test_sampler_versions.py::test_versions_that_are_stored_keep_to_the_bytes_that_they_may_take"],
    ),
    Defect(
        "copies-count-nothing",
        "versions that slots hold as copies take more memory than they may",
        [Edit(VERSIONS, "0 if adapter is own else self._nbytes(adapter)", "0")],
        [
            "tests/backends/test_version_pool.py::test_a_version_is_sampled_as_its_backend_fits_it_and_a_copy_counts_beside_it"
        ],
    ),
    Defect(
        "sums-come-back-from-disk",
        "gradient sums that were dropped while a model was on disk come back with it",
        [
            Edit(
                "skyrl/backends/common/offload.py",
                "        if model.without_sums:\n            state.drop_sums()\n",
                "",
            )
        ],
        [
            "tests/backends/test_offload.py::"
            "test_any_state_is_moved_by_its_own_backend_alone_and_its_sums_go_wherever_they_are"
        ],
    ),
    Defect(
        "publishing-without-limit",
        "versions that the disk is too slow for pile up in memory",
        [
            Edit(
                "skyrl/backends/common/models/store.py",
                "return self.writer.unwritten_bytes >= self.unwritten_bytes and self.writer.has_unwritten(model_id)",
                "return False",
            )
        ],
        [
            "tests/backends/test_unwritten_versions.py::"
            "test_publishing_waits_for_the_disk_once_versions_take_half_their_memory"
        ],
    ),
    Defect(
        "one-writer",
        "a save waits for what other models write",
        [Edit(WRITER, '[("model", model_id), _folder(path)]', '[("model", ""), _folder(path)]')],
        ["tests/backends/test_background_writer.py::test_a_save_that_takes_long_holds_up_no_other_models_save_or_load"],
    ),
    Defect(
        "load-before-its-save",
        "a checkpoint that is still being written for one model is looked for by another",
        [Edit(WRITER, "            before = self._before([_folder(path)])\n", "            before = []\n")],
        ["tests/backends/test_background_writer.py::test_a_folder_is_read_after_what_any_model_is_writing_there"],
    ),
    Defect(
        "all-tensors-at-once",
        "a save holds a second copy of the model in memory",
        [
            Edit(
                "skyrl/utils/files/tensor_file.py",
                "        file.write(_header(",
                "        kept = []\n        file.write(_header(",
            ),
            Edit(
                "skyrl/utils/files/tensor_file.py",
                "            del made\n",
                "            kept.append(made.tobytes())\n",
            ),
        ],
        ["tests/tx/test_tensor_file.py::test_a_whole_models_checkpoint_takes_the_memory_of_no_second_model"],
    ),
    Defect(
        "learning-rate-of-float64",
        "a learning rate that float32 cannot hold is taken, and makes all weights NaN",
        [Edit("skyrl/types.py", "Field(ge=0, le=LARGEST_FLOAT32)", "Field(ge=0)")],
        ["tests/tinker/test_api_training.py::test_a_number_that_float32_cannot_hold_is_refused"],
    ),
    Defect(
        "gc-makes-a-database",
        "skyrl gc without the server's database makes an empty one, which names no folder",
        [Edit("skyrl/tinker/checkpoints/offline.py", "create=False", "create=True")],
        ["tests/tinker/test_moved_state.py::test_a_command_makes_no_database_and_removes_nothing"],
    ),
    Defect(
        "ids-not-compared",
        "a server starts on a folder and a database that do not belong together",
        [Edit("skyrl/tinker/checkpoints/state_id.py", "    if ids.agree:\n", "    if ids:\n")],
        ["tests/tinker/test_moved_state.py::test_a_server_refuses_two_that_do_not_belong_together_and_leaves_both"],
    ),
    Defect(
        "no-guard",
        "a round takes whatever the database does not name, however much that is",
        [
            Edit(
                "skyrl/tinker/checkpoints/guard.py",
                "return self.nameless + self.surplus > max(FEW, SHARE * self.total)",
                "return False",
            )
        ],
        ["tests/tinker/test_trash.py::test_a_round_that_would_take_too_much_takes_none_and_says_so_once"],
    ),
    Defect(
        "no-trash",
        "checkpoints that are past their time are removed at once",
        [
            Edit(
                "skyrl/tinker/checkpoints/retention.py",
                "gone.files._replace(to_trash=rules.config.trash_retention_sec > 0)",
                "gone.files",
            )
        ],
        ["tests/tinker/test_trash.py::test_what_expires_is_surplus_or_has_no_name_goes_to_the_trash"],
    ),
    Defect(
        "crash-of-everything",
        "what was running when all processes died at once is blamed for nothing, so it kills every server for ever",
        [Edit(CRASH_RECORD, "        if life > self._lives:\n", "        if False:\n")],
        [
            BLAMED + "test_a_pass_of_which_the_whole_server_dies_three_times_fails_by_name_and_its_model_goes_on",
            BLAMED + "test_what_was_computed_when_everything_died_is_counted_once",
        ],
    ),
    Defect(
        "blamed-beside-others",
        "a request fails after three crashes though others were being computed beside it",
        [Edit(CRASH_RECORD, "self.alone + 1 if alone else 0)", "self.alone + 1)")],
        [BLAMED + "test_crashes_beside_others_make_suspects_and_fail_nobody"],
    ),
    Defect(
        "read-gives-up",
        "a read that fails once while a model is brought back fails all that was acknowledged for it",
        [
            Edit(
                "skyrl/tinker/requests/engine_models.py",
                'await self._database.attempt(read, f"model {model_id} cannot be recovered yet")',
                "await read()",
            )
        ],
        [FAILING + "test_a_model_is_brought_back_once_the_database_can_be_read_again"],
    ),
    Defect(
        "stored-out-of-line",
        "a stopping server stores what follows an outcome that it could not store, which then cannot be done again",
        [Edit("skyrl/tinker/requests/outcomes.py", "            self._dropped.add(model_id)", "            pass")],
        [FAILING + "test_what_follows_an_outcome_that_a_stopping_server_could_not_store_is_done_again_with_it"],
    ),
    Defect(
        "no-fence",
        "a server whose database another has taken over goes on writing to it",
        [Edit("skyrl/tinker/database/database.py", "                self.fence.check(session)\n", "")],
        ["tests/tinker/test_fence.py::test_a_server_that_another_has_followed_writes_nothing_and_says_so"],
    ),
    Defect(
        "head-of-line",
        "a sample that waits for pages holds up all behind it, however small",
        [
            Edit(
                "skyrl/backends/common/sampling/waiting_queue.py",
                "left = min(left, self._room - job.passed_by)",
                "left = 0",
            )
        ],
        [BATCHING + "test_a_small_request_passes_a_large_one_that_waits_for_memory"],
    ),
    Defect(
        "starved-by-small-ones",
        "a sample that waits for pages is passed by smaller ones for ever",
        [Edit(SAMPLER, "            job.lacks_room = True\n            return\n", "            return\n")],
        [BATCHING + "test_small_requests_that_never_end_do_not_starve_a_large_one"],
    ),
    Defect(
        "pages-of-one-that-cannot-begin",
        "a request that fails as it begins keeps the pages that were reserved for it",
        [
            Edit(
                SAMPLER,
                "        prompt = Prompt(job, self._owner(job), self._pages, self._runner)\n"
                "        self._prefill.append(prompt)\n"
                "        reserved = self._reserve(pages_to_begin(job), self._states.to_begin(job))  # "
                "after everything that can fail\n",
                "        reserved = self._reserve(pages_to_begin(job), self._states.to_begin(job))\n"
                "        prompt = Prompt(job, self._owner(job), self._pages, self._runner)\n"
                "        self._prefill.append(prompt)\n",
            )
        ],
        [BATCHING + "test_a_request_that_there_is_no_memory_to_begin_fails_alone"],
    ),
    Defect(
        "owners-kept-for-ever",
        "an owner of prefixes is remembered for each request, though it has no pages",
        [
            Edit(
                "skyrl/backends/common/page_table.py",
                "return Node(np.empty(0, np.int32), SCRATCH, None, owner) if known is None else known",
                "return self._roots.setdefault(owner, known or Node(np.empty(0, np.int32), SCRATCH, None, owner))",
            )
        ],
        ["tests/backends/test_page_table.py::test_who_has_no_pages_is_not_remembered"],
    ),
    Defect(
        "objectives-kept-for-ever",
        "programs of every objective that was ever used are kept",
        [Edit(STEP, "        if len(own) > OBJECTIVES:\n", "        if False:\n")],
        ["tests/backends/test_training_programs.py::test_what_was_compiled_for_an_objective_that_went_is_freed"],
    ),
    Defect(
        "json-of-a-result-at-once",
        "an array of a result is made JSON in one call, which holds the interpreter",
        [Edit("skyrl/tinker/wire/strict_json.py", "\nNUMBERS = 1024\n", "\nNUMBERS = 2**40\n")],
        ["tests/tinker/test_api_json.py::test_a_large_value_is_written_in_pieces_of_a_bounded_size"],
    ),
    Defect(
        "openapi-for-everybody",
        "the OpenAPI document is made anew for everybody who asks, on the event loop",
        [
            Edit("skyrl/tinker/http/openapi.py", "    @cache\n    def openapi()", "    def openapi()"),
            Edit("skyrl/tinker/http/openapi.py", "await asyncio.to_thread(text)", "strict_json.dumps(openapi())"),
        ],
        ["tests/tinker/test_stalls.py::test_the_openapi_document_is_made_once_beside_the_event_loop_for_a_crowd"],
    ),
    Defect(
        "bodies-charged-by-bytes",
        "a tenant is charged for the bytes of a body alone, whatever they cost to read",
        [Edit("skyrl/tinker/wire/sharing/decode_pool.py", "        if surplus > 0:\n", "        if False:\n")],
        ["tests/tinker/test_charged_bodies.py::test_bodies_of_another_get_in_among_bombs"],
    ),
    Defect(
        "thread-left-behind",
        "the thread of a body whose sender has gone is given to the next before it has ended",
        [
            Edit(
                "skyrl/tinker/wire/sharing/decode_pool.py",
                "return await asyncio.shield(running)",
                "return await running",
            )
        ],
        ["tests/tinker/test_codec.py::test_a_thread_that_is_left_behind_is_not_given_to_the_next_before_it_has_ended"],
    ),
    Defect(
        "parts-counted-two-deep",
        "parts of a protobuf body are not counted below chunks and inputs",
        [
            Edit(
                "skyrl/tinker/wire/protobuf_scan.py",
                "        if inner:\n            parts += _parts_within(data, key, content, at, inner, most - parts)\n",
                "",
            )
        ],
        ["tests/tinker/test_bombs.py::test_a_bomb_is_refused_by_what_is_wrong_with_it[shape]"],
    ),
    Defect(
        "long-lists-through-the-parser",
        "the parser of JSON reads long lists of numbers too, during which nothing else goes on",
        [
            Edit("skyrl/tinker/wire/json_numbers.py", "\nLONG_BYTES = 64\n", "\nLONG_BYTES = 2**40\n"),
            Edit("skyrl/tinker/wire/json_numbers.py", "\nMAX_REST_BYTES = 2 * 2**20\n", "\nMAX_REST_BYTES = 2**40\n"),
        ],
        ["tests/tinker/test_stalls.py::test_a_large_sample_does_not_stop_the_others"],
    ),
    Defect(
        "errors-as-long-as-requests",
        "an error repeats whatever name was sent",
        [Edit("skyrl/tinker/wire/parsing.py", "    if len(error) <= MAX_ERROR:\n", "    if True:\n")],
        ["tests/tinker/test_api_errors.py::test_an_error_is_no_longer_than_is_of_use_whatever_was_sent"],
    ),
    Defect(
        "shares-of-the-whole",
        "a tenant may take half of a limit however much the others hold",
        [
            Edit(
                "skyrl/utils/quota.py",
                "return max(0, limit - (self.total - self._held.get(tenant, 0))) // 2",
                "return limit // 2",
            )
        ],
        ["tests/tinker/test_quota.py::test_tenants_that_come_and_go_end_with_equal_parts"],
    ),
    Defect(
        "gap-clock-not-moved",
        "what waits for an earlier request fails although its batch still arrives",
        [
            Edit(
                "skyrl/tinker/engine/scheduler.py",
                "            self._gaps[operation.model_id] = now\n            reason",
                "            self._gaps.setdefault(operation.model_id, now)\n            reason",
            )
        ],
        ["tests/tinker/test_scheduler.py::test_what_still_arrives_is_not_given_up"],
    ),
    Defect(
        "bodies-before-room",
        "a body is read before there is room for it",
        [
            Edit(
                "skyrl/tinker/http/routes/dependencies.py",
                "        room.grow_to(announced_length(request.scope))\n",
                "",
            )
        ],
        ["tests/tinker/test_body_quota.py::test_bodies_that_do_not_come_take_only_their_senders_room"],
    ),
    Defect(
        "silent-connections-stay",
        "a connection that brings no request stays for ever",
        [
            Edit(
                "skyrl/tinker/http/connections.py",
                "    def _give_up(self) -> None:\n        self.transport.abort()",
                "    def _give_up(self) -> None:\n        pass",
            )
        ],
        ["tests/tinker/test_connections.py::test_a_second_request_that_does_not_come_whole_closes_its_connection"],
    ),
    Defect(
        "others-answers-dropped",
        "large answers of a tenant drop those of others",
        [
            Edit(
                "skyrl/tinker/requests/futures.py",
                "2 * self._max_bytes:\n                return None\n",
                "2 * self._max_bytes:\n                return next(iter(next(iter(self._finished.values()))))\n",
            )
        ],
        ["tests/tinker/test_futures.py::test_large_answers_of_a_tenant_drop_only_its_own"],
    ),
]
