"""Known chunks at any offset of an ordinary prompt, found by fingerprints and then compared token by token.

A fingerprint is a rolling hash (Karp and Rabin, 1987) with a secret base, over tokens that another secret mixes first.
Of every known chunk one *window* of tokens is indexed, the one that the fewest other chunks have; all windows of a
prompt are looked up. Where one is met, the fingerprint of the chunk's whole interior is compared, then its outermost
tokens, then, of the copy that is taken, all of it. So what is looked at grows with the prompt, however often it repeats
itself, and it is tokens that decide: fingerprints only point.

A chunk's interior is all of it but for a *seam* of a few tokens at each end, which a tokenizer may merge with what
stands beside them. A copy that lacks more than that is none.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from blend.connector.rolling import Fingerprints, Places, Tokens
from blend.errors import InvalidInput
from blend.types import Chunk, Part

RECOGNISED_TOKENS = 1 << 22
"""Of known chunks, by default."""
_MOST = 0xFFFFFFFF
"""The largest token id."""


class Recogniser:
    """The chunks that tenants are known to have, and where they stand in prompts. To be used by one thread at a time.

    Args:
        secret: at least 16 bytes that key the fingerprints.
        window: tokens of a window. A chunk of fewer is never recognised: it could be anywhere by chance.
        seam: most tokens that a copy may lack at either end. A chunk of fewer than ``window`` tokens and two seams
            has shorter ones, so that its interior is at least a window.
        limit: most tokens that are known, of all tenants together: they take 4 bytes each, and a chunk about 1 KB
            besides. Beyond it the chunks go that were learned or found longest ago.
        crowd: most chunks of a tenant that are indexed by the same window. One whose every window so many others have
            is not learned, for each of them would have to be looked at.

    Raises:
        InvalidInput: a value is out of range.
    """

    def __init__(
        self, secret: bytes, window: int = 16, seam: int = 8, limit: int = RECOGNISED_TOKENS, crowd: int = 4
    ) -> None:
        if not isinstance(secret, bytes) or len(secret) < 16:
            raise InvalidInput("secret", "…", "at least 16 bytes")
        for name, value, least in (("window", window, 1), ("seam", seam, 0), ("limit", limit, 0), ("crowd", crowd, 1)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InvalidInput(name, value, f"an integer of {least} or more")
        self._secret = secret
        self._window = window
        self._seam = seam
        self._limit = limit
        self._crowd = crowd
        self._tokens = self._learned = 0
        self._spaces: dict[str, _Space] = {}
        self._known: OrderedDict[tuple[str, bytes], _Known] = OrderedDict()

    def __len__(self) -> int:
        """How many chunks are known."""
        return len(self._known)

    @property
    def tokens(self) -> int:
        """How many tokens they have."""
        return self._tokens

    def learn(self, tenant: str, token_ids: Sequence[int]) -> bool:
        """Take note of a tenant's chunk; returns whether it is known now.

        Raises:
            InvalidInput: a token id is outside 0 to 2**32 - 1.
        """
        tokens = _array(token_ids)
        name = tenant, tokens.tobytes()
        if name in self._known:
            self._known.move_to_end(name)
            return True
        if not self._window <= len(tokens) <= self._limit:
            return False
        if tenant not in self._spaces:
            self._spaces[tenant] = _Space(self._secret, tenant, self._window, self._seam)
        known = self._spaces[tenant].add(name, self._learned, self._crowd)
        if known is None:
            return False
        self._known[name] = known
        self._learned += 1
        self._tokens += len(tokens)
        while self._tokens > self._limit:
            self._drop(next(iter(self._known)))
        return True

    def forget(self, tenant: str, token_ids: Sequence[int]) -> bool:
        """Forget a tenant's chunk; returns whether it was known.

        Raises:
            InvalidInput: a token id is outside 0 to 2**32 - 1.
        """
        name = tenant, _array(token_ids).tobytes()
        if name not in self._known:
            return False
        self._drop(name)
        return True

    def find(self, tenant: str, token_ids: Sequence[int]) -> list[tuple[int, Part]]:
        """Return position and part of each of the tenant's known chunks in a prompt, in order, none over another.

        Of copies that overlap the longest is taken, of equally long ones the first; another one is cut down to what is
        left of it, as long as it lacks no more than a seam.

        Raises:
            InvalidInput: a token id is outside 0 to 2**32 - 1.
        """
        prompt = _array(token_ids)
        space = self._spaces.get(tenant)
        if space is None or len(prompt) < self._window:
            return []
        copies, found = space.copies(prompt), list[_Found]()
        while copies.any():
            copy = copies.first(found)
            same = np.array_equal(prompt[copy.start : copy.end], copy.known.tokens[copy.first : copy.last])
            if same:
                insort(found, copy, key=_START)
            copies = copies.without(copy if same else None)
        for copy in found:
            self._known.move_to_end(copy.known.name)
        return [(copy.start, Part(copy.known.chunk, copy.first, copy.last)) for copy in found]

    def _drop(self, name: tuple[str, bytes]) -> None:
        known = self._known.pop(name)
        self._tokens -= len(known.tokens)
        space = self._spaces[known.name[0]]
        space.remove(known)
        if not space.windows:
            del self._spaces[known.name[0]]


@dataclass(frozen=True, eq=False)
class _Known:
    """A known chunk.

    ``name`` is its tenant and the bytes of its ``tokens``; ``number`` counts what was learned; ``margin`` is how many
    tokens a copy may lack at either end; ``window`` and ``interior`` are fingerprints, the window's first token is
    number ``anchor``. ``margins`` has the tokens that a copy may lack, ``[2, seam]``: those before the interior and
    those behind it, each from there outwards, filled up with what no token is.
    """

    name: tuple[str, bytes]
    number: int
    tokens: Tokens
    margin: int
    anchor: int
    window: int
    interior: int
    margins: Places

    @property
    def chunk(self) -> Chunk:
        return Chunk(self.tokens.tolist())


@dataclass(frozen=True)
class _Found:
    """A copy in a prompt: its position, and which of the chunk's tokens, ``first`` to ``last``, it has."""

    known: _Known
    start: int
    first: int
    last: int

    @property
    def end(self) -> int:
        return self.start + self.last - self.first


