"""The executor: schedules operations and samples of many models on a backend that only computes.

`executor` is the base class, `work_queue` dispatches the quanta of operations, `fair_scheduler` orders the turns of
models, and `fair_queue` the start of samples. `phases` alternates training and sampling on shared devices, and
`sampling_options` checks the options of a sample.
"""

from skyrl.backends.executor.executor import Executor, IncompleteGradients, SamplerLoop, failure
from skyrl.backends.executor.fair_queue import FairQueue
from skyrl.backends.executor.work_queue import Quantum, Work

__all__ = ["Executor", "FairQueue", "IncompleteGradients", "Quantum", "SamplerLoop", "Work", "failure"]
