"""Parts of a sample that an engine is asked for, and those that it delivered before it was lost."""

import contextlib

from skyrl.backends.engines.continuation import can_go_on, rest, together
from skyrl.backends.engines.needs import BY_PLACE
from skyrl.backends.engines.protocol import Admitted, Draw, Drawn, EngineDown
from skyrl.backends.engines.router import Ticket


def rest_of(ticket: Ticket, admitted: Admitted) -> Draw:
    """Request to an engine for what is left of a sample."""
    ticket.pieces.clear()
    by_place = BY_PLACE in admitted.features
    if ticket.delivered is None:
        ticket.by_place = by_place
        return ticket.draw
    ticket.by_place = ticket.by_place and by_place
    return rest(ticket.draw, ticket.delivered, ticket.by_place)


def keep(ticket: Ticket, name: str, admitted: Admitted) -> None:
    """Keep what an engine has sent of a sample that it does not end."""
    pieces, ticket.pieces = ticket.pieces, []
    if not pieces or not can_go_on(ticket.draw):
        return
    sent = together(pieces)
    with contextlib.suppress(EngineDown):  # of other weights
        check_stamp(sent, ticket, name, admitted)
        ticket.delivered = together([ticket.delivered, sent] if ticket.delivered else [sent])


def check_stamp(drawn: Drawn, ticket: Ticket, name: str, admitted: Admitted) -> None:
    """Raise `EngineDown` if a sample is of other weights than those that it was asked of."""
    asked = ticket.adapter, admitted.base
    for origin in drawn.origins:
        if (origin.version, origin.base) != asked:
            raise EngineDown(
                f"{name} has drawn a sample from adapter={origin.version} on base={origin.base}, not from "
                f"adapter={asked[0]} on base={asked[1]}; it is not used until it is proved again"
            )
