"""A backend whose passes and samples take the time of a device, but no processor time: `time.sleep`.

So a loss in a server's training rate occurs on the way to the device, not by contention for the processor.
"""

import time
from functools import cache
from typing import Any

import numpy as np

from skyrl.backends.executor import Work
from skyrl.backends.operations import ForwardBackward, Sample
from skyrl.types import ForwardBackwardOutput, GeneratedSequence, SampleOutput
from tests.fakes import FakeBackend, FakeConfig, FakeSampler, table

BURST_S = 0.002
"""Seconds in which each running sample gets a token."""


class SlowConfig(FakeConfig):
    pass_s: float = 0.05
    """Seconds of a pass."""


class SlowDevice(FakeBackend):
    """The backend of the tests, but passes sleep and return zeros, and samples sleep and repeat a token."""

    def __init__(self, base_model: str, config: SlowConfig, *arguments: Any):
        self._pass_s = config.pass_s
        super().__init__(base_model, config, *arguments)
        self.sampler = SlowSampler(self)

    def _forward_backward(self, operation: ForwardBackward) -> Work:
        yield
        time.sleep(self._pass_s)
        outputs = [
            {name: np.zeros(len(datum.tokens), np.float32) for name in ("logprobs", "elementwise_loss")}
            for datum in operation.data
        ]
        return ForwardBackwardOutput(outputs, {"loss:sum": 0.0})


class SlowSampler(FakeSampler):
    """Samples of ones. Tables are created once, because a device fills them while the processor does other work."""

    def burst(self):
        time.sleep(BURST_S)
        return super().burst()

    def _advance(self, running: Any) -> None:
        for index, tokens in enumerate(running.sequences):
            tokens.append(1)
            if len(tokens) == running.request.params.max_tokens:
                running.finished.add(index)

    def _output(self, running: Any) -> SampleOutput:
        request: Sample = running.request
        sequences = [
            GeneratedSequence(np.ones(len(tokens), np.int32), np.full(len(tokens), -1.0, np.float32), "length")
            for tokens in running.sequences
        ]
        return SampleOutput(sequences, topk_prompt_logprobs=_table(len(request.prompt), request.topk_prompt_logprobs))


_table = cache(table)
