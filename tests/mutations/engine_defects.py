"""Defects of sampling engines, as in `defects.py`: samples of other weights than those that they were asked of."""

from defects import Defect, Edit

ENGINES = "skyrl/backends/engines/"
FLEET = "tests/backends/engines/test_fleet.py::"
BACKEND = "tests/backends/engines/test_backend_with_engines.py::"

ROUTER = "tests/backends/engines/test_router.py::"
CONTINUATION = "tests/backends/engines/test_continuation.py::"

COLOCATED = "tests/backends/engines/test_colocated_engines.py::"
WHOLE = "tests/backends/engines/test_whole_models.py::"

ENGINE_DEFECTS = [
    Defect(
        "EN1",
        "nobody looks at the stamps of an engine's answers",
        [
            Edit(
                ENGINES + "delivery.py",
                "        if (origin.version, origin.base) != asked:\n",
                "        if False:\n",
            )
        ],
        [
            FLEET + "test_an_engine_that_draws_with_the_weights_of_others_is_left",
            FLEET + "test_an_engine_whose_base_was_replaced_is_left_until_it_is_proved_again",
        ],
    ),
    Defect(
        "EN2",
        "versions on engines are not compared with ours",
        [Edit(ENGINES + "sync_check.py", "        if not difference <= bound:\n", "        if False:\n")],
        [BACKEND + "test_a_version_that_an_engine_has_wrong_is_found_before_it_is_sampled"],
    ),
    Defect(
        "EN3",
        "a trainer trains on samples of other weights",
        [
            Edit(
                "skyrl/train/policies/on_backend.py",
                "            if (origin.version, origin.base) != asked:\n",
                "            if False:\n",
            )
        ],
        ["tests/train/test_sample_stamps.py::test_a_sample_of_other_weights_ends_the_run_with_both_named"],
    ),
    Defect(
        "EN4",
        "samples are stamped with what was asked for first, not with what is in the slot",
        [
            Edit(
                "skyrl/backends/common/versions.py",
                "return None if slot == BASE_SLOT else self._slots[slot].published",
                "return None if slot == BASE_SLOT else next(iter(self._slots.values())).published",
            )
        ],
        [
            "tests/conformance/test_versions.py::test_samples_are_stamped_with_the_version_and_the_base_that_they_were_drawn_from"
        ],
    ),
    Defect(
        "EN5",
        "each adapter has the path and the name of the first",
        [
            Edit(
                ENGINES + "adapter_folder.py",
                "name = PREFIX + written.digest[:DIGITS]",
                'name = PREFIX + "0" * DIGITS',
            )
        ],
        [FLEET + "test_forty_versions_share_four_slots"],
    ),
    Defect(
        "EN6",
        "an adapter is unloaded while it is sampled",
        [Edit(ENGINES + "router.py", 'if held.state == "loaded" and not held.running)', 'if held.state == "loaded")')],
        [ROUTER + "test_an_adapter_that_is_sampled_is_never_unloaded"],
    ),
    Defect(
        "EN7",
        "a version that was unloaded counts as compared when it comes back",
        [
            Edit(
                ENGINES + "sync_check.py",
                "if key[0] == engine and adapter in (None, key[1])]:",
                "if key[0] == engine and adapter is None]:",
            )
        ],
        [FLEET + "test_a_version_that_comes_back_is_compared_again"],
    ),
    Defect(
        "EN8",
        "all samples of a request are drawn with one seed",
        [Edit(ENGINES + "requests.py", "seed=_seed(self.job.seed, index),", "seed=_seed(self.job.seed, 0),")],
        [BACKEND + "test_what_is_drawn_depends_on_seed_and_number_alone"],
    ),
    Defect(
        "EN9",
        "tenants share cached prefixes on engines",
        [
            Edit(
                ENGINES + "requests.py",
                "salt=blake2b(request.tenant.encode(), digest_size=16).hexdigest(),",
                'salt="all",',
            )
        ],
        ["tests/backends/engines/test_sync_check.py::test_requests_of_two_tenants_share_no_salt"],
    ),
    Defect(
        "EN10",
        "samples of a lost engine are forgotten",
        [Edit(ENGINES + "router.py", "            self._again.appendleft(ticket)\n", "")],
        [ROUTER + "test_samples_of_a_lost_engine_go_before_all_others"],
    ),
    Defect(
        "EN11",
        "the rest of a sample is drawn with the random numbers of its beginning",
        [
            Edit(
                ENGINES + "continuation.py",
                "seed=draw.seed if keeps_seed else _seed(draw.seed, count),",
                "seed=draw.seed,",
            )
        ],
        [CONTINUATION + "test_samples_that_were_interrupted_have_the_models_distribution"],
    ),
    Defect(
        "EN12",
        "what a lost engine has delivered is drawn again",
        [Edit(ENGINES + "delivery.py", "    if not pieces or not can_go_on(ticket.draw):\n", "    if True:\n")],
        [CONTINUATION + "test_what_was_delivered_before_a_kill_is_kept_and_nothing_is_drawn_twice"],
    ),
    Defect(
        "EN13",
        "generated tokens that another engine is given as a prompt cost no penalty",
        [
            Edit(
                ENGINES + "continuation.py",
                "return not (draw.options.presence_penalty or draw.options.frequency_penalty)",
                "return True",
            )
        ],
        [CONTINUATION + "test_a_sample_that_pays_for_what_it_has_generated_begins_anew"],
    ),
    Defect(
        "EN14",
        "what a killed driver had half written stays",
        [Edit(ENGINES + "adapter_folder.py", "            remove_folder(left)\n", "            pass\n")],
        [
            "tests/backends/engines/test_interrupted_sync.py::"
            "test_a_sync_that_is_killed_leaves_neither_parts_nor_wrong_weights[publish: adapter written, not in place]"
        ],
    ),
    Defect(
        "EN18",
        "samples that run as engines fall asleep begin anew",
        [
            Edit(
                ENGINES + "fleet.py",
                "            keep(ticket, name, self.engines[name])\n            self.router.again(ticket)\n",
                "            self.router.again(ticket)\n",
            )
        ],
        [COLOCATED + "test_samples_that_run_as_devices_change_hands_keep_their_tokens"],
    ),
    Defect(
        "EN19",
        "versions are not compared again after a sleep",
        [
            Edit(
                ENGINES + "fleet.py",
                "                self._checks.forget(name, woken=True)\n",
                "                pass\n",
            )
        ],
        [COLOCATED + "test_versions_and_the_base_model_are_compared_again_after_a_sleep"],
    ),
    Defect(
        "EN20",
        "engines that hang are waited for",
        [Edit(ENGINES + "launcher/hangs.py", "                self._launcher.replace(engine.name)\n", "")],
        ["tests/backends/engines/test_started_engines.py::test_an_engine_that_hangs_is_replaced"],
    ),
    Defect(
        "EN21",
        "a lost worker counts as an error of the prompts that it was to read, one by one",
        [
            Edit(
                "skyrl/backends/common/sampling/prefill.py",
                "    except BackendLost:  # not caused by a prompt\n        raise\n",
                "",
            )
        ],
        ["tests/backends/test_sampler_batching.py::test_a_lost_backend_is_no_error_of_requests"],
    ),
    Defect(
        "EN16",
        "an engine that was started again is taken for one that has a whole model's version",
        [
            Edit(
                ENGINES + "reserved.py",
                "(told := await self.base_version()) != self._engine.base_id:\n",
                "(told := None) is not None:\n",
            ),
            Edit(
                ENGINES + "http_engine.py",
                "        if fingerprint is not None and self._fingerprint not in (None, fingerprint):\n",
                "        if False:\n",
            ),
        ],
        [WHOLE + "test_an_engine_that_was_started_again_is_given_the_version_again"],
    ),
    Defect(
        "EN17",
        "an engine's weights of a killed driver are taken for the base model's",
        [Edit(ENGINES + "admission.py", '("", self._info.base_id):', '("", self._info.base_id, "unfinished"):')],
        [WHOLE + "test_an_engine_with_weights_of_a_driver_that_was_killed_gets_the_base_models[unfinished]"],
    ),
    Defect(
        "EN15",
        "engines are admitted though they ignore adapters",
        [
            Edit(
                ENGINES + "admission.py",
                "            if difference <= self._options.logprob_bound:\n",
                "            if True:\n",
            )
        ],
        [BACKEND + "test_adapters_that_an_engine_lacks_are_sampled_here[ignored]"],
    ),
    Defect(
        "EN22",
        "a sample is not tried elsewhere although one engine rejects it",
        [Edit(ENGINES + "router.py", "self.name not in ticket.refused and ticket", "not ticket.refused and ticket")],
        [FLEET + "test_a_request_that_an_engine_does_not_take_is_drawn_by_another"],
    ),
    Defect(
        "EN23",
        "turns of a conversation go to engines without their prefix",
        [
            Edit(
                ENGINES + "router.py",
                "(recent := self._recent.engine(ticket.begin)) in self._places:",
                "(recent := None) in self._places:",
            )
        ],
        [ROUTER + "test_turns_of_a_conversation_go_to_one_engine_and_conversations_to_all"],
    ),
    Defect(
        "EN24",
        "an engine whose port is taken is started on the same port again",
        [
            Edit(
                ENGINES + "launcher/launcher.py",
                "engine.port, engine.key = _free_port(), ",
                "engine.port, engine.key = engine.port or _free_port(), ",
            )
        ],
        [
            "tests/backends/engines/test_started_engines.py"
            "::test_an_engine_that_finds_its_port_taken_gets_another_at_its_next_start"
        ],
    ),
]
