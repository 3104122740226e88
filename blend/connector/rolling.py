"""Rolling fingerprints of token ids (Karp and Rabin, 1987): those of all spans of a sequence from one pass over it.

Modulo 2**64, with a secret base, over tokens that another secret mixes first. They say which spans are worth comparing,
and never that two are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.uint64]
Tokens = npt.NDArray[np.uint32]
Places = npt.NDArray[np.int64]


class Fingerprints:
    """Those of one tenant, which are like no other tenant's.

    Args:
        secret: at least 16 bytes.
        tenant: its name.
    """

    def __init__(self, secret: bytes, tenant: str) -> None:
        raw = blake2b(tenant.encode(), key=secret[:64], digest_size=16, person=b"blend recognise").digest()
        key, base = np.frombuffer(raw, "<u8").tolist()
        self._key = np.uint64(key)
        self._base = base | 5  # odd, so that it has an inverse; not 1, and no small order
        self._inverse = pow(self._base, -1, 1 << 64)

    def of(self, tokens: Tokens) -> Rolled:
        """Return the fingerprints of all spans of these tokens."""
        mixed = tokens.astype(np.uint64) + self._key
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
        sums = np.zeros(len(tokens) + 1, np.uint64)
        np.cumsum(mixed * _powers(self._base, len(tokens)), out=sums[1:])
        return Rolled(sums, _powers(self._inverse, len(tokens) + 1))


@dataclass(frozen=True, eq=False)
class Rolled:
    """Fingerprints of all spans of a sequence of N tokens.

    Args:
        sums: ``[N + 1]``, of the weighted tokens before each place. The difference of two belongs to what is between.
        back: ``[N + 1]``, what moves that to the beginning, so that it does not matter where a span stands.
    """

    sums: Numbers
    back: Numbers

    def between(self, starts: Places, ends: Places) -> Numbers:
        """Return those of some spans."""
        return (self.sums[ends] - self.sums[starts]) * self.back[starts]

    def windows(self, size: int) -> Numbers:
        """Return those of all spans of one size, in order."""
        count = len(self.sums) - size
        return (self.sums[size:] - self.sums[:count]) * self.back[:count]


def _powers(base: int, count: int) -> Numbers:
    """Powers 0 to ``count - 1`` of a number, modulo 2**64."""
    powers = np.full(count, base, np.uint64)
    powers[:1] = 1
    return np.cumprod(powers, dtype=np.uint64)