_START = attrgetter("start")


@dataclass(frozen=True, eq=False)
class _Copies:
    """C copies in a prompt that may overlap, the one to take first first.

    Args:
        known: the chunks.
        which: ``[C]``, the number of each copy's chunk among these.
        spans: ``[4, C]``, positions: where the copy begins, its interior begins and ends, and the copy ends.
    """

    known: Sequence[_Known]
    which: Places
    spans: Places

    @classmethod
    def of(cls, known: Sequence[_Known], which: Places, spans: Places) -> _Copies:
        """Put copies in order: the longest first, then by position, then the chunk first that was learned first."""
        order = np.lexsort((which, spans[0], spans[0] - spans[3]))
        return cls(known, which[order], spans[:, order])

    def any(self) -> bool:
        return len(self.which) > 0

    def first(self, found: Sequence[_Found]) -> _Found:
        """Return the first copy, cut down to what is between those that were found."""
        known = self.known[int(self.which[0])]
        start, inner, _, end = self.spans[:, 0].tolist()
        at = inner - known.margin
        behind = bisect_right(found, inner, key=_START)
        if behind:
            start = max(start, found[behind - 1].end)
        if behind < len(found):
            end = min(end, found[behind].start)
        return _Found(known, start, start - at, end - at)

    def without(self, taken: _Found | None) -> _Copies:
        """Return all but the first, and but those with a token of their interior in what is ``taken``."""
        which, spans = self.which[1:], self.spans[:, 1:]
        if taken is not None:
            free = (spans[2] <= taken.start) | (spans[1] >= taken.end)
            which, spans = which[free], spans[:, free]
        return _Copies(self.known, which, spans)


