"""The store: names stay inside it, damage is found, and memory is shared and bounded."""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
import torch

from gracekv.errors import OutputError, SavedCacheError, StoreError
from gracekv.testing.models import tiny_model
from gracekv.vllm import ContextStore, store
from gracekv.vllm.exporting import check_replaceable, delete_context
from gracekv.vllm.served_model import model_facts
from gracekv.vllm.stored_context import heads_of_rank
from support.forged_contexts import signed


@pytest.mark.parametrize("name", [
    "../store/c0", "/etc", "", ".", "c0/..", "a\\b", None, 3, ["c0"], "c0\n", "c0\0", "c\u0660",
    "nul", "CON.txt", "com1", "c0.", "c" * 129, "\ud800",
])  # fmt: skip
def test_no_name_leaves_the_store(root, name):
    store = ContextStore(root)
    for use in (store.load, store.header, lambda name: store.admit({"gracekv": name})):
        with pytest.raises(StoreError, match="A context's name") as caught:
            use(name)
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_files_that_are_none_are_refused(root, tmp_path, kind):
    path = root / "c0" / "header.json"
    path.rename(tmp_path / "header.json")
    if kind == "link":
        path.symlink_to(tmp_path / "header.json")
    else:
        os.mkfifo(path) if kind == "pipe" else path.mkdir()
    with pytest.raises(StoreError, match="links or devices"):
        ContextStore(root).load("c0")


def entries(folder):
    (path,) = folder.glob("entries-*.safetensors")
    return path


def cut(folder):
    path = entries(folder)
    path.write_bytes(path.read_bytes()[:-100])


def flip(folder):
    path = entries(folder)
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(bytes(data))


def exchange(folder):
    shutil.copy(entries(folder.parent / "c1"), entries(folder))


def edit(folder, **changes):
    path = folder / "header.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def forge_model(folder, **changes):
    forge(folder, model={**json.loads((folder / "header.json").read_text())["model"], **changes})


def forge(folder, **changes):
    """An edit that fixes the checksum."""
    data = {**json.loads((folder / "header.json").read_text()), **changes}
    (folder / "header.json").write_text(signed(data))


@pytest.mark.parametrize(("damage", "said"), [
    (cut, "are damaged"), (flip, "are damaged"), (exchange, "are damaged"),
    (lambda folder: entries(folder).unlink(), "are damaged"),
    (lambda folder: folder.symlink_to(folder.rename(folder.parent.parent / "secret")),
     "outside the store"),
    (lambda folder: (folder / "header.json").write_text("{"), "cannot be read"),
    (lambda folder: (folder / "header.json").write_text("[" * 10**6), "cannot be read"),
    (lambda folder: (folder / "header.json").write_text(" " * 2**25), "cannot be read"),
    (lambda folder: (folder / "header.json").write_text("[]"), "another format"),
    (lambda folder: (folder / "header.json").unlink(), "There is no context"),
    (lambda folder: edit(folder, format=2), "another format"),
    (lambda folder: edit(folder, prompt_ids=[5, 6]), "was edited"),
    (lambda folder: forge(folder, length="7"), "is damaged"),
    (lambda folder: forge(folder, more=1), "is damaged"),
    (lambda folder: forge(folder, length=7), "does not match its entries"),
    (lambda folder: forge(folder, prompt_ids=[float("inf")]), "is damaged"),
    (lambda folder: forge(folder, prompt_ids=[-1]), "is damaged"),
    (lambda folder: forge(folder, length=2**63), "is damaged"),
    (lambda folder: forge(folder, length=2**31), "is damaged"),
    (lambda folder: forge(folder, recipe="\ud800"), "is damaged"),
    (lambda folder: forge_model(folder, dtype="\ud800"), "is damaged"),
    (lambda folder: forge(folder, dtype="float16"), "does not match its entries"),
    (lambda folder: forge_model(folder, kv_heads=3), "does not match its entries"),
    (lambda folder: forge(folder, model={"layers": None}), "is damaged"),
    (lambda folder: forge_model(folder, layers=10**12), "is damaged"),
    (lambda folder: forge_model(folder, kv_heads=0), "is damaged"),
    (lambda folder: forge_model(folder, rope=["default"]), "is damaged"),
    (lambda folder: forge(folder, digest="../c1/entries"), "is damaged"),
    (lambda folder: forge(folder, digest="0" * 64), "are damaged"),
    (lambda folder: forge(folder, kind="round"), "is damaged"),
])  # fmt: skip
def test_damage_is_found(root, damage, said):
    damage(root / "c0")
    with pytest.raises(StoreError, match=said) as caught:
        ContextStore(root).load("c0")
    # A server's clients see the message, but must not see the paths of its files.
    assert str(root.parent) not in str(caught.value)


