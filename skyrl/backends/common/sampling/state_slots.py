"""Slots of the cache's states and their owners, for models that remember earlier tokens by such beside pages."""

from skyrl.backends.common.page_table import SCRATCH, Slots
from skyrl.backends.common.sampling.sequences import Job


class StateSlots(Slots):
    """Slots of the states of prompts and sequences.

    A prompt has one while it is read. Its last sample takes that over, those before begin with a copy. The first copy
    is reserved with the prompt's own, so that a request that has begun can go on. Where the model has no states nobody
    needs one, and everyone's is the scratch one.

    Args:
        state_bytes: Of one state; 0: the model has none.
        max_rows: Sequences decoded at once.
        cache_bytes: Of the whole cache, of which states take half at most.
    """

    def __init__(self, state_bytes: int, max_rows: int, cache_bytes: int):
        useful = 2 * max_rows + 1  # as many again as there are rows, for prompts
        super().__init__(max(3, min(useful, cache_bytes // 2 // state_bytes)) if state_bytes else 1)
        self._state_bytes = state_bytes

    @property
    def nbytes(self) -> int:
        """Memory of all of them."""
        return self.count * self._state_bytes

    def to_begin(self, job: Job) -> int:
        """Slots that a prompt and its first sample take."""
        return min(2, job.request.num_samples) if self._state_bytes else 0

    def to_go_on(self, job: Job, number: int) -> int:
        """Slots that a sample of a prompt that has begun takes; `number` of them have started before."""
        return int(0 < number < job.request.num_samples - 1) if self._state_bytes else 0

    def of_prompt(self) -> int:
        """The slot of a prompt that begins."""
        return self.take() if self._state_bytes else SCRATCH

    def of_sample(self, job: Job, number: int, prompt: int) -> int:
        """The slot of a sample: that of its prompt, or one to copy that to."""
        return prompt if not self._state_bytes or number == job.request.num_samples - 1 else self.take()

    def give_back(self, slot: int) -> None:
        """Free one that was taken. The scratch one is nobody's."""
        if slot != SCRATCH:
            super().give_back(slot)

    def unreserve_copy(self, job: Job) -> None:
        """Undo what was reserved with the slot of a prompt none of whose samples has started."""
        self.unreserve(max(0, self.to_begin(job) - 1))
