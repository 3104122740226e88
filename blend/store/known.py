"""Which variants of a chunk have been seen in a store that cannot be asked for them."""

from __future__ import annotations

from collections import OrderedDict

from blend.store.key import ObjectKey


class KnownVariants:
    """A bounded memory of keys: hints, of which the least recently used are forgotten. Guarded by its owner's lock.

    Args:
        limit: most content keys that are kept.
    """

    def __init__(self, limit: int = 200_000) -> None:
        self._limit = limit
        self._variants: OrderedDict[str, frozenset[str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._variants)

    def learn(self, key: ObjectKey) -> None:
        """Note that an object has been seen."""
        self._variants[key.content] = self._variants.pop(key.content, frozenset()) | {key.variant}
        if len(self._variants) > self._limit:
            self._variants.popitem(last=False)

    def forget(self, key: ObjectKey) -> None:
        """Note that an object is gone."""
        left = self._variants.get(key.content, frozenset()) - {key.variant}
        if left:
            self._variants[key.content] = left
        else:
            self._variants.pop(key.content, None)

    def variants(self, content: str) -> tuple[str, ...]:
        """Return the variants of a content key that are remembered, sorted."""
        return tuple(sorted(self._variants.get(content, ())))