def test_a_file_that_is_larger_than_its_header_says_is_not_read(root, monkeypatch):
    monkeypatch.setattr(store, "read_cache", read := Mock())
    monkeypatch.setattr(store, "_HEADER", 2**12)
    forge(root / "c0", bytes=0, entries=2**40)
    with pytest.raises(StoreError, match="are damaged"):
        ContextStore(root).load("c0")
    assert not read.called


def test_contexts_of_other_models_are_refused(root):
    other = ContextStore(root, model=model_facts(tiny_model(kv_heads=4, seed=5)))
    with pytest.raises(StoreError, match=r"another model: weights \(.* first\) differ"):
        other.load("c0")
    facts = {"family": "llama", "layers": 30, "dtype": "bfloat16"}
    with pytest.raises(StoreError, match=r"dtype \(float32 then, bfloat16 now\), layers differ"):
        ContextStore(root, model=facts).header("c0")


@pytest.fixture
def reads(monkeypatch):
    """Names of the contexts that are read, in order."""
    found, read = [], ContextStore._read
    monkeypatch.setattr(ContextStore, "_read", lambda own, *a: found.append(a[0]) or read(own, *a))
    return found


def test_entries_are_loaded_once_and_shared_by_threads(root, reads):
    store = ContextStore(root)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(store.load, ["c0"] * 8))
    assert reads == ["c0"]
    assert len({id(context) for context in found}) == 1
    shutil.rmtree(root / "c0")
    assert store.load("c0", found[0].header.digest) is found[0]


def test_a_refusal_is_remembered_until_the_files_change(root, reads):
    store = ContextStore(root)
    good = entries(root / "c0").read_bytes()
    flip(root / "c0")
    for _ in range(20):
        with pytest.raises(StoreError, match="damaged"):
            store.load("c0")
    assert reads == ["c0"]
    entries(root / "c0").write_bytes(good)
    assert store.load("c0").header == ContextStore(root).header("c0")


def test_what_may_pass_is_not_remembered(root, monkeypatch):
    def full(*_):
        raise SavedCacheError("Cannot read it.") from OSError("Too many open files")

    store = ContextStore(root)
    with monkeypatch.context() as patched:
        patched.setattr("gracekv.vllm.store.read_cache", full)
        with pytest.raises(StoreError, match="damaged"):
            store.load("c0")
    assert store.load("c0").bytes > 0


def test_any_error_over_a_crafted_file_is_a_refusal(root, monkeypatch):
    monkeypatch.setattr(store, "read_cache", lambda *_: 1 / 0)
    with pytest.raises(StoreError, match="damaged"):
        ContextStore(root).load("c0")


def test_entries_are_in_memory_of_their_own(root):
    """Overwriting or cutting a file changes nothing that is loaded, and nothing else is served."""
    store, path = ContextStore(root), entries(root / "c0")
    held = store.load("c0")
    digest, before = held.header.digest, [layer.values.clone() for layer in held.layers]
    with path.open("r+b") as file:
        file.write(entries(root / "c1").read_bytes())
        file.truncate(200)
    torch.testing.assert_close([x.values for x in held.layers], before, rtol=0, atol=0)
    assert store.load("c0", digest) is held
    shutil.copy(entries(root / "c1"), path)
    with pytest.raises(StoreError, match="damaged"):
        ContextStore(root).load("c0", digest)


