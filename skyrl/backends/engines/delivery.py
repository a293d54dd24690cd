"""Continuation of a sample after its engine was lost: the tokens received so far, and the request for the rest."""

import contextlib

from skyrl.backends.engines.continuation import can_go_on, rest, together
from skyrl.backends.engines.needs import BY_PLACE
from skyrl.backends.engines.protocol import Admitted, Draw, Drawn, EngineDown
from skyrl.backends.engines.router import Ticket


def rest_of(ticket: Ticket, admitted: Admitted) -> Draw:
    """Request to an engine for the rest of a sample."""
    ticket.pieces.clear()
    by_place = BY_PLACE in admitted.features
    if ticket.delivered is None:
        ticket.by_place = by_place
        return ticket.draw
    ticket.by_place = ticket.by_place and by_place
    return rest(ticket.draw, ticket.delivered, ticket.by_place)


def keep(ticket: Ticket, name: str, admitted: Admitted) -> None:
    """Keep the tokens received for a sample that the engine will not complete."""
    pieces, ticket.pieces = ticket.pieces, []
    if not pieces or not can_go_on(ticket.draw):
        return
    sent = together(pieces)
    with contextlib.suppress(EngineDown):  # tokens from other weights are dropped
        check_stamp(sent, ticket, name, admitted)
        ticket.delivered = together([ticket.delivered, sent] if ticket.delivered else [sent])


def check_stamp(drawn: Drawn, ticket: Ticket, name: str, admitted: Admitted) -> None:
    """Raise `EngineDown` if a sample was drawn from other weights than requested."""
    asked = ticket.adapter, admitted.base
    for origin in drawn.origins:
        if (origin.version, origin.base) != asked:
            raise EngineDown(
                f"{name} has drawn a sample from adapter={origin.version} on base={origin.base}, not from "
                f"adapter={asked[0]} on base={asked[1]}; it is not used until it is proved again"
            )
