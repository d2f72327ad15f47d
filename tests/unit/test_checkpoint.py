"""Checkpoints: complete or not there, whatever is cut off, flipped, filled up or killed in between."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import multiprocessing
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save

from areal_hpc import checkpoint, checkpoint_files
from areal_hpc.checkpoint import (
    CheckpointError,
    Checkpoints,
    FileRecord,
    preflight_space,
    read_arrays,
    read_json,
    read_tensors,
    write_arrays,
    write_json,
    write_tensors,
)
from areal_hpc.exits import Exit

FORK = multiprocessing.get_context("fork")


def make(checkpoints: Checkpoints, step: int, attempt: int = 1, size: int = 256) -> Path:
    """A checkpoint of two files with contents that tell the step and the attempt."""
    path = checkpoints.begin(step, attempt)
    records = [
        write_arrays(path / "trainer.safetensors", {"w": np.full(size, step, np.float32)}),
        write_json(path / "controller.json", {"step": step, "attempt": attempt}),
    ]
    return checkpoints.commit(step, path, records, {"version": step})


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


@pytest.fixture
def three(tmp_path) -> Checkpoints:
    checkpoints = Checkpoints(tmp_path / "checkpoints", settle_s=0)
    for step in (10, 20, 30):
        make(checkpoints, step)
    return checkpoints


# ------------------------------------------------------------------------------------------------------------ files
def test_arrays_come_back_as_they_were(tmp_path):
    arrays = {
        "float": np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2],
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "strided": np.arange(10, dtype=np.int16)[::3],
        "bool": np.array([True, False, True]),
        "scalar": np.array(7, np.int64),
        "empty": np.zeros((3, 0, 2), np.int32),
        "odd length": np.arange(3, dtype=np.uint8),
        "half": np.array([1.5, -0.0, np.nan], np.float16),
    }
    record = write_arrays(tmp_path / "a.safetensors", arrays)
    raw = (tmp_path / "a.safetensors").read_bytes()
    assert record == FileRecord("a.safetensors", len(raw), hashlib.sha256(raw).hexdigest())
    for found in (read_arrays(tmp_path / "a.safetensors"), load_file(tmp_path / "a.safetensors")):
        assert set(found) == set(arrays)
        for name, array in arrays.items():
            assert found[name].dtype == array.dtype and found[name].shape == array.shape
            np.testing.assert_array_equal(found[name], array)


def test_the_file_is_byte_for_byte_what_safetensors_writes(tmp_path):
    arrays = {"b": np.arange(5, dtype=np.float32), "a": np.ones((2, 2), np.float32), "A": np.zeros(3, np.uint8)}
    write_arrays(tmp_path / "a.safetensors", arrays)
    assert (tmp_path / "a.safetensors").read_bytes() == save(arrays)
    write_arrays(tmp_path / "none.safetensors", {})
    assert read_arrays(tmp_path / "none.safetensors") == {}


def test_what_was_read_can_be_written_to_and_outlives_the_file(tmp_path):
    write_arrays(tmp_path / "a.safetensors", {"x": np.arange(4)})
    found = read_arrays(tmp_path / "a.safetensors")["x"]
    os.truncate(tmp_path / "a.safetensors", 0)
    found += 1
    assert found.tolist() == [1, 2, 3, 4]


def test_tensors_come_back_as_they_were(tmp_path):
    import torch

    base = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    tensors = {
        "bfloat16": torch.tensor([1.0, -2.5, 3.1415926, float("inf")], dtype=torch.bfloat16),
        "transposed": base.T,
        "parameter": torch.nn.Parameter(base),
        "tied": base,
        "step": torch.tensor(3, dtype=torch.int64),
        "empty": torch.zeros(0, 5, dtype=torch.bfloat16),
        "flags": torch.tensor([True, False]),
    }
    record = write_tensors(tmp_path / "t.safetensors", tensors)
    assert record.sha256 == hashlib.sha256((tmp_path / "t.safetensors").read_bytes()).hexdigest()
    found = read_tensors(tmp_path / "t.safetensors")
    os.truncate(tmp_path / "t.safetensors", 0)
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor.detach())


@pytest.mark.parametrize(
    "array", [np.array(["text"]), np.array([{}], dtype=object), np.arange(3, dtype=">f4"), np.array([1j])]
)
def test_what_cannot_be_written_is_named(tmp_path, array):
    with pytest.raises(TypeError, match="a.safetensors: 'bad' of type"):
        write_arrays(tmp_path / "a.safetensors", {"good": np.zeros(1), "bad": array})
    assert names(tmp_path) == []


def test_json_comes_back_as_it_was(tmp_path):
    content = {
        "cursor": [3, 17],
        "note": "é\ud800",
        "loss": 0.1 + 0.2,
        "none": None,
        "big": 2**70,
        "nested": [{"a": {}}],
    }
    record = write_json(tmp_path / "c.json", content)
    assert read_json(tmp_path / "c.json") == content
    assert record.num_bytes == (tmp_path / "c.json").stat().st_size


def test_json_refuses_keys_that_it_would_change(tmp_path):
    with pytest.raises(TypeError, match="key 5 of groups is no text"):
        write_json(tmp_path / "c.json", {"groups": [{5: 1}]})
    with pytest.raises(TypeError, match="key 5 of versions"):
        Checkpoints(tmp_path).commit(1, Checkpoints(tmp_path).begin(1, 1), [], {"versions": {5: 1}})


@pytest.mark.parametrize("read", [read_arrays, read_tensors, read_json])
@pytest.mark.parametrize("raw", [None, b"", b"{", b"\xff" * 100, b"\x10\0\0\0\0\0\0\0" + b"[" * 16])
def test_readers_say_what_they_cannot_read(tmp_path, read, raw):
    if raw is not None:
        (tmp_path / "x").write_bytes(raw)
    with pytest.raises(CheckpointError, match="cannot read .*/x: ") as caught:
        read(tmp_path / "x")
    assert caught.value.code == Exit.DISK


@pytest.mark.fault("pickle in the place of a checkpoint", row=26)
@pytest.mark.parametrize("read", [read_arrays, read_tensors, read_json])
def test_a_pickle_named_like_a_file_of_ours_is_not_executed(tmp_path, read):
    class Canary:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "executed"),))

    (tmp_path / "trainer.safetensors").write_bytes(pickle.dumps(Canary()))
    with pytest.raises(CheckpointError):
        read(tmp_path / "trainer.safetensors")
    assert names(tmp_path) == ["trainer.safetensors"]


def test_a_file_is_written_once(tmp_path):
    write_json(tmp_path / "c.json", 1)
    with pytest.raises(CheckpointError, match="cannot write .*c.json: file exists"):
        write_json(tmp_path / "c.json", 2)
    assert read_json(tmp_path / "c.json") == 1


def test_a_writer_awaits_the_directory_that_another_node_has_just_made(tmp_path):
    timer = threading.Timer(0.2, (tmp_path / "late").mkdir)
    timer.start()
    assert write_json(tmp_path / "late" / "c.json", {}).num_bytes == 2
    timer.join()


def test_a_writer_does_not_wait_for_ever(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="no such file or directory"):
        checkpoint_files.write_chunks(tmp_path / "never" / "c.json", [b""], settle_s=0.05)


def test_every_file_and_directory_is_synced(tmp_path, monkeypatch):
    synced, sizes, real = [], {}, os.fsync

    def fsync(descriptor):
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sizes[synced[-1]] = os.fstat(descriptor).st_size
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    path = make(Checkpoints(tmp_path / "root"), 1)
    for name in names(path):
        assert sizes[name] == (path / name).stat().st_size, "all of it had been handed to the system"
    assert synced == ["trainer.safetensors", "controller.json", "manifest.json", ".step_1.attempt_1", "root"]


# ------------------------------------------------------------------------------------------------------ directories
def test_a_checkpoint_is_found_with_its_facts(three):
    found = three.newest()
    assert (found.step, found.path.name, found.attempt, found.refused) == (30, "step_30", 1, ())
    assert found.facts == {"version": 30} and set(found.files) == {"trainer.safetensors", "controller.json"}
    assert read_arrays(found.path / "trainer.safetensors")["w"].tolist() == [30.0] * 256
    assert names(three.root) == ["step_10", "step_20", "step_30"]
    assert names(found.path) == ["controller.json", "manifest.json", "trainer.safetensors"]


def test_steps_are_ordered_as_numbers(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in (9, 100, 20):
        make(checkpoints, step)
    assert checkpoints.newest().step == 100


def test_nothing_is_there_at_first(tmp_path):
    assert Checkpoints(tmp_path / "no").newest() is None and Checkpoints(tmp_path / "no").prune() == []
    Checkpoints(tmp_path).begin(5, 1)
    (tmp_path / "step_x").mkdir()
    assert Checkpoints(tmp_path).newest() is None


def damage_truncate(path, name, rng):
    file = path / name
    os.truncate(file, rng.randrange(file.stat().st_size))


def damage_flip(path, name, rng):
    raw = bytearray((path / name).read_bytes())
    raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    (path / name).write_bytes(raw)


def damage_delete(path, name, rng):
    (path / name).unlink()


def damage_lengthen(path, name, rng):
    with open(path / name, "ab") as file:
        file.write(b"x")


def damage_directory(path, name, rng):
    (path / name).unlink()
    (path / name).mkdir()


def damage_fifo(path, name, rng):
    (path / name).unlink()
    os.mkfifo(path / name)


@pytest.mark.fault("checkpoint cut, flipped, emptied", row=14)
@pytest.mark.parametrize("damage", [damage_truncate, damage_flip, damage_delete, damage_lengthen, damage_directory])
@pytest.mark.parametrize("name", ["trainer.safetensors", "controller.json", "manifest.json"])
@pytest.mark.parametrize("seed", range(5))
def test_a_damaged_checkpoint_is_refused_and_the_one_before_taken(three, damage, name, seed, monkeypatch):
    damage(three.root / "step_30", name, random.Random(f"{seed} {name}"))
    for reader in ("read_arrays", "read_tensors"):
        monkeypatch.setattr(checkpoint, reader, None)  # not a tensor is read before the check
    for fresh in (three, Checkpoints(three.root)):
        found = fresh.newest()
        assert found.step == 20, "the process that wrote it sees the damage, too"
        assert len(found.refused) == 1 and found.refused[0].startswith("step_30: ") and name in found.refused[0]
        assert "\n" not in found.refused[0]


@pytest.mark.parametrize("size", [0, 7, 8, 20, 1095, 1096])
def test_the_reason_says_how_much_is_there(three, size):
    file = three.root / "step_30" / "trainer.safetensors"
    full = file.stat().st_size
    assert full == 8 + 64 + 1024
    os.truncate(file, min(size, full - 1))
    assert three.newest().refused == (f"step_30: trainer.safetensors has {min(size, full - 1):,} of 1,096 bytes",)


def test_a_pipe_in_the_place_of_a_file_does_not_stop_the_run(three):
    damage_fifo(three.root / "step_30", "controller.json", None)
    assert three.newest().refused == ("step_30: controller.json is no file",)


@pytest.mark.parametrize(
    "text, reason",
    [
        ("", "manifest.json is damaged, it is no JSON"),
        ("garbage", "manifest.json is damaged, it is no JSON"),
        ("[" * 100_000, "manifest.json is damaged, it is no JSON"),
        ("[]", "manifest.json is damaged, it has no format"),
        ("{}", "manifest.json is damaged, it has no format"),
        ('{"format": 2, "files": "elsewhere"}', "manifest.json has format 2, this version reads 1"),
        ('{"format": 1}', "manifest.json is damaged, its SHA-256 is not the one that was written"),
    ],
)
def test_a_manifest_that_is_none(three, text, reason):
    (three.root / "step_30" / "manifest.json").write_text(text)
    assert three.newest().refused == (f"step_30: {reason}",)
    (three.root / "step_20" / "manifest.json").unlink()
    found = three.newest()
    assert found.step == 10
    assert found.refused == (f"step_30: {reason}", "step_20: manifest.json: No such file or directory")


def forge(path: Path, **changes) -> None:
    """A manifest with other contents and a right checksum."""
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["content"] |= changes
    manifest["sha256"] = checkpoint._digest(manifest["content"])
    (path / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"step": 31}, "manifest.json is that of step 31"),
        ({"files": None}, "manifest.json lacks something"),
        ({"files": [{"name": "x"}]}, "manifest.json lacks something"),
        ({"files": [{"name": "../step_20/controller.json", "num_bytes": 1, "sha256": ""}]}, "is no name for a file"),
        ({"files": [{"name": "/etc/passwd", "num_bytes": 1, "sha256": ""}]}, "is no name for a file"),
    ],
)
def test_a_manifest_that_lies(three, changes, reason):
    forge(three.root / "step_30", **changes)
    found = three.newest()
    assert found.step == 20 and reason in found.refused[0]


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew_by_itself(three):
    for step in (10, 20, 30):
        os.truncate(three.root / f"step_{step}" / "controller.json", 3)
    with pytest.raises(CheckpointError) as caught:
        three.newest()
    assert caught.value.reason.splitlines()[1:] == [
        "  step_30: controller.json has 3 of 26 bytes",
        "  step_20: controller.json has 3 of 26 bytes",
        "  step_10: controller.json has 3 of 26 bytes",
        "move the directory away to begin at step 0",
    ]
    assert three.prune() == []


def test_leftovers_go_with_the_next_begin_and_are_counted(three):
    killed = Checkpoints(three.root)
    write_json(killed.begin(40, 1) / "controller.json", {})
    (three.root / ".step_10.removed_17").mkdir()
    (three.root / "notes.txt").write_text("mine")
    assert three.newest().step == 30
    later = Checkpoints(three.root)
    path = later.begin(40, 2)
    assert later.num_leftovers == 2
    assert names(three.root) == [".step_40.attempt_2", "notes.txt", "step_10", "step_20", "step_30"]
    assert names(path) == []


def test_two_checkpoints_may_be_in_the_making(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    first, second = checkpoints.begin(1, 1), checkpoints.begin(2, 1)
    assert first.is_dir() and second.is_dir() and checkpoints.num_leftovers == 0


def test_who_is_late_for_a_try_that_was_given_up_does_not_get_into_the_next(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    first = checkpoints.begin(1, 3)
    checkpoints.abandon(first)
    second = checkpoints.begin(1, 3)
    assert first != second and not first.exists()
    assert names(checkpoints.commit(1, second, [], {})) == ["manifest.json"]
    assert checkpoints.newest().attempt == 3


@pytest.mark.parametrize(
    "record, reason",
    [
        (FileRecord("controller.json", 3, ""), "controller.json has 2 of 3 bytes"),
        (FileRecord("lost.safetensors", 3, ""), "lost.safetensors is missing"),
        (FileRecord("../x", 3, ""), "'../x' is no name for a file of a checkpoint"),
        (FileRecord("manifest.json", 3, ""), "'manifest.json' is no name for a file of a checkpoint"),
    ],
)
def test_what_is_not_there_is_not_committed(three, record, reason):
    path = three.begin(40, 1)
    write_json(path / "controller.json", {})
    with pytest.raises(CheckpointError) as caught:
        three.commit(40, path, [record], {})
    assert caught.value.reason == f"cannot commit step_40 in {three.root}: {reason}"
    assert names(three.root) == ["step_10", "step_20", "step_30"] and three.newest().step == 30


def test_two_ranks_with_the_same_file_name_are_an_error(three):
    path = three.begin(40, 1)
    record = write_json(path / "a.json", {})
    with pytest.raises(ValueError, match="two records have the same name"):
        three.commit(40, path, [record, record], {})
    assert not path.exists()


def test_files_that_become_visible_late_are_awaited(tmp_path):
    checkpoints = Checkpoints(tmp_path, settle_s=10)
    path = checkpoints.begin(1, 1)
    record = FileRecord("a.json", 2, hashlib.sha256(b"{}").hexdigest())
    timer = threading.Timer(0.2, lambda: write_json(path / "a.json", {}))
    timer.start()
    checkpoints.commit(1, path, [record], {})
    timer.join()
    assert checkpoints.newest().step == 1


# ---------------------------------------------------------------------------------------------- replacing and pruning
def test_a_step_of_an_earlier_attempt_is_replaced(three):
    make(three, 30, attempt=2)
    assert three.newest().attempt == 2 and names(three.root) == ["step_10", "step_20", "step_30"]


def test_replacing_never_leaves_a_moment_without_a_valid_checkpoint(tmp_path, monkeypatch):
    """The only checkpoint is replaced; after every single change of the disk somebody looks."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    make(checkpoints, 30, attempt=1)
    seen = []

    def look(real):
        def do(*arguments, **keywords):
            result = real(*arguments, **keywords)
            seen.append(Checkpoints(tmp_path).newest().attempt)
            return result

        return do

    for module, name in ((os, "rename"), (os, "mkdir"), (os, "rmdir"), (os, "unlink"), (os, "fsync")):
        monkeypatch.setattr(module, name, look(getattr(module, name)))
    make(checkpoints, 30, attempt=2)
    checkpoints.prune()
    assert sorted(seen) == seen and set(seen) == {1, 2}