def test_memory_has_a_bound_also_by_default(root, monkeypatch):
    store = ContextStore(root)
    assert store.loaded.bytes < store.loaded.limit < 2**50
    size = store.load("c0").bytes
    small = ContextStore(root, limit=size - 1)
    with pytest.raises(StoreError, match=rf"takes {size:,} bytes .* larger limit_bytes"):
        small.load("c0")
    assert small.loaded.bytes == 0
    monkeypatch.setattr("gracekv.vllm.store.read_cache", None)
    with pytest.raises(StoreError, match="and the limit is 99"):
        ContextStore(root, limit=99).load("c0")  # known from its header


def test_what_is_replaced_makes_room_first(root):
    size = ContextStore(root).load("c0").bytes
    store = ContextStore(root, limit=2 * size + size // 2)
    first, _ = store.load("c0"), store.load("c1")
    store.loaded.hold("c1", ContextStore(root).load("c2"))
    assert store.load("c0") is first


def test_replaced_contexts_go_when_no_request_reads_them(root):
    store, digests = ContextStore(root), []
    for number in (0, 1, 2):
        shutil.rmtree(root / "book", ignore_errors=True)
        shutil.copytree(root / f"c{number}", root / "book")
        if digests:
            store.retain({digests[0]})
        digests.append(store.load("book").header.digest)
    # The first is still in use, and stays despite the limit; the second is not.
    assert store.loaded.digests == [digests[0], digests[2]]
    store.loaded.limit = store.loaded.bytes // 2 + 1
    store.load("c1")
    assert store.load("book", digests[0]).header.digest == digests[0]
    store.retain(set())
    with pytest.raises(StoreError, match="was replaced"):
        store.load("book", digests[0])


def test_the_least_recently_used_is_dropped_but_not_what_must_stay(root):
    size = ContextStore(root).load("c0").bytes
    store = ContextStore(root, limit=2 * size + size // 2)
    first, second = store.load("c0"), store.load("c1")
    assert store.load("c0") is first
    store.load("c2")
    assert store.loaded.bytes <= 2.5 * size
    assert store.load("c0", first.header.digest) is first
    assert store.load("c1") is not second
    kept = store.load("c2")
    store.retain({kept.header.digest, store.load("c1").header.digest})
    store.load("c0")
    assert store.load("c2") is kept
    assert store.loaded.bytes == 3 * size
    # Contexts that are gone from memory or the folder leave nothing behind.
    assert len(store.loaded._newest) == len(store.loaded.digests) == 3
    store.forget("c0")
    shutil.rmtree(root / "c1")
    with pytest.raises(StoreError, match="no context 'c1'"):
        store.header("c1")
    assert (set(store.loaded._newest), set(store._known)) == ({"c1", "c2"}, {"c2"})


def test_each_rank_takes_its_heads(root):
    whole = ContextStore(root).load("c0")
    for size in (1, 2, 4, 8):
        seen = [heads_of_rank(4, size, rank) for rank in range(size)]
        assert sorted({head for a, b in seen for head in range(a, b)}) == [0, 1, 2, 3]
        assert {b - a for a, b in seen} == {max(1, 4 // size)}
        assert seen == sorted(seen)
    part = ContextStore(root, heads=(1, 3)).load("c0")
    for mine, layer in zip(part.layers, whole.layers, strict=True):
        assert mine.heads == 2
        for g in (0, 1):
            torch.testing.assert_close(mine.head(g), layer.head(g + 1), rtol=0, atol=0)
    assert part.bytes < whole.bytes


def test_a_context_inside_a_file_or_a_hidden_folder_is_refused(tmp_path, monkeypatch):
    (tmp_path / "store").write_text("no folder")
    assert not delete_context(tmp_path / "store" / "book")
    monkeypatch.setattr(os, "listdir", Mock(side_effect=PermissionError))
    with pytest.raises(PermissionError):
        delete_context(tmp_path / "book")
    with pytest.raises(OutputError, match="Cannot write to"):
        check_replaceable(tmp_path / "store" / "book")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(StoreError, match="not a folder that can be read"):
        check_replaceable(tmp_path)
