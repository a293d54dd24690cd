"""Tuning of Python's garbage collector while a program takes one step after another."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (20_000, 2, 2)
"""Thresholds in the form of `gc.set_threshold`. A step with a thousand trajectories makes about 100,000 containers that
stay for a while; looking for cycles among them after every 700 takes longer than making some of them."""


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """Collections are rare until the end, and leave out the objects that are here now.

    A program that has loaded its libraries holds hundreds of thousands of objects, which stay. Each full collection
    would go through all of them. Cycles that are made meanwhile are still found.
    """
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not frozen:  # else what the caller has frozen would be collected again too
            gc.unfreeze()
