"""Allocation of slots for recurrent states, for models that have such states in addition to cache pages."""

from skyrl.backends.common.page_table import SCRATCH, Slots
from skyrl.backends.common.sampling.sequences import Job


class StateSlots(Slots):
    """Slots of the recurrent states of prompts and sequences.

    A prompt has a slot during prefill. Its last sample takes over this slot; the other samples start with a copy in
    another slot. The slot of the first copy is reserved together with the prompt's slot, so that a started request can
    continue. If the model has no states, no slots are needed, and all use the scratch slot.

    Args:
        state_bytes: Size of one state; 0: the model has none.
        max_rows: Maximum sequences decoded at once.
        cache_bytes: Size of the whole cache; states use at most half of it.
    """

    def __init__(self, state_bytes: int, max_rows: int, cache_bytes: int):
        useful = 2 * max_rows + 1  # one per row, and as many again for prompts
        super().__init__(max(3, min(useful, cache_bytes // 2 // state_bytes)) if state_bytes else 1)
        self._state_bytes = state_bytes

    @property
    def nbytes(self) -> int:
        """Memory of all slots."""
        return self.count * self._state_bytes

    def to_begin(self, job: Job) -> int:
        """Number of slots for a prompt and its first sample."""
        return min(2, job.request.num_samples) if self._state_bytes else 0

    def to_go_on(self, job: Job, number: int) -> int:
        """Number of slots for the next sample of a started prompt, after `number` samples have started."""
        return int(0 < number < job.request.num_samples - 1) if self._state_bytes else 0

    def of_prompt(self) -> int:
        """Return the slot for a prompt that starts."""
        return self.take() if self._state_bytes else SCRATCH

    def of_sample(self, job: Job, number: int, prompt: int) -> int:
        """Return the slot for a sample: the prompt's slot, or a new slot for a copy of it."""
        return prompt if not self._state_bytes or number == job.request.num_samples - 1 else self.take()

    def give_back(self, slot: int) -> None:
        """Free a slot. The scratch slot is never allocated, so it is ignored."""
        if slot != SCRATCH:
            super().give_back(slot)

    def unreserve_copy(self, job: Job) -> None:
        """Release the reservation for copies of a prompt's state. No sample of the prompt may have started."""
        self.unreserve(max(0, self.to_begin(job) - 1))
