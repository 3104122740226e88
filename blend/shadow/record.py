"""That quality has stopped ``auto``, as it is kept beyond the process."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from blend.errors import TierUnavailable
from blend.store.fileio import CREATE, FileIO, describe, sync_directory, write_all

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trip:
    """When ``auto`` was stopped (ISO 8601, UTC), and why."""

    since: str
    reason: str


class TripRecord:
    """A model's trip in a small file of the store's directory. Without one, nothing is kept.

    A process reads it when it starts: others that have the store open then do not learn of it.

    Args:
        directory: the disk tier's; ``None`` where there is none.
        fingerprint: the model's.
    """

    def __init__(self, directory: Path | None, fingerprint: str) -> None:
        self._path = None if directory is None else directory / f"quality-{fingerprint}.json"
        self._io = FileIO()

    def read(self) -> Trip | None:
        """Return what was written and not removed since. What cannot be read is taken for a trip, too."""
        if self._path is None:
            return None
        try:
            found = json.loads(self._path.read_bytes())
            return Trip(str(found["since"]), str(found["reason"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            return Trip("an unknown time", f"{self._path} cannot be read ({type(error).__name__})")

    def write(self, trip: Trip) -> None:
        """Keep a trip. Where that fails it is logged: the process itself knows all the same."""
        if self._path is None:
            return
        temporary = f"{self._path}.{os.urandom(8).hex()}.tmp"
        try:
            fd = self._io.open(temporary, CREATE)
            try:
                write_all(self._io, fd, memoryview(json.dumps(asdict(trip)).encode()), 0)
                self._io.fsync(fd)
            finally:
                self._io.close(fd)
            self._io.rename(temporary, str(self._path))
            sync_directory(self._io, str(self._path.parent))
        except OSError as error:
            _log.error("%s cannot be written, and a restart will let auto blend again: %s", self._path, describe(error))

    def remove(self) -> None:
        """Forget the trip.

        Raises:
            TierUnavailable: the file cannot be removed.
        """
        if self._path is None:
            return
        try:
            self._path.unlink(missing_ok=True)
            sync_directory(self._io, str(self._path.parent))
        except OSError as error:
            raise TierUnavailable(f"{self._path}: {describe(error)}") from error
