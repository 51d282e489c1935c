"""A weight version as one flat buffer: where each tensor lies, and the checksum over all of it.

Invariant: slices begin at multiples of 64 bytes, do not overlap and lie in the order of the named tensors; bytes between them are
zero. Reading is zero-copy: the tensors are views of the buffer.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from psrl.errors import WeightSyncError
from psrl.protocols import TensorSlice, WeightManifest
from psrl.types import PolicyVersion

ALIGNMENT_BYTES = 64
"""A cache line, and enough for every vector load."""
CHUNK_BYTES = 8 * 2**20
"""Of the buffer per checksum task; zlib lets go of the interpreter lock, so chunks run on both cores."""
CHECKSUM_THREADS = 2

NamedTensors = Iterable[tuple[str, torch.Tensor]]


def lay_out(named_tensors: NamedTensors, *, version: PolicyVersion) -> WeightManifest:
    """Give each tensor its place. The checksum is empty until the buffer is packed.

    Example:
        Two float32 tensors of shapes (3,) and (2, 2) lie at offsets 0 and 64; total_bytes is 128.

    Raises:
        WeightSyncError: A name comes twice.
    """
    slices = []
    offset = 0
    seen: set[str] = set()
    for name, tensor in named_tensors:
        if name in seen:
            raise WeightSyncError(f"tensor {name} is given twice")
        seen.add(name)
        size_bytes = tensor.numel() * tensor.element_size()
        dtype = str(tensor.dtype).removeprefix("torch.")
        slices.append(TensorSlice(name=name, dtype=dtype, shape=tuple(tensor.shape), offset=offset, size_bytes=size_bytes))
        offset += -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return WeightManifest(version=version, tensors=tuple(slices), total_bytes=offset, checksum="")


def pack(named_tensors: NamedTensors, manifest: WeightManifest, out: memoryview | np.ndarray) -> None:
    """Copy the tensors into `out` as the manifest says.

    Args:
        named_tensors: The same names, shapes and dtypes, in any order; on any device.
        manifest: From `lay_out`.
        out: At least total_bytes writable bytes, zero between the slices.

    Raises:
        WeightSyncError: A tensor is missing, unknown or of another shape or dtype.
    """
    places = read_tensors(out, manifest)
    missing = set(places)
    for name, tensor in named_tensors:
        if name not in missing:
            raise WeightSyncError(f"tensor {name} is not in the manifest or is given twice")
        place = places[name]
        if place.shape != tensor.shape or place.dtype != tensor.dtype:
            raise WeightSyncError(
                f"tensor {name} is {tensor.dtype} {tuple(tensor.shape)}, the manifest says {place.dtype} {tuple(place.shape)}"
            )
        place.copy_(tensor.detach())
        missing.remove(name)
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
    return {piece.name: _view_of(flat, piece) for piece in manifest.tensors}


def checksum(buffer: memoryview | np.ndarray | bytes) -> str:
    """CRC-32 of each 8 MiB, then of all of these and the length: any changed bit and any burst up to 32 bits changes it."""
    flat = np.frombuffer(buffer, dtype=np.uint8)
    chunks = [flat[start : start + CHUNK_BYTES] for start in range(0, flat.nbytes, CHUNK_BYTES)]
    if len(chunks) > 1:
        with ThreadPoolExecutor(CHECKSUM_THREADS) as threads:
            sums = list(threads.map(zlib.crc32, chunks))
    else:
        sums = [zlib.crc32(chunk) for chunk in chunks]
    whole = zlib.crc32(np.array([*sums, flat.nbytes], dtype="<u8").tobytes())
    return f"crc32x8m:{whole:08x}:{flat.nbytes}"


def _view_of(flat: np.ndarray, piece: TensorSlice) -> torch.Tensor:
    dtype = _dtype_of(piece)
    numel = int(np.prod(piece.shape, dtype=np.int64))
    if numel * dtype.itemsize != piece.size_bytes or piece.offset + piece.size_bytes > flat.nbytes:
        raise WeightSyncError(f"tensor {piece.name}: {piece.size_bytes} bytes at {piece.offset} do not hold {piece.dtype} {piece.shape}")
    if numel == 0:
        return torch.empty(piece.shape, dtype=dtype)
    return torch.frombuffer(flat.data, dtype=dtype, count=numel, offset=piece.offset).view(piece.shape)


def _dtype_of(piece: TensorSlice) -> torch.dtype:
    dtype = getattr(torch, piece.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightSyncError(f"tensor {piece.name}: {piece.dtype!r} is no dtype of torch")
    return dtype
