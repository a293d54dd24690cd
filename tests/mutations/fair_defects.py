"""Defects of who is sampled next, as in `defects.py`."""

from defects import Defect, Edit

LINE = "skyrl/backends/executor/fair_queue.py"
SAMPLER = "skyrl/backends/common/sampling/sampler.py"
WINDOW = "skyrl/tinker/engine/sample_window.py"
TESTS = "tests/backends/test_fair_queue.py::"
BATCHING = "tests/backends/test_sampler_batching.py::"

FAIR_DEFECTS = [
    Defect(
        "F19.1",
        "a prompt costs its tenant nothing",
        [Edit(LINE, "        self.charge(tenant, self._lines[tenant][request_id].cost)\n", "")],
        [TESTS + "test_tenants_that_wait_are_given_tokens_by_their_weights_up_to_one_sample_of_each"],
    ),
    Defect(
        "F19.2",
        "what is generated for a tenant that waits for nothing else is not charged",
        [
            Edit(
                "skyrl/utils/fairness.py",
                "        if not self._waiting:\n            return\n",
                "        if tenant not in self._waiting:\n            return\n",
            )
        ],
        [TESTS + "test_a_tenant_that_asks_one_by_one_is_charged_for_what_runs_while_others_wait"],
    ),
    Defect(
        "F19.3",
        "a tenant whose requests have many samples keeps others from beginning",
        [
            Edit(
                SAMPLER,
                "return self._places > 0 or (self._unstarted < self._max_rows and",
                "return self._places > 0 or (False and",
            )
        ],
        [BATCHING + "test_rows_are_shared_between_tenants_and_a_tenants_first_request_always_begins"],
    ),
    Defect(
        "F19.4",
        "a prompt that is in the cache is charged as if it had been read",
        [Edit(SAMPLER, "self._waiting.charge(prompt.job.request.tenant, -prompt.job.cache_hits)", "pass")],
        [BATCHING + "test_a_prompt_that_is_in_the_cache_costs_its_tenant_nothing"],
    ),
    Defect(
        "F19.5",
        "a flood of samples is all handed to the backend",
        [Edit(WINDOW, "not tenant.waiting or tenant.used >= self._tokens", "not tenant.waiting")],
        [
            "tests/tinker/test_scheduler.py::test_of_a_tenants_flood_no_more_goes_than_its_window_and_the_rest_as_that_ends"
        ],
    ),
]
