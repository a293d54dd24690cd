"""Defects of the contract between the executor and its backends, as in `defects.py`."""

from defects import Defect, Edit

CHECK = "skyrl/backends/executor/sampling_options.py"
DECODE = "skyrl/backends/common/sampling/decode.py"
EXECUTOR = "skyrl/backends/executor/executor.py"
PHASES = "skyrl/backends/executor/phases.py"
TURNS = "tests/backends/test_phases.py::"
PROGRAMS = "skyrl/backends/jax/sampling/programs.py"
REST = "tests/backends/test_rest.py::"
SAMPLING = "skyrl/tx/sampling.py"
SEQUENCES = "skyrl/backends/common/sampling/sequences.py"
SAMPLES = "tests/conformance/test_samples.py::"
VERSIONS = "skyrl/backends/common/versions.py"
LORA = "skyrl/backends/torch/base_model/lora.py"
ADAPTERS = "tests/conformance/test_adapters.py::"
KIT_VERSIONS = "tests/conformance/test_versions.py::"
ISOLATION = "tests/conformance/test_isolation.py::"
OPTIONS = "tests/backends/test_sampler_options.py::"

CONTRACT_DEFECTS = [
    Defect(
        "K1.1",
        "a sampling option that the backend does not serve is left out without a word",
        [Edit(CHECK, "if name not in facts.sampling_options:", "if False:")],
        [SAMPLES + "test_a_sampling_option_is_served_or_refused_by_its_name[fake-min_p]"],
    ),
    Defect(
        "K1.2",
        "min_p is compared with the probability rather than with the likeliest token's",
        [Edit(SAMPLING, "jnp.exp(tempered) >= min_p[:, None]", "jax.nn.softmax(tempered) >= min_p[:, None]")],
        ["tests/tx/test_sampling.py::test_min_p_keeps_the_tokens_that_transformers_keeps[0.02]"],
    ),
    Defect(
        "K1.3",
        "after a stop token of -1, which is none, the last token of the vocabulary is never drawn",
        [Edit(SAMPLING, "(tokens >= 0) & where[:, None], tokens, vocab", "where[:, None], tokens, vocab")],
        ["tests/tx/test_sampling.py::test_tokens_are_left_out_as_by_transformers_until_there_are_enough[0]"],
    ),
    Defect(
        "K1.4",
        "min_tokens counts the tokens of each decode call rather than of the sequence",
        [
            Edit(
                PROGRAMS,
                "_drawn(logits, numbers, rows, rows.steps + done, occurred)",
                "_drawn(logits, numbers, rows, rows.steps, occurred)",
            )
        ],
        [OPTIONS + "test_stop_tokens_are_not_drawn_before_min_tokens_and_then_stop"],
    ),
    Defect(
        "K1.5",
        "a request's options are lost where its neighbours in a decode call have none",
        [Edit(DECODE, "return [by_kind[kind] for kind in sorted(by_kind)]", "return [sequences]")],
        [OPTIONS + "test_options_hold_beside_a_request_that_has_none"],
    ),
    Defect(
        "K1.6",
        "a stop string ends a sequence that has fewer than min_tokens tokens",
        [Edit(SEQUENCES, '"stop" if may_stop and (', '"stop" if (')],
        [OPTIONS + "test_a_stop_string_counts_only_after_min_tokens"],
    ),
    Defect(
        "K1.7",
        "tokens that were generated in earlier decode calls are not penalised",
        [Edit(DECODE, "prompt : prompt + len(sequence.tokens)] = sequence.tokens", "prompt:prompt] = []")],
        [OPTIONS + "test_tokens_pay_for_having_been_there_before_and_logprobs_do_not_tell[penalties1]"],
    ),
    Defect(
        "K1.8",
        "what is computed again for the backward pass of an adapter with dropout is dropped anew",
        [
            Edit(
                "skyrl/backends/torch/base_model/lora.py",
                "generator = torch.Generator(x.device).manual_seed(seed)",
                "generator = None",
            )
        ],
        ["tests/backends/test_lora_dropout.py::test_masks_are_of_the_seed_the_step_and_the_data[torch]"],
    ),
    Defect(
        "K2.1",
        "a model that stands in line for the device is not told of when another one has left it",
        [Edit("skyrl/backends/common/offload.py", "            self._notify()\n", "")],
        [REST + "test_a_pass_of_a_model_that_stands_in_line_for_the_device"],
    ),
    Defect(
        "K2.2",
        "a version that waits until fewer are read is not read when one of these is dropped",
        [Edit(VERSIONS, "is not None:  # so that another read may start", "is None:")],
        [REST + "test_a_sample_that_waits_for_a_reading_goes_on_when_another_one_is_not_wanted_any_more"],
    ),
    Defect(
        "K2.3",
        "a publication that waits for the disk is not told of when something was written",
        [
            Edit(
                "skyrl/backends/common/background_writer.py",
                "                    del self._last[line]\n        self._changed()\n",
                "                    del self._last[line]\n",
            )
        ],
        [REST + "test_a_publication_that_waits_until_others_are_written"],
    ),
    Defect(
        "K2.4",
        "the sampler is busy while all that wait do so for versions that are being read",
        [Edit("skyrl/backends/common/sampling/sampler.py", "self._looked != self._versions.changes", "True")],
        [REST + "test_samples_whose_versions_are_being_read"],
    ),
    Defect(
        "K2.5",
        "a sampler that waits for a slot is not told when another one lets go of it",
        [
            Edit(
                "skyrl/backends/common/versions.py",
                "            self.changes += not self._slots[slot].pins\n",
                "",
            )
        ],
        ["tests/backends/test_torch_rank_samplers.py::test_requests_begin_when_another_rank_has_let_go_of_slots"],
    ),
    Defect(
        "K4.1",
        "devices change hands while a dispatch is under way",
        [Edit(PHASES, "return self.is_over(demand) and not demand.in_flight", "return self.is_over(demand)")],
        [TURNS + "test_devices_change_hands_when_what_is_in_flight_has_ended_and_until_then_the_driver_rests"],
    ),
    Defect(
        "K4.2",
        "who has the devices keeps them as long as there is something to do",
        [Edit(PHASES, "(not demand.of(self._phase) or self._left <= 0)", "not demand.of(self._phase)")],
        [TURNS + "test_neither_starves_and_devices_change_hands_no_more_often_than_by_the_quantum"],
    ),
    Defect(
        "K4.3",
        "training begins before the sampler has said that it draws nothing more",
        [Edit(PHASES, "                    self._called = called\n", "")],
        [TURNS + "test_a_hook_may_take_its_time_and_nothing_happens_meanwhile"],
    ),
    Defect(
        "K4.4",
        "a backend of which nothing is shared takes turns",
        [Edit(EXECUTOR, "Phases(self) if self.info().colocated else None", "Phases(self)")],
        [TURNS + "test_a_backend_that_shares_nothing_has_no_phases"],
    ),
    Defect(
        "K6.1",
        "adapters are trained without their scaling",
        [Edit(LORA, "inner, b, alpha=self._scaling)", "inner, b, alpha=1.0)")],
        ["tests/conformance/test_gradients.py::test_the_gradient_of_a_loss[torch-untied-cross_entropy-attn]"],
    ),
    Defect(
        "K6.2",
        "one kind of module is sampled without its adapter",
        [Edit(LORA, "append((a, b) if finite", "append((a, b * (not module.endswith('o_proj'))) if finite")],
        [ADAPTERS + "test_samples_have_the_log_probabilities_of_peft[torch-untied-attn]"],
    ),
    Defect(
        "K6.3",
        "rows of a version that is not finite reach others in a decode call",
        [Edit(LORA, "finite = all(bool(x.isfinite().all()) for x in tensors.values())", "finite = True")],
        [ISOLATION + "test_a_version_is_sampled_and_scored_beside_one_of_nan_as_alone[torch-untied-17]"],
    ),
    Defect(
        "K6.4",
        "weights decay by the decay alone, whatever the learning rate",
        [
            Edit(
                "skyrl/backends/common/adamw.py",
                "1.0 - params.learning_rate * params.weight_decay",
                "1.0 - params.weight_decay",
            )
        ],
        ["tests/conformance/test_optimizer_steps.py::test_three_steps_are_those_of_torch[torch-untied-betas]"],
    ),
    Defect(
        "K6.5",
        "weights that are published under a name that is there are those of before",
        [
            Edit(
                VERSIONS,
                "            self.drop(version)\n            self._keep(version, adapter)\n",
                "            if version not in self._resident:\n                self._keep(version, adapter)\n",
            )
        ],
        [KIT_VERSIONS + "test_samples_that_wait_are_drawn_from_the_version_that_they_asked_for[torch-published-again]"],
    ),
    Defect(
        "K6.6",
        "a number that is the border between two tokens draws the first, which a filter may have left out",
        [Edit("skyrl/backends/torch/sampling/drawing.py", "target, right=True)", "target)")],
        ["tests/backends/test_draws.py::test_tokens_are_those_that_are_written_down[torch]"],
    ),
    Defect(
        "K6.7",
        "the rest of a page, which may hold NaN of its last owner, is read under a mask",
        [
            Edit(
                "skyrl/backends/torch/base_model/attention.py",
                "torch.where(context <= positions.amax(1, keepdim=True), cells, cells[:, :1])",
                "cells",
            )
        ],
        [ISOLATION + "test_a_version_is_sampled_and_scored_beside_one_of_nan_as_alone[torch-untied-17]"],
    ),
]
