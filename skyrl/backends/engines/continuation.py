"""Resuming a sample on another engine, from the tokens delivered before its engine was lost.

The remaining tokens are sampled with prompt and delivered tokens as the prompt, so their distribution is the same. The
tokens are the same too if engines derive each token's randomness from seed and position alone. Otherwise the rest gets
a new seed, because random numbers must not be used twice.
"""

import contextlib
import dataclasses
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from skyrl.backends.engines.needs import BY_PLACE
from skyrl.backends.engines.protocol import Admitted, Draw, Drawn, EngineDown
from skyrl.backends.engines.router import Ticket
from skyrl.types import Origin


def together(pieces: Sequence[Drawn]) -> Drawn:
    """Concatenate consecutive pieces, at least one, into one sample."""
    first, last = pieces[0], pieces[-1]
    if len(pieces) == 1:
        return first
    origins: list[Origin] = []
    begin = 0
    for piece in pieces:
        for origin in piece.origins:
            if not origins or dataclasses.replace(origin, first=origins[-1].first) != origins[-1]:
                origins.append(dataclasses.replace(origin, first=begin + origin.first))
        begin += len(piece.tokens)
    tables = [piece.top for piece in pieces if piece.top is not None]
    top = (np.concatenate([ids for ids, _ in tables]), np.concatenate([x for _, x in tables])) if tables else None
    return Drawn(
        np.concatenate([piece.tokens for piece in pieces]),
        np.concatenate([piece.logprobs for piece in pieces]),
        last.stopped,
        top,
        first.cached,
        tuple(origins),
    )


def can_go_on(draw: Draw) -> bool:
    """Return True if a sample can resume. Samples with presence or frequency penalties, which depend on the generated
    tokens, restart instead.
    """
    return not (draw.options.presence_penalty or draw.options.frequency_penalty)


def rest(draw: Draw, delivered: Drawn, keeps_seed: bool) -> Draw:
    """Request for the rest of a sample.

    `keeps_seed` is True if all engines of the sample derive each token's randomness from seed and position alone.
    """
    count = len(delivered.tokens)
    options = dataclasses.replace(draw.options, min_tokens=max(0, draw.options.min_tokens - count))
    return dataclasses.replace(
        draw,
        prompt=np.concatenate([draw.prompt, delivered.tokens]).astype(np.int32),
        max_tokens=draw.max_tokens - count,
        seed=draw.seed if keeps_seed else _seed(draw.seed, count),
        options=options,
    )


def is_whole(draw: Draw, delivered: Drawn) -> bool:
    """Return True if the sample is complete, so that only the end-of-sample message was lost."""
    count = len(delivered.tokens)
    stopped = count > draw.options.min_tokens and int(delivered.tokens[-1]) in draw.stop_ids
    return stopped or count >= draw.max_tokens


def ended(draw: Draw, delivered: Drawn) -> Drawn:
    """The complete sample, with its finish reason."""
    return dataclasses.replace(delivered, stopped=int(delivered.tokens[-1]) in draw.stop_ids)


def _seed(seed: int, count: int) -> int:
    digest = blake2b(np.asarray([seed, count], np.uint64).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


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


def unreported(ticket: Ticket, name: str, admitted: Admitted) -> Drawn | None:
    """Return the tokens of a running sample that were not reported yet, which then count as reported; None: none.

    A sample that restarts on another engine reports no token twice. Tokens from other weights are not reported.
    """
    if ticket.pieces:
        ticket.pieces[:] = [together(ticket.pieces)]  # few pieces, however long the sample is
        try:
            check_stamp(ticket.pieces[0], ticket, name, admitted)
        except EngineDown:  # the sample will fail on this engine
            return None
    if not (sent := [piece for piece in (ticket.delivered, *ticket.pieces) if piece is not None]):
        return None
    whole, first = together(sent), ticket.reported
    if len(whole.tokens) <= first:
        return None
    ticket.reported = len(whole.tokens)
    return dataclasses.replace(whole, tokens=whole.tokens[first:], logprobs=whole.logprobs[first:], top=None)


def check_stamp(drawn: Drawn, ticket: Ticket, name: str, admitted: Admitted) -> None:
    """Raise `EngineDown` if a sample was drawn from other weights than requested."""
    asked = ticket.adapter, admitted.base
    for origin in drawn.origins:
        if (origin.version, origin.base) != asked:
            raise EngineDown(
                f"{name} has drawn a sample from adapter={origin.version} on base={origin.base}, not from "
                f"adapter={asked[0]} on base={asked[1]}; it is not used until it is proved again"
            )
