"""Oversized training passes: the address is read from the beginning of the body, so that the request fails in order.

If it were rejected with an HTTP error, its seq_id would stay missing, and all later requests of the model would wait
for it. SDKs put the address first in protobuf. In JSON they put it last, where it is not read.
"""

from contextlib import suppress
from io import BytesIO
from typing import Any

import zstandard
from google.protobuf.message import DecodeError
from pydantic import ValidationError

from skyrl.tinker.errors import BodyTooLarge, MalformedBody
from skyrl.tinker.wire.codec import PROTOBUF, ZSTD_PIECE
from skyrl.tinker.wire.json_numbers import outer_members
from skyrl.tinker.wire.parsing import Body, ModelAddress, Parsed
from skyrl.tinker.wire.proto import skyrl_tinker_pb2 as pb
from skyrl.tinker.wire.protobuf import address_of

ADDRESS_BYTES = 4096
"""Bytes at the beginning of a body that are searched for the address."""


def failed_pass(body: Body, error: BodyTooLarge) -> Parsed:
    """Return a pass that fails with `error`. Its address is read from the beginning of its body.

    Raises:
        BodyTooLarge: The beginning has no address, and the rest of the body was not read.
        MalformedBody: The beginning has no address. The whole body was read, in compressed form.
    """
    members = _members(body)
    try:
        address = ModelAddress.model_validate(members)
    except ValidationError:
        address = None
    if address is None or not address.model_id or address.seq_id < 1:
        nameless = BodyTooLarge if body.too_large else MalformedBody
        raise nameless(
            f"{error}. The body does not start with its model_id and seq_id, so later requests of that model wait "
            "for it until --gap-timeout-s"
        ) from None
    # `forward_only` of protobuf is not read here, so such a pass counts as adding gradients.
    return Parsed(address, None, str(error), is_pass="forward_input" not in members)


def _members(body: Body) -> dict[str, Any]:
    """Return the members at the beginning of the request."""
    beginning = _decompressed(body)[:ADDRESS_BYTES]
    if body.content_type != PROTOBUF:
        return outer_members(beginning)
    with suppress(DecodeError):
        message = pb.ForwardBackwardRequest.FromString(address_of(beginning, whole=False))
        return {"model_id": message.model_id, "seq_id": message.seq_id}
    return {}


def _decompressed(body: Body) -> bytes:
    """Decompress the beginning of a body. Returns at least `ADDRESS_BYTES`, or the whole body if it is shorter."""
    if body.content_encoding != "zstd":
        return body.data
    decompressor, beginning = zstandard.ZstdDecompressor().decompressobj(), BytesIO()
    with suppress(zstandard.ZstdError):
        for at in range(0, len(body.data), ZSTD_PIECE):
            beginning.write(decompressor.decompress(body.data[at : at + ZSTD_PIECE]))
            if beginning.tell() >= ADDRESS_BYTES or decompressor.eof:
                break
    return beginning.getvalue()
