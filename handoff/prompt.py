"""A prompt's ids as the legs tell them: all of them as bytes, or a digest where it only matters whether two are the same."""

import hashlib
import struct
from collections.abc import Sequence


def packed(ids: Sequence[int]) -> bytes:
    """Return ids (0 to 2**32 - 1) as bytes: four each, little-endian."""
    return struct.pack(f"<{len(ids)}I", *ids)


def digest(prompt: bytes) -> str:
    """Return what tells one prompt, packed, from any other: 64 hexadecimal digits."""
    return hashlib.sha256(prompt).hexdigest()
