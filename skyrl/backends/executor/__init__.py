"""The executor: many models' operations and samples by turns, on a backend that only computes.

`executor` is the base class, `work_queue` dispatches what operations want computed, `fair_scheduler` says whose turn it
is, `fair_queue` which sample begins next, `phases` who has the devices that training and sampling share, and
`sampling_options` which options a sample may have.
"""

from skyrl.backends.executor.executor import Executor, IncompleteGradients, SamplerLoop, failure
from skyrl.backends.executor.fair_queue import FairQueue
from skyrl.backends.executor.work_queue import Quantum, Work

__all__ = ["Executor", "FairQueue", "IncompleteGradients", "Quantum", "SamplerLoop", "Work", "failure"]
