"""Files are written atomically, keep their permissions, and leave nothing else behind."""

import os
import stat
from pathlib import Path

import pytest

from gracekv.errors import OutputError
from gracekv.files import check_output, replacing, write_atomically
from support.fresh_python import fresh_python


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def umask():
    before = os.umask(0o027)
    yield
    os.umask(before)


@pytest.mark.parametrize("bits", [0o444, 0o600, 0o640, 0o644, 0o664])
def test_a_file_keeps_its_permissions(tmp_path, umask, bits):
    path = tmp_path / "private"
    path.write_bytes(b"old")
    path.chmod(bits)
    with replacing(path) as scratch:
        # Without it, only root could write.
        assert mode(scratch) & stat.S_IWUSR
        scratch.write_bytes(b"new")
    assert (path.read_bytes(), mode(path)) == (b"new", bits)


def test_a_new_file_has_what_the_umask_leaves(tmp_path, umask):
    write_atomically(tmp_path / "folder" / "new", b"text")
    assert mode(tmp_path / "folder" / "new") == 0o640


def test_a_link_stays_and_its_target_is_replaced(tmp_path):
    target, link = tmp_path / "real" / "file", tmp_path / "link"
    target.parent.mkdir()
    link.symlink_to(target)
    for text in (b"first, of a link to nothing yet", b"second"):
        write_atomically(link, text)
        assert link.is_symlink()
        assert target.read_bytes() == text
    assert [x.name for x in target.parent.iterdir()] == ["file"]


def test_what_is_no_regular_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/full")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "link", Path("/dev/full")):
        for call in (check_output, lambda x: write_atomically(x, b"data")):
            with pytest.raises(OutputError, match=r"(a folder|not a regular file). Name a file"):
                call(path)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_place_that_cannot_be_written_to_is_refused_before_the_work(tmp_path):
    (tmp_path / "file").write_text("no folder")
    check_output(tmp_path / "folder" / "that" / "is" / "made")
    for path in (tmp_path / "file" / "inside", Path("/proc/nothing/here")):
        with pytest.raises(OutputError, match="Cannot write to"):
            check_output(path)


SAVER = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from gracekv.cache.base import RaggedCache, RaggedEntries
from gracekv.cache.serialization import read_cache, read_digest, write_cache

path = Path(sys.argv[1])
def made(seed):
    x = torch.randn(2, 4000, 64, generator=torch.Generator().manual_seed(seed))
    return RaggedCache(tuple(RaggedEntries.dense(x + n, x - n) for n in (1, 2)), 4000)
caches, digests = [made(0), made(1)], set()
for cache in caches:
    write_cache(path, cache, {}, {})
    digests.add(read_digest(path))
rng, states = random.Random(0), []
for _ in range(int(sys.argv[2])):
    child = os.fork()
    if not child:
        while True:
            for cache in caches:
                write_cache(path, cache, {}, {})
    time.sleep(rng.random() * 0.08)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    read_cache(path, [torch.device("cpu")] * 2)
    states.append(read_digest(path))
assert set(states) <= digests
print(len(states), len(set(path.parent.iterdir())) > 1)
"""


def test_a_saver_that_is_killed_leaves_the_old_file_or_the_new_one(tmp_path):
    """kill -9, at random times; only a hidden file that nothing reads may also remain."""
    done = fresh_python("-c", SAVER, tmp_path / "cache", 12)
    assert done.stdout.split()[0] == "12"
    assert {x.name for x in tmp_path.iterdir() if not x.name.startswith(".")} == {"cache"}


def test_names_that_the_system_refuses_are_named_with_the_reason():
    for path, reason in (("a" * 300, "too long"), ("a\0b", "null byte|null character")):
        for call in (check_output, lambda x: write_atomically(x, b"data")):
            with pytest.raises(OutputError, match=reason) as failure:
                call(Path(path))
            assert repr(path) in str(failure.value)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs Linux")
def test_a_failure_names_the_file_that_was_given_and_not_the_scratch_file():
    with pytest.raises(OutputError, match="Cannot write to /proc/x: ") as failure:
        write_atomically(Path("/proc/x"), b"data")
    assert "/proc/.x" not in str(failure.value)
    assert "free some room" not in str(failure.value)


def test_the_longest_name_is_written(tmp_path):
    write_atomically(tmp_path / ("é" * 127), b"data")
    assert (tmp_path / ("é" * 127)).read_bytes() == b"data"
