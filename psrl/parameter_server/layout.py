"""A weight version as one flat buffer: where each tensor lies.

Invariant: slices begin at multiples of 64 bytes, do not overlap and lie in the manifest's order; bytes between them are zero. Reading
is zero-copy: the tensors are views of the buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from psrl.errors import WeightSyncError
from psrl.protocols import TensorSlice, WeightManifest
from psrl.types import PolicyVersion

ALIGNMENT_BYTES = 64
"""A cache line, and enough for every vector load."""

NamedTensors = Iterable[tuple[str, torch.Tensor]]


def lay_out(named_tensors: NamedTensors, *, version: PolicyVersion) -> WeightManifest:
    """Give each tensor its place, weights of one block side by side. The checksum is empty until the bytes are written.

    Example:
        Two float32 tensors of shapes (3,) and (2, 2) lie at offsets 0 and 64; total_bytes is 128.

    Raises:
        WeightSyncError: A name comes twice.
    """
    slices = []
    offset = 0
    seen: set[str] = set()
    for name, tensor in _side_by_side(named_tensors):
        if name in seen:
            raise WeightSyncError(f"tensor {name} is given twice")
        seen.add(name)
        size_bytes = tensor.numel() * tensor.element_size()
        dtype = str(tensor.dtype).removeprefix("torch.")
        slices.append(TensorSlice(name=name, dtype=dtype, shape=tuple(tensor.shape), offset=offset, size_bytes=size_bytes))
        offset += -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return WeightManifest(version=version, tensors=tuple(slices), total_bytes=offset, checksum="")


def _side_by_side(named_tensors: NamedTensors) -> NamedTensors:
    """Ordered so that what a block multiplies with the same input lies together (q, k, v; gate, up), and can be used as one matrix.

    Example:
        a.q.weight, a.q.bias, a.k.weight, a.k.bias -> a.q.weight, a.k.weight, a.q.bias, a.k.bias.
    """
    blocks: dict[str, dict[str, list[tuple[str, torch.Tensor]]]] = {}
    for name, tensor in named_tensors:
        path = name.split(".")
        blocks.setdefault(".".join(path[:-2]) or name, {}).setdefault(path[-1], []).append((name, tensor))
    return [named for kinds in blocks.values() for group in kinds.values() for named in group]


def pieces_of(named_tensors: NamedTensors, manifest: WeightManifest) -> Iterator[tuple[int, np.ndarray]]:
    """The bytes of each tensor with their offset, as the manifest says; tensors on the CPU are not copied.

    Args:
        named_tensors: The same names, shapes and dtypes, in any order; on any device.
        manifest: From `lay_out`.

    Raises:
        WeightSyncError: A tensor is missing, unknown or of another shape or dtype.
    """
    missing = {piece.name: piece for piece in manifest.tensors}
    for name, tensor in named_tensors:
        piece = missing.pop(name, None)
        if piece is None:
            raise WeightSyncError(f"tensor {name} is not in the manifest or is given twice")
        if piece.shape != tuple(tensor.shape) or _dtype_of(piece) != tensor.dtype:
            raise WeightSyncError(f"tensor {name} is {tensor.dtype} {tuple(tensor.shape)}, the manifest says {piece.dtype} {piece.shape}")
        flat = tensor.detach().contiguous().cpu().reshape(-1)
        yield piece.offset, flat.view(torch.uint8).numpy()
    if missing:
        raise WeightSyncError(f"{len(missing)} tensors of the manifest were not given, such as {sorted(missing)[:3]}")


def read_tensors(buffer: memoryview | np.ndarray | bytes, manifest: WeightManifest) -> dict[str, torch.Tensor]:
    """Views of the buffer by name; they live as long as it does and are read-only where it is (do not write to them).

    Raises:
        WeightSyncError: The buffer is shorter than the manifest says, or a slice does not fit its shape.
    """
    flat = np.frombuffer(buffer, dtype=np.uint8)
    if flat.nbytes < manifest.total_bytes:
        raise WeightSyncError(f"buffer has {flat.nbytes} bytes, the manifest of version {manifest.version} says {manifest.total_bytes}")
    # One storage for all of them, so that neighbours can be seen as one matrix.
    storage = torch.frombuffer(flat.data, dtype=torch.uint8) if flat.nbytes else torch.empty(0, dtype=torch.uint8)
    return {piece.name: _view_of(storage, piece) for piece in manifest.tensors}


def _view_of(storage: torch.Tensor, piece: TensorSlice) -> torch.Tensor:
    dtype = _dtype_of(piece)
    numel = int(np.prod(piece.shape, dtype=np.int64))
    if numel * dtype.itemsize != piece.size_bytes or piece.offset + piece.size_bytes > storage.numel():
        raise WeightSyncError(f"tensor {piece.name}: {piece.size_bytes} bytes at {piece.offset} do not hold {piece.dtype} {piece.shape}")
    if numel == 0:
        return torch.empty(piece.shape, dtype=dtype)
    return storage[piece.offset : piece.offset + piece.size_bytes].view(dtype).view(piece.shape)


def _dtype_of(piece: TensorSlice) -> torch.dtype:
    dtype = getattr(torch, piece.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightSyncError(f"tensor {piece.name}: {piece.dtype!r} is no dtype of torch")
    return dtype
