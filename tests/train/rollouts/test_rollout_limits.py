import asyncio

import pytest
from scripted import Answer, Reply, ScriptedSampler, prompt, rollouts, run

from skyrl.train.rollouts.rollouts import RateLimiter

DONE = [Reply(done=True)]


def starts(limiter: RateLimiter, number: int, duration: float = 0.0, at: float = 0.0) -> list[float]:
    """Return the start of each of `number` calls that arrive together, in seconds."""

    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(at)
        began: dict[int, float] = {}

        async def one(i: int) -> None:
            async with limiter:
                began[i] = loop.time() - at
                await asyncio.sleep(duration)

        await asyncio.gather(*(one(i) for i in range(number)))
        return [began[i] for i in range(number)]

    return run(main())


def test_without_limits_all_begin_at_once():
    assert starts(RateLimiter(), 5, duration=1.0) == [0] * 5


def test_as_many_as_a_second_allows_begin_at_once_and_the_others_at_the_rate():
    assert starts(RateLimiter(per_second=2.0), 6) == pytest.approx([0, 0, 0.5, 1.0, 1.5, 2.0])


def test_a_long_pause_saves_no_more_than_a_second():
    limiter = RateLimiter(per_second=2.0)
    starts(limiter, 2)
    assert starts(limiter, 4, at=100.0) == pytest.approx([0, 0, 0.5, 1.0])


def test_no_more_than_the_limit_run_at_a_time():
    assert starts(RateLimiter(max_concurrent=2), 5, duration=1.0) == pytest.approx([0, 0, 1, 1, 2])


def test_the_rate_counts_before_the_places():
    assert starts(RateLimiter(per_second=1.0, max_concurrent=1), 3, duration=3.0) == pytest.approx([0, 3, 6])


def test_a_place_is_given_back_after_an_error():
    async def main() -> None:
        limiter = RateLimiter(max_concurrent=1)
        with pytest.raises(ValueError, match="boom"):
            async with limiter:
                raise ValueError("boom")
        async with asyncio.timeout(1), limiter:
            pass

    run(main())


def test_who_is_cancelled_while_waiting_leaves_its_turn_to_the_others():
    async def main() -> float:
        limiter = RateLimiter(per_second=1.0)
        async with limiter:
            pass
        impatient = asyncio.create_task(limiter.__aenter__())
        await asyncio.sleep(0)
        impatient.cancel()
        await asyncio.gather(impatient, return_exceptions=True)
        async with limiter:
            return asyncio.get_running_loop().time()

    assert run(main()) == pytest.approx(1.0)


def test_trajectories_run_within_the_limit(tokenizers):
    sampler = ScriptedSampler(tokenizers["chatml"], [Answer("One.<|im_end|>")])
    runs = rollouts(tokenizers["chatml"], sampler, n_samples_per_prompt=4, max_concurrent_trajectories=3)
    run(runs.collect([prompt(name=name, script=DONE) for name in "abc"]))
    assert sampler.most_running == 3


def test_trajectories_begin_at_the_rate(tokenizers):
    async def main() -> float:
        sampler = ScriptedSampler(tokenizers["chatml"], [Answer("One.<|im_end|>")])
        runs = rollouts(tokenizers["chatml"], sampler, n_samples_per_prompt=2, trajectories_per_second=2.0)
        await runs.collect([prompt(name=name, script=DONE) for name in "abc"])
        return asyncio.get_running_loop().time()

    assert run(main()) == pytest.approx(2.0)
