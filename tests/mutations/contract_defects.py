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
        [Edit(VERSIONS, "is not None:  # so that another may be read", "is None:")],
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
        [Edit("skyrl/backends/common/sampling/sampler.py", "self._looked != self._versions.reads_ended", "True")],
        [REST + "test_samples_whose_versions_are_being_read"],
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
]