def test_a_crash_while_a_step_is_replaced(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    make(checkpoints, 30, attempt=1)
    real, renames = os.rename, []

    def rename(source, target):
        renames.append(Path(target).name)
        if len(renames) == 2:
            raise OSError(errno.EIO, "Input/output error")
        return real(source, target)

    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="cannot commit"):
        patch.setattr(os, "rename", rename)
        make(checkpoints, 30, attempt=2)
    assert renames == ["step_30.replaced", "step_30"] and names(tmp_path) == ["step_30.replaced"]
    later = Checkpoints(tmp_path)
    assert later.newest().step == 30 and later.newest().attempt == 1
    make(later, 30, attempt=3)
    assert names(tmp_path) == ["step_30"] and later.newest().attempt == 3


def test_a_step_that_was_being_replaced_is_replaced_again(tmp_path):
    """A crash between the two renames left only the old one, under its other name."""
    make(Checkpoints(tmp_path), 20, attempt=1).rename(tmp_path / "step_20.replaced")
    checkpoints = Checkpoints(tmp_path)
    make(checkpoints, 20, attempt=2)
    assert names(tmp_path) == ["step_20"] and checkpoints.newest().attempt == 2


def test_the_good_old_one_stays_until_a_damaged_replacement_is_replaced(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    make(checkpoints, 30, attempt=1).rename(tmp_path / "kept")
    make(checkpoints, 30, attempt=2)
    (tmp_path / "kept").rename(tmp_path / "step_30.replaced")
    os.truncate(tmp_path / "step_30" / "controller.json", 1)
    later = Checkpoints(tmp_path)
    found = later.newest()
    assert (found.attempt, found.path.name) == (1, "step_30.replaced")
    assert found.refused == ("step_30: controller.json has 1 of 26 bytes",)
    real = os.rename

    def rename(source, target):
        real(source, target)
        assert Checkpoints(tmp_path).newest().attempt in (1, 3)

    monkeypatch.setattr(os, "rename", rename)
    make(later, 30, attempt=3)
    assert names(tmp_path) == ["step_30"] and later.newest().attempt == 3


def test_the_newest_are_kept(three):
    make(three, 40)
    assert three.prune() == ["step_20", "step_10"]
    assert names(three.root) == ["step_30", "step_40"] and three.prune() == []


def test_a_crash_between_rename_and_prune_leaves_too_many(three):
    assert Checkpoints(three.root).prune() == ["step_10"]


def test_what_was_replaced_is_no_checkpoint_of_its_own(three):
    """A crash after the second rename left both; they count as one, and the old one goes."""
    shutil.copytree(three.root / "step_30", three.root / "step_30.replaced")
    assert three.newest().path.name == "step_30"
    assert three.prune() == ["step_30.replaced", "step_10"]


def test_a_crash_while_old_ones_are_removed_leaves_no_half_checkpoint(three, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path, **_: (path / "controller.json").unlink())
        assert three.prune() == ["step_10"]
    assert names(three.root)[0].startswith(".step_10.removed_") and names(three.root)[1:] == ["step_20", "step_30"]
    three.begin(40, 1)
    assert names(three.root) == [".step_40.attempt_1", "step_20", "step_30"]


@pytest.mark.parametrize("fresh", [False, True], ids=["same process", "next attempt"])
@pytest.mark.parametrize("damage", [damage_truncate, damage_flip, damage_delete])
def test_damaged_ones_do_not_count_as_kept(three, damage, fresh):
    damage(three.root / "step_30", "trainer.safetensors", random.Random(1))
    checkpoints = Checkpoints(three.root) if fresh else three
    assert checkpoints.prune() == []
    make(checkpoints, 40)
    assert checkpoints.prune() == ["step_10"]
    assert names(three.root) == ["step_20", "step_30", "step_40"]
    make(checkpoints, 50)
    assert checkpoints.prune() == ["step_30", "step_20"], "older than those that are kept, the damaged one goes, too"


def test_the_last_valid_one_is_never_removed(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    for step in (1, 2, 3):
        make(checkpoints, step)
    for step in (2, 3):
        damage_flip(tmp_path / f"step_{step}", "trainer.safetensors", random.Random(2))
    assert checkpoints.prune() == [] and checkpoints.newest().step == 1


def test_pruning_does_not_read_again_what_this_process_wrote(three, monkeypatch):
    later = Checkpoints(three.root)
    for step in (20, 30):
        assert later.trust(three.root / f"step_{step}").facts == {"version": step}
    assert later.trust(three.root / "step_99") is None
    monkeypatch.setattr(checkpoint, "_sha256", None)
    assert later.prune() == ["step_10"] and three.prune() == []


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
def test_an_adopted_file_outlives_the_checkpoint_it_came_from(tmp_path, monkeypatch, links):
    checkpoints = Checkpoints(tmp_path, keep=1)
    make(checkpoints, 10)
    old = checkpoints.newest()
    if not links:

        def refuse(*_):
            raise OSError(errno.ENOTSUP, "Operation not supported")

        monkeypatch.setattr(os, "link", refuse)
    for step in (10, 11):  # replaced, then adopted from where it was adopted
        path = checkpoints.begin(step, 2)
        record = next(r for r in old.files.values() if r.name.endswith(".safetensors"))
        kept = checkpoints.adopt(path, old.path / record.name, record)
        assert kept.name == f"kept_{record.sha256[:16]}.safetensors" and kept.sha256 == record.sha256
        checkpoints.commit(step, path, [kept, write_json(path / "new.json", {})], {})
        checkpoints.prune()
        old = Checkpoints(tmp_path).newest()
        assert old.step == step and names(tmp_path) == [f"step_{step}"]
        assert read_arrays(old.path / kept.name)["w"].tolist() == [10.0] * 256


def test_a_damaged_file_is_not_adopted(three, monkeypatch):
    path, old = three.begin(40, 1), three.newest()
    record = old.files["controller.json"]
    damage_flip(old.path, "controller.json", random.Random(3))
    three.adopt(path, old.path / "controller.json", record)
    three.commit(40, path, [three.adopt(path, old.path / "controller.json", record)], {})
    found = Checkpoints(three.root).newest()
    assert found.step == 20 and len(found.refused) == 2, "linked as it is, and found out"
    path = three.begin(50, 1)
    with pytest.raises(CheckpointError, match="cannot keep .*gone"):
        three.adopt(path, three.root / "gone", record)

    def refuse(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(CheckpointError, match="cannot keep .*it is damaged"):
        three.adopt(path, old.path / "controller.json", record)
    good = old.files["trainer.safetensors"]
    assert three.adopt(path, old.path / good.name, good) == three.adopt(path, old.path / good.name, good)


# -------------------------------------------------------------------------------------------------------- disk full
@contextlib.contextmanager
def file_size_limit(num_bytes):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("limit", [0, 10, 5000, 99_999])
def test_a_file_that_may_not_be_that_large(three, limit):
    path = three.begin(40, 1)
    with file_size_limit(limit), pytest.raises(CheckpointError, match=r"ulimit -f.*bytes are free there") as caught:
        write_arrays(path / "trainer.safetensors", {"w": np.zeros(100_000, np.uint8)})
    assert caught.value.code == Exit.DISK and str(path / "trainer.safetensors") in caught.value.reason
    assert names(path) == []
    three.abandon(path)
    assert names(three.root) == ["step_10", "step_20", "step_30"] and three.newest().step == 30


def test_a_manifest_that_cannot_be_written(three):
    path = three.begin(40, 1)
    record = write_json(path / "controller.json", {})
    with file_size_limit(100), pytest.raises(CheckpointError, match="manifest.json.*ulimit -f"):
        three.commit(40, path, [record], {})
    assert names(three.root) == ["step_10", "step_20", "step_30"] and three.newest().step == 30


@pytest.mark.parametrize("number, words", [(errno.ENOSPC, "file system is full"), (errno.EDQUOT, "quota is used up")])
def test_the_disk_may_say_so_only_when_it_is_asked_to_keep_it(three, monkeypatch, number, words):
    path = three.begin(40, 1)

    def fsync(_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CheckpointError, match=f"after 2 bytes: .*{words}"):
        write_json(path / "controller.json", {})
    assert names(path) == []


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = os.geteuid() == 0 and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True, timeout=30, check=False
    )
    if not mounted or mounted.returncode:
        pytest.skip("a file system can be mounted only by root")
    try:
        yield place
    finally:
        subprocess.run(["umount", place], timeout=30, check=True)


def test_a_full_disk_leaves_the_checkpoint_before(small_disk):
    checkpoints = Checkpoints(small_disk / "checkpoints", settle_s=0)
    make(checkpoints, 10, size=160_000)  # 640 KB of 1,048,576 bytes
    assert "3 checkpoints of 640,000 bytes need 1,920,000" in preflight_space(checkpoints.root, 640_000)
    for _ in range(2):
        path = checkpoints.begin(20, 1)
        with pytest.raises(CheckpointError, match=r"the file system is full; [0-9,]+ bytes are free there"):
            write_arrays(path / "trainer.safetensors", {"w": np.zeros(160_000, np.float32)})
        assert names(path) == [], "the room is given back at once"
        checkpoints.abandon(path)
        assert Checkpoints(checkpoints.root).newest().step == 10
    make(checkpoints, 30, size=1000)
    assert names(checkpoints.root) == ["step_10", "step_30"] and checkpoints.num_leftovers == 0
    assert Checkpoints(checkpoints.root).newest().step == 30


def test_room_is_told_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: SimpleNamespace(free=3000))
    assert preflight_space(tmp_path / "not" / "yet", 1000) is None
    assert preflight_space(tmp_path / "not" / "yet", 1001) == (
        f"{tmp_path}/not/yet has room for 3,000 bytes, but 3 checkpoints of 1,001 bytes need 3,003: "
        "make room, or choose a run_dir elsewhere"
    )
    assert preflight_space(tmp_path, 750, keep=3) is None and preflight_space(tmp_path, 751, keep=3)
    make(Checkpoints(tmp_path), 1, size=1)
    assert preflight_space(tmp_path, 1001) is None, "what older checkpoints occupy will be given back"


# ----------------------------------------------------------------------------------------------------------- SIGKILL
def commit_for_ever(root: Path, attempt: int, said: int) -> None:
    """Steps on and on, now and then the same one again; each is said when it is committed."""
    checkpoints = Checkpoints(root)
    found = checkpoints.newest()
    step = found.step if found else 0
    for number in range(1_000_000):
        step += number % 3 != 2
        make(checkpoints, step, attempt, size=50_000)
        os.write(said, f"{step}\n".encode())
        checkpoints.prune()


@pytest.mark.fault("checkpoint writer killed at any moment", row=14)
def test_a_writer_killed_at_any_moment_leaves_a_valid_checkpoint(tmp_path):
    root, rng, committed, leftovers = tmp_path / "checkpoints", random.Random(5), 0, 0
    for attempt in range(1, 31):
        reader, writer = os.pipe()
        process = FORK.Process(target=commit_for_ever, args=(root, attempt, writer))
        process.start()
        os.close(writer)
        time.sleep(rng.uniform(0.02, 0.12))
        os.kill(process.pid, signal.SIGKILL)
        process.join(60)
        with os.fdopen(reader) as pipe:
            said = pipe.read().split()
        committed = int(said[-1]) if said else committed
        leftovers += sum(name.startswith(".") or name.endswith("replaced") for name in names(root))
        found = Checkpoints(root).newest()
        assert (found.step if found else 0) >= committed, "never older than the last commit that returned"
        if found:
            assert found.refused == (), "what is visible is complete"
            assert read_json(found.path / "controller.json") == {"step": found.step, "attempt": found.attempt}
            assert read_arrays(found.path / "trainer.safetensors")["w"].tolist() == [found.step] * 50_000
    assert committed > 30 and leftovers > 10, "the kills came while something was being written"


def test_importing_needs_neither_torch_nor_safetensors():
    code = "import sys, areal_hpc.checkpoint; print(sorted({'torch', 'safetensors', 'mpi4py'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
