"""A backend whose passes take the time of a device and none of the processor: `time.sleep`.

What a server with it loses of its training rate is lost on the way to the device, not to neighbours on the processor.
"""

import time

import numpy as np

from skyrl.backends.executor import Work
from skyrl.backends.operations import ForwardBackward
from skyrl.types import ForwardBackwardOutput
from tests.fakes import FakeBackend

PASS_S = 0.05


class SlowDevice(FakeBackend):
    """The backend of the tests, but a pass sleeps, and its outputs are zeros."""

    def _forward_backward(self, operation: ForwardBackward) -> Work:
        yield
        time.sleep(PASS_S)
        outputs = [
            {name: np.zeros(len(datum.tokens), np.float32) for name in ("logprobs", "elementwise_loss")}
            for datum in operation.data
        ]
        return ForwardBackwardOutput(outputs, {"loss:sum": 0.0})
