from __future__ import annotations

import blend.store


def test_public_names_are_sorted_and_there() -> None:
    names = blend.store.__all__
    assert names == [
        *sorted(n for n in names if n.isupper()),
        *sorted(n for n in names if n[0].isupper() and not n.isupper()),
        *sorted(n for n in names if n[0].islower()),
    ]
    assert all(hasattr(blend.store, name) for name in names)
