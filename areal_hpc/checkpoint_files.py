"""The files in a checkpoint, as the rank that owns the data writes and reads them: tensors and JSON, never a pickle.

    record = write_tensors(directory / "trainer.safetensors", state)     # to the controller, for the manifest
    state = read_tensors(found.path / "trainer.safetensors")

A writer hashes what it hands to the system, tensor by tensor: nothing is held twice, and what the disk says arrives as
an error number. It neither lists nor makes directories; the controller does that (checkpoint.py), and what has just
been made elsewhere is awaited for `SETTLE_S`, because shared file systems show it late. Readers wait for nothing: what
they read was complete before anybody named it to them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from areal_hpc.exits import Exit, RunError
from areal_hpc.waiting import Backoff

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 8 << 20
SETTLE_S = 10.0
LATE = (errno.ENOENT, errno.ESTALE)
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)

# Names of types in a safetensors header.
_TYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
}

_ADVICE = {
    errno.ENOSPC: "the file system is full",
    errno.EDQUOT: "your quota is used up",
    errno.EFBIG: "files of this size are not allowed here (ulimit -f)",
}


class CheckpointError(RunError):
    """A checkpoint that cannot be written or read; ends the run with `Exit.DISK` if nobody catches it."""

    def __init__(self, reason: str) -> None:
        super().__init__(Exit.DISK, reason)


@dataclass(frozen=True)
class FileRecord:
    """What the manifest knows of a file: plain name, size in bytes, SHA-256 in hex."""

    name: str
    num_bytes: int
    sha256: str


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> FileRecord:
    """Write arrays of any shape, zero-sized ones too, as safetensors. Raises CheckpointError, TypeError."""
    return _write_tensor_file(path, arrays, {}, _raw_array)


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> FileRecord:
    """Write tensors of any shape and device as safetensors; one at a time is copied to the host.

    They must not change while this runs. Raises CheckpointError, TypeError.
    """
    import torch

    def raw(tensor: torch.Tensor) -> memoryview:
        return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data

    return _write_tensor_file(path, tensors, metadata or {}, raw)


def write_json(path: Path, content: Any) -> FileRecord:
    """Write what JSON can hold. Raises CheckpointError, TypeError (`refuse_other_keys`)."""
    refuse_other_keys(content)
    return write_chunks(path, [json.dumps(content).encode()])


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """What `write_arrays` wrote, as copies of their own. Raises CheckpointError."""
    return _read_tensor_file(path, "np", np.array)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """What `write_tensors` wrote, on the CPU, as copies of their own. Raises CheckpointError."""
    return _read_tensor_file(path, "pt", lambda tensor: tensor.clone())


def read_json(path: Path) -> Any:
    """What `write_json` wrote. Raises CheckpointError."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from None


def write_chunks(path: Path, chunks: Iterable[bytes | memoryview], settle_s: float = SETTLE_S) -> FileRecord:
    """Write a new file, down to the disk; a part of one is removed again. Raises CheckpointError."""
    digest, num_bytes, made = hashlib.sha256(), 0, False
    try:
        with _create(path, settle_s) as file:
            made = True
            for chunk in chunks:
                for start in range(0, len(chunk), CHUNK_BYTES):
                    piece = chunk[start : start + CHUNK_BYTES]
                    digest.update(piece)
                    file.write(piece)
                    num_bytes += len(piece)
            file.flush()
            os.fsync(file.fileno())
    except BaseException as error:
        if made:
            with contextlib.suppress(OSError):
                path.unlink()
        if isinstance(error, OSError):
            raise CheckpointError(disk_sentence("write", path, error, num_bytes)) from None
        raise
    return FileRecord(path.name, num_bytes, digest.hexdigest())


def refuse_other_keys(content: Any, where: str = "") -> None:
    """Raises TypeError for keys that are no text: JSON would turn them into text without a word."""
    if isinstance(content, Mapping):
        for key, value in content.items():
            if not isinstance(key, str):
                raise TypeError(f"key {key!r} of {where or 'the content'} is no text")
            refuse_other_keys(value, f"{where}.{key}" if where else key)
    elif isinstance(content, (list, tuple)):
        for value in content:
            refuse_other_keys(value, where)


def disk_sentence(what: str, path: Path, error: OSError, num_bytes: int = 0) -> str:
    """What could not be done where, why, and how much room there is."""
    why = _ADVICE.get(error.errno or 0, (error.strerror or str(error)).lower())
    after = f" after {num_bytes:,} bytes" if num_bytes else ""
    try:
        free = f"; {shutil.disk_usage(path.parent).free:,} bytes are free there"
    except OSError:
        free = ""
    return f"cannot {what} {path}{after}: {why}{free}"


def sync_directory(path: Path) -> None:
    """Names in a directory are on disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _create(path: Path, settle_s: float) -> BinaryIO:
    # The controller made the directory a moment ago, on another node.
    deadline_s, pause = time.monotonic() + settle_s, Backoff(0.01, 0.5)
    while True:
        try:
            return open(path, "xb", buffering=1 << 20)
        except OSError as error:
            if error.errno not in LATE or time.monotonic() > deadline_s:
                raise
            pause.sleep()


def _raw_array(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _write_tensor_file(
    path: Path, tensors: Mapping[str, Any], metadata: Mapping[str, str], raw: Callable[[Any], memoryview]
) -> FileRecord:
    """Length of the header in 8 bytes, the header in JSON, then all values without gaps, widest types first."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    end = 0
    for name in names:
        kind = str(tensors[name].dtype).removeprefix("torch.")
        if kind not in _TYPES or name == "__metadata__":
            raise TypeError(f"{path.name}: {name!r} of type {kind} cannot be written")
        begin, end = end, end + int(tensors[name].nbytes)
        header[name] = {"dtype": _TYPES[kind], "shape": list(tensors[name].shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    values = (raw(tensors[name]) for name in names)
    return write_chunks(path, (chunk for part in ([len(text).to_bytes(8, "little"), text], values) for chunk in part))


def _read_tensor_file(path: Path, framework: str, copy: Callable[[Any], Any]) -> dict[str, Any]:
    from safetensors import SafetensorError, safe_open

    try:
        # Copied, because what safetensors returns may be the mapped file, and old checkpoints are deleted.
        with safe_open(path, framework=framework) as file:
            return {name: copy(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from None
