"""The cache on disk: whole entries or none, whatever happens to its files."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from pyop3_mlir.runtime.cache import Cache, default_root

VALUE = bytes(range(256)) * 40


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "store")


def test_an_entry_comes_back(cache):
    assert cache.get("a") is None
    assert cache.put("a", VALUE)
    assert cache.get("a") == VALUE
    assert cache.get("b") is None


def test_an_empty_value_and_an_odd_key_come_back(cache):
    cache.put("../../x\n∂Ω", b"")
    assert cache.get("../../x\n∂Ω") == b""
    assert [path.parent for path in cache.root.rglob("*")] == [cache.root]


def test_the_last_value_wins(cache):
    cache.put("a", b"old")
    cache.put("a", b"new")
    assert cache.get("a") == b"new"
    assert len(cache.list()) == 1


def test_entries_are_listed_with_their_keys(cache):
    cache.put("a", b"1")
    cache.put("b", b"22")
    assert {(entry.key, entry.size) for entry in cache.list()} == {("a", 1), ("b", 2)}


def test_clear_leaves_files_of_others_alone(cache):
    cache.put("a", b"1")
    other = cache.root / "notes.txt"
    other.write_text("mine")
    assert cache.clear() == 1
    assert cache.get("a") is None
    assert other.exists()


def test_a_cache_that_does_not_exist_is_empty(cache):
    assert list(cache.list()) == []
    assert cache.clear() == 0
    assert list(cache.verify()) == []
    assert not cache.root.exists()


def damage_truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def damage_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:10])


def damage_empty(path: Path) -> None:
    path.write_bytes(b"")


def damage_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def damage_foreign(path: Path) -> None:
    path.write_bytes(b"not ours, but long enough to hold a header of any kind " * 10)


def damage_version(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[16] += 1
    path.write_bytes(content)


DAMAGES = [
    damage_truncate, damage_header, damage_empty, damage_bit, damage_foreign, damage_version,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_removed_and_can_be_written_again(cache, damage, caplog):
    cache.put("a", VALUE)
    damage(cache.path("a"))
    with caplog.at_level(logging.WARNING):
        assert cache.get("a") is None
    assert "damaged" in caplog.text
    assert not cache.path("a").exists()
    cache.put("a", VALUE)
    assert cache.get("a") == VALUE


@pytest.mark.parametrize("damage", DAMAGES)
def test_verify_finds_the_damaged_entry_and_keeps_the_others(cache, damage):
    cache.put("a", VALUE)
    cache.put("b", VALUE)
    damage(cache.path("a"))
    ((path, _),) = cache.verify()
    assert path == cache.path("a")
    assert cache.get("b") == VALUE
    assert list(cache.verify()) == []


def test_an_entry_under_another_key_is_not_returned(cache):
    cache.put("a", VALUE)
    cache.path("a").rename(cache.path("b"))
    assert cache.get("b") is None


def test_verify_removes_what_dead_writers_left(cache):
    cache.put("a", b"1")
    old, new = cache.root / "x-1.tmp", cache.root / "x-2.tmp"
    for path in (old, new):
        path.write_bytes(b"half")
    hours_ago = time.time() - 7200
    os.utime(old, (hours_ago, hours_ago))
    cache.verify()
    assert not old.exists()
    assert new.exists(), "its writer may still be at work"


def with_ages(cache, **ages):
    """Entries of ten bytes, beside key and header, that were written so many seconds ago."""
    for key, age in ages.items():
        cache.put(key, bytes(10))
        then = time.time() - age
        os.utime(cache.path(key), (then, then))
    return cache.path(next(iter(ages))).stat().st_size


def test_trim_removes_what_is_too_old(cache):
    with_ages(cache, a=50.0, b=150.0, c=0.0)
    assert cache.trim(size=10**6, age=100.0) == 1
    assert {entry.key for entry in cache.list()} == {"a", "c"}


def test_trim_removes_the_oldest_of_too_much(cache):
    each = with_ages(cache, a=50.0, b=150.0, c=0.0)
    assert cache.trim(size=2 * each, age=1000.0) == 1
    assert {entry.key for entry in cache.list()} == {"a", "c"}
    assert cache.trim(size=2 * each - 1, age=1000.0) == 1
    assert {entry.key for entry in cache.list()} == {"c"}


def test_trim_leaves_files_of_others_alone(cache):
    with_ages(cache, a=50.0)
    (cache.root / "notes.txt").write_text("mine")
    assert cache.trim(size=0, age=0.0) == 1
    assert [path.name for path in cache.root.iterdir()] == ["notes.txt"]


def test_a_directory_that_cannot_be_made_is_one_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    cache = Cache(tmp_path / "file" / "store")
    with caplog.at_level(logging.WARNING):
        assert not cache.put("a", VALUE)
        assert not cache.put("b", VALUE)
        assert cache.get("a") is None
        assert list(cache.list()) == []
    assert caplog.text.count("going on without it") == 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_a_write_that_fails_is_one_warning_and_leaves_nothing(cache, code, caplog, monkeypatch):
    cache.put("old", b"1")

    def fail(*_args, **_kwargs):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("pyop3_mlir.runtime.cache.os.fdopen", fail)
    with caplog.at_level(logging.WARNING):
        assert not cache.put("a", VALUE)
        assert not cache.put("a", VALUE)
    assert caplog.text.count(os.strerror(code)) == 1
    assert [path.name for path in cache.root.iterdir()] == [cache.path("old").name]
    assert cache.get("old") == b"1"


def test_a_full_disk_is_no_failure(caplog, monkeypatch, tmp_path):
    """On the real thing: /dev/full takes no byte."""
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full")
    cache = Cache(tmp_path / "store")
    real = os.fdopen

    def on_full_disk(descriptor, mode):
        os.close(descriptor)
        return real(os.open(full, os.O_WRONLY), mode)

    monkeypatch.setattr("pyop3_mlir.runtime.cache.os.fdopen", on_full_disk)
    with caplog.at_level(logging.WARNING):
        assert not cache.put("a", VALUE)
    assert os.strerror(errno.ENOSPC) in caplog.text
    assert list(cache.root.iterdir()) == []


def test_a_read_that_fails_is_one_warning(cache, caplog, monkeypatch):
    cache.put("a", VALUE)

    def fail(_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "read_bytes", fail)
    with caplog.at_level(logging.WARNING):
        assert cache.get("a") is None
        assert cache.get("a") is None
    assert caplog.text.count("cannot read") == 1


def test_the_environment_says_where(monkeypatch, tmp_path):
    monkeypatch.setenv("PYOP3_MLIR_CACHE_DIR", str(tmp_path / "here"))
    assert default_root() == tmp_path / "here"
    assert Cache.default("modules").root == tmp_path / "here" / "modules"
    monkeypatch.delenv("PYOP3_MLIR_CACHE_DIR")
    assert default_root().name == "pyop3_mlir"


def _write_and_read(root: str, number: int) -> int:
    """Returns how often something other than a whole value was read."""
    cache = Cache(root)
    wrong = 0
    for i in range(40):
        cache.put("shared", bytes([number]) * 20000)
        value = cache.get("shared")
        if value is None or len(value) != 20000 or len(set(value)) != 1:
            wrong += 1
        if number == 0 and i % 10 == 9:
            cache.verify()
    return wrong


def test_many_processes_share_a_cache(tmp_path):
    root = str(tmp_path / "store")
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        wrong = pool.starmap(_write_and_read, [(root, number) for number in range(4)])
    assert wrong == [0, 0, 0, 0]
    cache = Cache(root)
    assert list(cache.verify()) == []
    assert len(list(cache.root.iterdir())) == 1