class _Space:
    """One tenant's chunks, by their windows. Its fingerprints are like no other tenant's."""

    def __init__(self, secret: bytes, tenant: str, window: int, seam: int) -> None:
        self._fingerprints = Fingerprints(secret, tenant)
        self._window = window
        self._seam = seam
        self.windows: dict[int, list[_Known]] = {}

    def add(self, name: tuple[str, bytes], number: int, crowd: int) -> _Known | None:
        """Index a chunk by the window of its interior that the fewest others have; ``None`` if that is a crowd."""
        tokens: Tokens = np.frombuffer(name[1], np.uint32)
        margin = min(self._seam, (len(tokens) - self._window) // 2)
        start, end = margin, len(tokens) - margin
        rolled = self._fingerprints.of(tokens)
        values = rolled.windows(self._window)[start : end - self._window + 1].tolist()
        place = self._least_used(values)
        same = self.windows.setdefault(values[place], [])
        if len(same) >= crowd:
            return None
        margins = np.full((2, self._seam), -1, np.int64)
        margins[0, :margin] = tokens[:start][::-1]
        margins[1, :margin] = tokens[end:]
        (interior,) = rolled.between(np.array([start]), np.array([end])).tolist()
        known = _Known(name, number, tokens, margin, start + place, values[place], interior, margins)
        same.append(known)
        return known

    def _least_used(self, values: Sequence[int]) -> int:
        fewest, best = len(self.windows.get(values[0], ())), 0
        for place, value in enumerate(values):
            if fewest == 0:
                break
            if (used := len(self.windows.get(value, ()))) < fewest:
                fewest, best = used, place
        return best

    def remove(self, known: _Known) -> None:
        """Take a chunk out of the index."""
        same = self.windows[known.window]
        same.remove(known)
        if not same:
            del self.windows[known.window]

    def copies(self, prompt: Tokens) -> _Copies:
        """Return the copies in a prompt whose interiors have the right fingerprint; their margins are compared."""
        rolled, seam = self._fingerprints.of(prompt), self._seam
        met = defaultdict[_Known, list[int]](list)
        for at, value in enumerate(rolled.windows(self._window).tolist()):
            for known in self.windows.get(value, ()):
                met[known].append(at - known.anchor + known.margin)
        chunks = sorted(met, key=attrgetter("number"))
        which = np.repeat(np.arange(len(chunks)), [len(met[known]) for known in chunks])
        starts = np.array([at for known in chunks for at in met[known]], np.int64)
        sizes = np.array([len(known.tokens) - 2 * known.margin for known in chunks], np.int64)
        fingerprints = np.array([known.interior for known in chunks], np.uint64)
        inside = (starts >= 0) & (starts + sizes[which] <= len(prompt))
        which, starts = which[inside], starts[inside]
        same = rolled.between(starts, starts + sizes[which]) == fingerprints[which]
        which, starts = which[same], starts[same]
        ends = starts + sizes[which]
        margins = np.array([known.margins for known in chunks]).reshape(len(chunks), 2, seam)[which]
        padded = np.full(len(prompt) + 2 * seam, -2, np.int64)
        padded[seam : seam + len(prompt)] = prompt
        steps = np.arange(seam)
        before = _run(padded[starts[:, None] + seam - 1 - steps] == margins[:, 0])
        behind = _run(padded[ends[:, None] + seam + steps] == margins[:, 1])
        return _Copies.of(chunks, which, np.stack((starts - before, starts, ends, ends + behind)))


def _run(equal: npt.NDArray[np.bool_]) -> Places:
    """How many are true of each row ``[C, seam]`` before the first that is not."""
    lengths: Places = np.logical_and.accumulate(equal, axis=1).sum(axis=1)
    return lengths


def _array(token_ids: Sequence[int]) -> Tokens:
    wide = np.asarray(token_ids)
    if len(wide) and (wide.ndim != 1 or wide.dtype.kind not in "iu" or wide.min() < 0 or wide.max() > _MOST):
        raise InvalidInput("token_ids", token_ids, f"integers from 0 to {_MOST}")
    return wide.astype(np.uint32)
