"""A replay buffer to and from a folder, every row whole."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchrl_trl_bridge.buffers.encoding import Encoder, decode
from torchrl_trl_bridge.compat import torchrl as compat

if TYPE_CHECKING:
    from torchrl.data import ReplayBuffer

FORMAT = "torchrl-trl-bridge replay buffer"
FORMAT_VERSION = 1

_INDEX = "buffer.json"
_TENSORS = "tensors-{}.safetensors"
_BESIDE = "saving-{}"


def save_buffer(replay_buffer: ReplayBuffer, folder: str | os.PathLike[str]) -> None:
    """Saves a replay buffer, which TorchRL cannot do where it holds text.

    Args:
        replay_buffer: any buffer of list or tensor storages, ensembles and Ray buffers included (these write where
            their actor is). It may be in use: what is saved is its state at one moment.
        folder: where to; made if need be. A buffer saved there before is replaced in one step: whatever happens, the
            folder holds the old one or the new one.

    Raises:
        ImportError: if ``safetensors`` is not installed.
        NotADirectoryError: if ``folder`` is a file.
        TypeError: if ``replay_buffer`` is not one, and for rows that hold objects without an open form; it names the
            key.
        ValueError: if the storage has lost rows' strings already (a ``LazyMemmapStorage`` does).

    Notes:
        Saved are the rows with their order, classes, dtypes, None fields and metadata; the states of writer, sampler
        and transforms; and the buffer's own generator, if it has one. Not saved are batches that the buffer prefetched.

        Tensors go to one safetensors file, everything else to ``buffer.json``, which names it. Nothing is pickled.

    Examples:
        >>> import tempfile
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyStackStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyStackStorage(100))
        >>> _ = rb.add(TensorDict({"tokens": torch.arange(3), "text": "abc"}))
        >>> folder = tempfile.mkdtemp()
        >>> save_buffer(rb, folder)
        >>> restored = ReplayBuffer(storage=LazyStackStorage(100))
        >>> load_buffer(restored, folder)
        >>> restored[0]["text"], restored[0]["tokens"]
        ('abc', tensor([0, 1, 2]))
    """
    _check(replay_buffer, folder)
    compat.run_beside(replay_buffer, _save, os.path.abspath(folder))


def load_buffer(replay_buffer: ReplayBuffer, folder: str | os.PathLike[str]) -> None:
    """Replaces what a replay buffer holds by what `save_buffer` saved.

    Args:
        replay_buffer: a buffer made like the one that was saved: of the same kind of storage, large enough, with the
            same classes of sampler and writer. It is not touched if the saved one does not fit.
        folder: where `save_buffer` wrote it.

    Raises:
        FileNotFoundError: if there is none.
        NotADirectoryError: if ``folder`` is a file.
        TypeError: if ``replay_buffer`` is not one.
        ImportError: if ``safetensors`` is not installed.
        ValueError: if it was written by a newer release in a format that this one does not know, or does not fit.
    """
    _check(replay_buffer, folder)
    compat.run_beside(replay_buffer, _load, os.path.abspath(folder))


def _check(replay_buffer: Any, folder: Any) -> None:
    if not compat.is_replay_buffer(replay_buffer):
        given = f"{type(replay_buffer).__name__}" + (
            ": pass its replay_buffer" if hasattr(replay_buffer, "replay_buffer") else ""
        )
        raise TypeError(f"replay_buffer must be a torchrl ReplayBuffer instance, got {given}.")
    if os.path.isfile(folder):
        raise NotADirectoryError(f"{os.fspath(folder)!r} is a file, and a buffer is saved in a folder of its own.")
    if importlib.util.find_spec("safetensors") is None:
        raise ImportError(
            "saving a buffer needs the optional 'safetensors' dependency: "
            'pip install "torchrl-trl-bridge[trl]" (or safetensors alone).'
        )


def _save(replay_buffer: Any, folder: str) -> None:
    if compat.shares_strings_between_rows(replay_buffer) and compat.holds_python_values(replay_buffer):
        raise ValueError(
            "the rows hold Python values in a LazyMemmapStorage, which keeps the first row's value for every row: the "
            "others are lost already. Keep such rows in a LazyStackStorage, ListStorage or LazyTensorStorage."
        )
    encoder = Encoder()
    with _uncollected():
        content = _encode(replay_buffer, encoder)
    index = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "tensors": _TENSORS.format(uuid.uuid4().hex),
        "content": content,
    }
    _write(Path(folder), index, encoder.tensors)


def _encode(replay_buffer: Any, encoder: Encoder) -> dict[str, Any]:
    buffers = compat.members(replay_buffer)
    with compat.held_still(replay_buffer):
        if buffers is not None:
            members = [_encode(buffer, encoder) for buffer in buffers]
            return {"members": members, "state": encoder.encode([compat.state_of(replay_buffer)], "the buffer's state")}
        kind, rows = compat.stored_content(replay_buffer)
        return {
            "kind": kind,
            "parts": compat.part_names(replay_buffer),
            "row_count": len(replay_buffer),
            "rows": encoder.encode(rows) if rows else None,
            "state": encoder.encode([compat.state_of(replay_buffer)], "the buffer's state"),
        }


def _write(folder: Path, index: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    beside = folder / _BESIDE.format(uuid.uuid4().hex)
    beside.mkdir(parents=True)
    save_file(tensors, beside / index["tensors"])
    text = json.dumps(index, ensure_ascii=False, separators=(",", ":"))
    (beside / _INDEX).write_text(text, encoding="utf-8", errors="surrogatepass")
    # The index is replaced in one step, and names a file of tensors that is in its place by then.
    for name in (index["tensors"], _INDEX):
        _sync(beside / name)
        os.replace(beside / name, folder / name)
        _sync(folder)
    for old in folder.glob(_TENSORS.format("*")):  # of the buffer saved before
        if old.name != index["tensors"]:
            old.unlink(missing_ok=True)
    for old in folder.glob(_BESIDE.format("*")):  # and of saves that were interrupted
        shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    """Returns when a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _load(replay_buffer: Any, folder: str) -> None:
    from safetensors.torch import load_file

    path = Path(folder) / _INDEX
    if not path.exists():
        raise FileNotFoundError(f"{folder} holds no replay buffer: there is no {_INDEX} in it.")
    index = json.loads(path.read_text(encoding="utf-8", errors="surrogatepass"))
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise ValueError(f"{path} was not written by save_buffer.")
    if index["version"] > FORMAT_VERSION:
        raise ValueError(
            f"{path} has format version {index['version']}, of a newer torchrl-trl-bridge; this one reads versions up "
            f"to {FORMAT_VERSION}. Upgrade it."
        )
    tensors = load_file(Path(folder) / index["tensors"])
    _check_fit(replay_buffer, index["content"])
    with _uncollected():
        _restore(replay_buffer, index["content"], tensors)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Without garbage collection, which would look at each of many new objects several times: half of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _check_fit(replay_buffer: Any, content: dict[str, Any]) -> None:
    buffers = compat.members(replay_buffer)
    saved = content.get("members")
    if (buffers is None) != (saved is None) or (buffers is not None and len(buffers) != len(saved or ())):
        raise ValueError(
            f"the saved buffer is {_described(saved)}, and this one is {_described(buffers)}: make it like that one."
        )
    if buffers is not None:
        for buffer, member in zip(buffers, saved or (), strict=True):
            _check_fit(buffer, member)
        return
    kind, _ = compat.stored_content(replay_buffer, rows=False)
    parts = compat.part_names(replay_buffer)
    if kind != content["kind"]:
        raise ValueError(
            f"the saved buffer has a {content['parts']['storage']}, whose rows a {parts['storage']} cannot take: give "
            f"the buffer a {content['parts']['storage']}."
        )
    for part in ("sampler", "writer"):
        if parts[part] != content["parts"][part]:
            raise ValueError(
                f"the saved buffer has a {content['parts'][part]}, and this one a {parts[part]}, which does not know "
                f"its state: make the buffer with that {part}."
            )
    if content["row_count"] > compat.capacity(replay_buffer):
        raise ValueError(
            f"the saved buffer holds {content['row_count']} rows, and this one takes {compat.capacity(replay_buffer)}: "
            "make it at least as large."
        )


def _described(buffers: Any) -> str:
    return "a single one" if buffers is None else f"an ensemble of {len(buffers)}"


def _restore(replay_buffer: Any, content: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    (state,) = decode(content["state"], tensors)
    buffers = compat.members(replay_buffer)
    if buffers is not None:
        for buffer, member in zip(buffers, content["members"], strict=True):
            _restore(buffer, member, tensors)
        compat.set_state(replay_buffer, state)
        return
    rows = [] if content["rows"] is None else decode(content["rows"], tensors)
    with compat.held_still(replay_buffer):
        compat.set_content(replay_buffer, rows)
        compat.set_state(replay_buffer, state)
