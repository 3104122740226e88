"""Writing one object to several tiers at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from blend.errors import ObjectCorrupt, ResourceExhausted, StoreError
from blend.store.base import Tier, Writer
from blend.store.buffers import bare
from blend.store.key import ObjectKey


class FanOutWriter(Writer):
    """Writers of one object in every tier that lacks it; goes on while one of them does, or a tier has the object.

    Args:
        tiers: fastest first; they commit in that order.
        key, nbytes: the object.
        on_fault: told the name of a tier that failed, and the error.
        known: whether a tier beyond these has the object.
        around: called with what commits, returns what that does; for what has to be done before and after.

    Raises:
        ResourceExhausted, TierUnavailable: no tier takes it and none has it; the last one's reason.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        key: ObjectKey,
        nbytes: int,
        on_fault: Callable[[str, Exception], None],
        known: bool = False,
        around: Callable[[Callable[[], bool]], bool] = lambda commit: commit(),
    ) -> None:
        super().__init__(key, nbytes)
        self._on_fault = on_fault
        self._around = around
        self._writers: list[tuple[Tier, Writer]] = []
        self._known = known
        fault: Exception | None = None
        try:
            for tier in tiers:
                try:
                    if tier.contains(key):
                        self._known = True
                    else:
                        self._writers.append((tier, tier.start(key, nbytes)))
                except (StoreError, ResourceExhausted) as error:
                    on_fault(tier.name, error)
                    fault = bare(error)
            self._require_taker(fault)
        except BaseException:
            self.revoke()
            raise

    @property
    def live(self) -> bool:
        """Whether any tier is being written."""
        return bool(self._writers)

    def _require_taker(self, fault: Exception | None) -> None:
        if not self._writers and not self._known:
            try:
                raise fault or ResourceExhausted("there is no tier to store in: give one a budget")
            finally:
                del fault

    def _write(self, offset: int, view: memoryview) -> None:
        fault: Exception | None = None
        for tier, writer in list(self._writers):
            try:
                writer.write(offset, view)
                view = writer.peek(offset, len(view)) or view  # a lower tier may be able to send it from there
            except StoreError as error:
                self._on_fault(tier.name, error)
                self._writers.remove((tier, writer))
                fault = bare(error)
        try:
            self._require_taker(fault)
        finally:
            del fault  # a raised error has this frame, which has the view

    def _commit(self) -> bool:
        return self._around(self._commit_all)

    def _commit_all(self) -> bool:
        stored: bool | None = None
        fault: Exception | None = None
        for tier, writer in list(self._writers):
            try:
                committed = writer.commit()
                # The first tier tells which of several writers was first: they may overtake each other below it.
                stored = committed if stored is None else stored
            except ObjectCorrupt:
                raise  # what came in is wrong: no tier may keep it
            except StoreError as error:
                self._on_fault(tier.name, error)
                self._writers.remove((tier, writer))
                fault = bare(error)
        self._require_taker(fault)
        return bool(stored) and not self._known

    def _revoke(self) -> None:
        for _, writer in self._writers:
            writer.revoke()
