"""A backend that computes nothing: the time of a server with it is spent on transport of bodies and results."""

import numpy as np

from skyrl.backends.executor import Work
from skyrl.backends.operations import ForwardBackward
from skyrl.types import ForwardBackwardOutput
from tests.fakes import FakeBackend


class IdleBackend(FakeBackend):
    """The backend of the tests, but with zeros as outputs of passes."""

    def _forward_backward(self, operation: ForwardBackward) -> Work:
        yield
        shapes = [datum.loss_fn_inputs["target_tokens"].shape for datum in operation.data]
        outputs = [
            {"logprobs": np.zeros(shape, np.float32), "elementwise_loss": np.zeros(shape[0], np.float32)}
            for shape in shapes
        ]
        return ForwardBackwardOutput(outputs, {"loss:sum": 0.0})
