"""The executor: many models' operations and samples by turns, on a backend that only computes.

`executor` is the base class, `work_queue` dispatches what operations want computed, `fair_turns` says whose turn it is,
`fair_line` which sample begins next.
"""

from skyrl.backends.common.waiting import Waiting
from skyrl.backends.executor.executor import LOOK_S, Executor, SamplerLoop, failure
from skyrl.backends.executor.fair_line import FairLine
from skyrl.backends.executor.work_queue import Quantum, Work

__all__ = ["LOOK_S", "Executor", "FairLine", "Quantum", "SamplerLoop", "Waiting", "Work", "failure"]
