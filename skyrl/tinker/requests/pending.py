"""Training requests that are in the log and have no outcome yet, as the API process knows them."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from skyrl.tinker.database.decisions import Decisions
from skyrl.tinker.database.ledger.charges import Charge
from skyrl.tinker.operations.admission import Accepted
from skyrl.tinker.operations.operation import QueuedOperation
from skyrl.utils.quota import Quota


@dataclass(eq=False)
class PendingRequest:
    """A request whose end the engine owes us."""

    request_id: str
    tenant: str
    model_id: str
    seq_id: int | None
    """Place in the model's order; None: after all that came before it."""
    operation: QueuedOperation
    bytes: int
    """Bytes that it takes in memory, roughly."""
    sharer: str
    """Sharer whose part of the room it takes; see `Caller.sharer`."""
    accepted: Accepted | None = None
    """None: an earlier server took it in, and the log has to be read for what it is."""
    decided: Decisions = field(default_factory=Decisions)
    """See `Admission.decided`."""
    logged: bool = False
    sent: bool = False
    """True if the engine that runs now has it."""

    cancelled: Accepted | None = None
    """Refusal in its place, since an operator has cancelled it. An engine that has begun with it may finish it."""
    charge: Charge | None = None
    """Usage to charge, once it is done."""
    held: bool = False
    """True if the engine waits for an earlier one of its model."""

    @property
    def work(self) -> Accepted | None:
        """Work for an engine that does not have this request; None: it has to be read from the log."""
        return self.cancelled or self.accepted

    @property
    def creates(self) -> bool:
        """True if its model is made by it."""
        return self.seq_id == 0


class Pending:
    """All of them, by id and by model."""

    def __init__(self) -> None:
        self._by_id: dict[str, PendingRequest] = {}
        self._by_model: dict[str, dict[str, PendingRequest]] = {}
        self.quota = Quota("training requests of {} bytes")
        """Bytes that they take."""

    def __iter__(self) -> Iterator[PendingRequest]:
        return iter(list(self._by_id.values()))

    def add(self, owed: PendingRequest) -> None:
        self._by_id[owed.request_id] = owed
        self._by_model.setdefault(owed.model_id, {})[owed.request_id] = owed
        self.quota.add(owed.sharer, owed.bytes)

    def get(self, request_id: str) -> PendingRequest | None:
        return self._by_id.get(request_id)

    def pop(self, request_id: str) -> PendingRequest | None:
        """Remove and return one; None if it is not there (any more)."""
        owed = self._by_id.pop(request_id, None)
        if owed is not None:
            self.quota.remove(owed.sharer, owed.bytes)
            of_model = self._by_model[owed.model_id]
            del of_model[request_id]
            if not of_model:
                del self._by_model[owed.model_id]
        return owed

    def held(self, sharer: str, model_id: str | None = None) -> list[PendingRequest]:
        """A sender's requests that the engine holds for want of an earlier one: of a model, or of all."""
        some = self._by_id if model_id is None else self._by_model.get(model_id, {})
        return [owed for owed in some.values() if owed.held and owed.sharer == sharer]

    def logged_models(self) -> list[str]:
        """Models that are owed anything which is in the log."""
        return [model for model, owed in self._by_model.items() if any(one.logged for one in owed.values())]

    def of_model(self, model_id: str) -> list[PendingRequest]:
        """Requests of a model in its order, the ones without a place in it last."""
        of_model = self._by_model.get(model_id, {}).values()
        return sorted(of_model, key=lambda owed: (owed.seq_id is None, owed.seq_id or 0))
