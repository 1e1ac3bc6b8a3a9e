"""A content-addressed store of bytes on disk, shared by any number of processes.

One file an entry, written beside its place and renamed into it, so that a reader on a local or a
network file system sees a whole file or none. Each file carries its key and a checksum: truncated
or foreign files are found, removed and built anew. A cache never makes a run fail: a full disk or a
read-only directory is reported once, and then the run goes on without.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import struct
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Cache", "Entry", "default_root", "user_cache_path"]

log = logging.getLogger("pyop3_mlir")

MAGIC = b"pyop3_mlir cache"
VERSION = 1
HEADER = struct.Struct("<16sIIQ32s")
"""Magic, version, length of the key, length of the value, SHA-256 of key and value."""

SUFFIX = ".entry"
TEMPORARY = ".tmp"
STALE_SECONDS = 3600.0
"""A temporary file of this age belongs to a process that died."""


def default_root() -> Path:
    """``$PYOP3_MLIR_CACHE_DIR``, or the user's cache directory of the platform."""
    root = os.environ.get("PYOP3_MLIR_CACHE_DIR")
    return Path(root).expanduser() if root else user_cache_path()


def user_cache_path() -> Path:
    """The user's cache directory of the platform."""
    try:
        import platformdirs
    except ModuleNotFoundError:
        # where modules come from a bundle, there may be nothing but numpy and IREE's runtime
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "pyop3_mlir"
    return platformdirs.user_cache_path("pyop3_mlir")


@dataclass(frozen=True)
class Entry:
    """One entry of a cache.

    Attributes
    ----------
    key
        As given to :meth:`Cache.put`.
    size
        Of the value, in bytes.
    created
        Seconds since the epoch.
    path
        The file.
    """

    key: str
    size: int
    created: float
    path: Path


class _InvalidError(Exception):
    """A file is no whole entry of this version."""


class Cache:
    """Bytes by key.

    Parameters
    ----------
    root
        Directory, made when the first entry is written. Only files in it that have this module's
        suffix are ever touched.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self._warned = False

    @classmethod
    def default(cls, kind: str) -> Cache:
        """The cache of this ``kind`` ("modules", "tuning") under :func:`default_root`."""
        return cls(default_root() / kind)

    def __repr__(self) -> str:
        return f"Cache({str(self.root)!r})"

    def path(self, key: str) -> Path:
        """The file that holds, or would hold, the entry of ``key``."""
        return self.root / (hashlib.sha256(key.encode()).hexdigest()[:40] + SUFFIX)

    def get(self, key: str) -> bytes | None:
        """Return the value of ``key``, or None where there is none.

        A file that is damaged or that another program wrote is removed and counts as absent.
        """
        path = self.path(key)
        try:
            found, value = _decode(path.read_bytes())
            if found != key:
                raise _InvalidError(f"it holds the key {found!r}")
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn("read", error)
            return None
        except _InvalidError as error:
            log.warning("cache: %s is damaged and will be built anew: %s", path, error)
            self._remove(path)
            return None
        return value

    def put(self, key: str, value: bytes) -> bool:
        """Store ``value``; returns whether it was stored (a failure is reported once)."""
        path = self.path(key)
        temporary: str | None = None
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(TEMPORARY, path.stem + "-", self.root)
            with os.fdopen(descriptor, "wb") as file:
                file.write(_encode(key, value))
            Path(temporary).replace(path)
        except OSError as error:
            if temporary is not None:
                self._remove(Path(temporary))
            self._warn("write", error)
            return False
        return True

    def list(self) -> Sequence[Entry]:
        """The entries, oldest first. Damaged files are left out; see :meth:`verify`."""
        entries = []
        for path in self._files(SUFFIX):
            with contextlib.suppress(OSError, _InvalidError):
                key, value = _decode(path.read_bytes())
                entries.append(Entry(key, len(value), path.stat().st_mtime, path))
        return sorted(entries, key=lambda entry: (entry.created, entry.key))

    def clear(self) -> int:
        """Remove all entries; returns how many there were."""
        for path in self._files(TEMPORARY):
            self._remove(path)
        return sum(self._remove(path) for path in self._files(SUFFIX))

    def verify(self) -> Sequence[tuple[Path, str]]:
        """Check every file; remove and return the damaged ones, each with what is wrong with it.

        What interrupted writers left behind is removed too.
        """
        damaged = []
        for path in self._files(SUFFIX):
            try:
                key, _ = _decode(path.read_bytes())
                if self.path(key) != path:
                    raise _InvalidError(f"it holds the key {key!r}, which belongs elsewhere")
            except FileNotFoundError:
                continue  # another process removed it
            except OSError as error:
                self._warn("read", error)
            except _InvalidError as error:
                damaged.append((path, str(error)))
                self._remove(path)
        for path in self._files(TEMPORARY):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > STALE_SECONDS:
                    self._remove(path)
        return damaged

    def trim(self, size: int, age: float) -> int:
        """Remove entries that were written more than ``age`` seconds ago, then the oldest ones.

        Parameters
        ----------
        size
            Bytes that the files which stay may have together.
        age
            Seconds.

        Returns
        -------
        int
            How many entries were removed.
        """
        found = []
        for path in self._files(SUFFIX):
            with contextlib.suppress(OSError):  # another process removed it
                status = path.stat()
                found.append((status.st_mtime, status.st_size, path))
        removed, total, oldest = 0, 0, time.time() - age
        for written, length, path in sorted(found, reverse=True):
            total += length
            if written < oldest or total > size:
                removed += self._remove(path)
        return removed

    def _files(self, suffix: str) -> Iterator[Path]:
        try:
            yield from sorted(path for path in self.root.iterdir() if path.suffix == suffix)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            self._warn("read", error)

    def _remove(self, path: Path) -> bool:
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            self._warn("write", error)
            return False
        return True

    def _warn(self, what: str, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "cache: cannot %s %s (%s); going on without it. "
                "Set PYOP3_MLIR_CACHE_DIR to a directory that can be written to",
                what,
                self.root,
                error.strerror or error,
            )


def _encode(key: str, value: bytes) -> bytes:
    name = key.encode()
    digest = hashlib.sha256(name + value).digest()
    return HEADER.pack(MAGIC, VERSION, len(name), len(value), digest) + name + value


def _decode(content: bytes) -> tuple[str, bytes]:
    if len(content) < HEADER.size:
        raise _InvalidError("it is too short")
    magic, version, key_length, value_length, digest = HEADER.unpack_from(content)
    if magic != MAGIC:
        raise _InvalidError("it is not a file of this package")
    if version != VERSION:
        raise _InvalidError(f"it has version {version}, this is version {VERSION}")
    if len(content) != HEADER.size + key_length + value_length:
        raise _InvalidError("it is truncated, or longer than it says")
    body = content[HEADER.size :]
    if hashlib.sha256(body).digest() != digest:
        raise _InvalidError("its checksum is wrong")
    return body[:key_length].decode(), body[key_length:]
