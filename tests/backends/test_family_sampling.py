"""Samples of each family that share their prompt's pages, and prompts whose pages were given to others meanwhile."""

import jax
import numpy as np
import pytest
from test_families import Case

from tests.backends.sampling_rig import Rig, output, prompt_of
from tests.tx.family_models import CONFIGS
from tests.tx.tiny_models import hidden

PROMPT = [token % 318 for token in prompt_of(150)]
"""Two full pages, and a part of one that its samples do not share."""
OTHERS = [[token % 318 for token in prompt_of(330, seed)] for seed in (1, 2)]
"""Each takes 6 of the 8 pages that there are."""
NEW = 7


@pytest.mark.full
@pytest.mark.gate("Qwen3MoeForCausalLM")
@pytest.mark.parametrize("architecture", sorted(CONFIGS))
def test_forks_of_a_prompt_and_its_return_after_eviction_have_the_log_probabilities_of_training(architecture, tmp_path):
    case = Case(architecture, tmp_path / "model")
    rig = Rig(case.folder)
    rig.versions.publish("trained", case.adapter())
    states = bool(rig.sampler._runner.state_bytes)  # prompts with states are not kept
    sampler = rig.sampler if states else rig.make_sampler(cache_bytes=rig.sampler._runner.token_bytes * 64 * 9)

    def sampled():
        return output(sampler, PROMPT, "trained", n=3, max_tokens=NEW, seed=4)

    first, kept = sampled(), sampled()
    for other in OTHERS:
        output(sampler, other, "trained", max_tokens=NEW)
    again = sampled()
    hits = [result.prompt_cache_hit_tokens for result in (first, kept, again)]
    assert hits == ([0, 0, 0] if states else [0, 149, 0])
    rows = np.asarray([[*PROMPT, *sample.tokens] for sample in first.sequences], np.int32)
    assert len({tuple(row) for row in rows.tolist()}) == 3
    found = hidden(case.ours(), rows, adapter=case.adapter())
    scores = jax.nn.log_softmax(case.ours().compute_logits(found, case.adapter()))[:, len(PROMPT) - 1 : -1]
    expected = np.take_along_axis(np.asarray(scores), rows[:, len(PROMPT) :, None], -1)[..., 0]
    for result in (first, kept, again):
        for number, sample in enumerate(result.sequences):
            np.testing.assert_array_equal(sample.tokens, rows[number, len(PROMPT) :])
            np.testing.assert_allclose(sample.logprobs, expected[number], atol=1e-4)
