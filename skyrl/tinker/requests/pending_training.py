"""Training requests without an outcome, as the API process knows them."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from skyrl.tinker.database.decisions import Decisions
from skyrl.tinker.database.ledger.charges import Charge
from skyrl.tinker.operations.admission import Accepted
from skyrl.tinker.operations.operation import QueuedOperation
from skyrl.utils.quota import Quota


@dataclass(eq=False)
class PendingRequest:
    """A training request without an outcome."""

    request_id: str
    tenant: str
    model_id: str
    seq_id: int | None
    """Position in the model's order; None: after all requests that arrived earlier."""
    operation: QueuedOperation
    bytes: int
    """Approximate size in memory."""
    sharer: str
    """Sharer whose quota the request counts against; see `Caller.sharer`."""
    accepted: Accepted | None = None
    """The accepted request. None: an earlier server accepted it, so its body has to be read from the log."""
    decided: Decisions = field(default_factory=Decisions)
    """See `Admission.decided`."""
    logged: bool = False
    sent: bool = False
    """True if the current engine has the request."""

    cancelled: Accepted | None = None
    """Refusal that replaces the request after an operator cancelled it. An engine that has started the request may
    finish it."""
    charge: Charge | None = None
    """Usage to charge when the request is done."""
    held: bool = False
    """True if the engine holds the request until an earlier request of its model arrives."""

    @property
    def work(self) -> Accepted | None:
        """Operation to send to an engine that does not have the request; None: the log has to be read first."""
        return self.cancelled or self.accepted

    @property
    def creates(self) -> bool:
        """True if the request creates its model."""
        return self.seq_id == 0


class Pending:
    """All pending training requests, by id and by model."""

    def __init__(self) -> None:
        self._by_id: dict[str, PendingRequest] = {}
        self._by_model: dict[str, dict[str, PendingRequest]] = {}
        self.quota = Quota("training requests of {} bytes")
        """Bytes of pending requests by sharer."""

    def __iter__(self) -> Iterator[PendingRequest]:
        return iter(list(self._by_id.values()))

    def add(self, owed: PendingRequest) -> None:
        self._by_id[owed.request_id] = owed
        self._by_model.setdefault(owed.model_id, {})[owed.request_id] = owed
        self.quota.add(owed.sharer, owed.bytes)

    def get(self, request_id: str) -> PendingRequest | None:
        return self._by_id.get(request_id)

    def pop(self, request_id: str) -> PendingRequest | None:
        """Remove and return a request; None if it is not pending."""
        owed = self._by_id.pop(request_id, None)
        if owed is not None:
            self.quota.remove(owed.sharer, owed.bytes)
            of_model = self._by_model[owed.model_id]
            del of_model[request_id]
            if not of_model:
                del self._by_model[owed.model_id]
        return owed

    def held(self, sharer: str, model_id: str | None = None) -> list[PendingRequest]:
        """Return the sharer's requests that the engine holds until an earlier request arrives. With `model_id`, only
        requests of this model."""
        some = self._by_id if model_id is None else self._by_model.get(model_id, {})
        return [owed for owed in some.values() if owed.held and owed.sharer == sharer]

    def logged_models(self) -> list[str]:
        """Models with at least one pending request in the log."""
        return [model for model, owed in self._by_model.items() if any(one.logged for one in owed.values())]

    def of_model(self, model_id: str) -> list[PendingRequest]:
        """Requests of a model by seq_id; requests without a seq_id come last."""
        of_model = self._by_model.get(model_id, {}).values()
        return sorted(of_model, key=lambda owed: (owed.seq_id is None, owed.seq_id or 0))
