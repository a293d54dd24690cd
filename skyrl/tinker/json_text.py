"""JSON that every client can parse: numbers that JSON does not have are sent as "NaN", "Infinity" and "-Infinity".

The SDK's parser refuses bare NaN, and its models read these words as numbers.
"""

import json
import math
from typing import Any


def dumps(value: Any) -> bytes:
    """The value as UTF-8 JSON."""
    try:
        return json.dumps(value, allow_nan=False).encode()
    except ValueError:
        return json.dumps(_in_words(value), allow_nan=False).encode()


def _in_words(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _in_words(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_in_words(child) for child in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
