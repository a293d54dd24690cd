"""The executor: schedules operations and samples of many models on a backend that only computes.

`executor` is the base class, `work_queue` dispatches the quanta (units of work) of operations, `fair_scheduler` decides
which model is next, and `fair_queue` which sample starts next. `phases` alternates training and sampling on shared
devices, and `sampling_options` checks the options of a sample.
"""

from skyrl.backends.executor.executor import Executor, IncompleteGradients, SamplerLoop, failure
from skyrl.backends.executor.fair_queue import FairQueue
from skyrl.backends.executor.work_queue import Quantum, Work

__all__ = ["Executor", "FairQueue", "IncompleteGradients", "Quantum", "SamplerLoop", "Work", "failure"]
