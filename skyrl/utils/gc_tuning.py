"""Tuning of Python's garbage collector for training loops."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (20_000, 2, 2)
"""Arguments of `gc.set_threshold`.

A step with a thousand trajectories creates about 100,000 containers that live for a while. With Python's default
threshold of 700, the collector searches for cycles so often that the search can take longer than the creation of the
containers.
"""


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """Context with rare garbage collections, which skip objects that existed at the start of the context.

    After its imports, a program has hundreds of thousands of permanent objects, which each full collection would
    traverse. Cycles created in the context are still collected.
    """
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not frozen:  # otherwise objects frozen by the caller would be unfrozen too
            gc.unfreeze()
