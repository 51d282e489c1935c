"""A published version is checked whole in the server's process before any worker hears of it; vLLM decodes on meanwhile."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open

from psrl.engines.torch.adapter import A_SUFFIX, B_SUFFIX, is_adapter
from psrl.errors import EngineError, WeightSyncError
from psrl.parameter_server.checksum import checksum
from psrl.parameter_server.transports.shared_memory import open_version
from psrl.protocols import TensorSlice, WeightManifest, WeightReport
from psrl.types import PolicyVersion

CHECKSUM_OF_START = "start"
"""Reported until the first update: the starting weights came from a folder."""
TIED_COPY = "lm_head.weight"
"""Where embeddings are tied, some folders (Qwen3-0.6B) hold it beside the embedding; it is no parameter then, and is not published."""
FLOATING = ("float32", "bfloat16", "float16", "float64")

Shapes = Mapping[str, tuple[int, ...]]


def shapes_of_folder(model_path: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter of a Hugging Face folder, from its config.json and the headers of its files.

    Raises:
        EngineError: There is no `*.safetensors` file.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(model_path.glob("*.safetensors")):
        with safe_open(path, framework="np") as opened:
            shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118 (not a dict)
    if not shapes:
        raise EngineError(f"model {model_path} has no *.safetensors files")
    settings = json.loads((model_path / "config.json").read_text())
    if settings.get("tie_word_embeddings"):
        shapes.pop(TIED_COPY, None)
    return {name: shape for name, shape in shapes.items() if not name.endswith("rotary_emb.inv_freq")}


def start_report(shapes: Shapes) -> WeightReport:
    """Of the weights that vLLM read from the folder: version 0."""
    return WeightReport(version=PolicyVersion(0), num_matched=len(shapes), num_expected=len(shapes), checksum=CHECKSUM_OF_START)


def checked_report(manifest: WeightManifest, shapes: Shapes) -> WeightReport:
    """Map a version and check it against its manifest, and the manifest against the model; what a replica that serves it reports.

    Raises:
        WeightSyncError: The version is gone or cut, the checksum differs, or tensors do not fit.
    """
    check_shapes(manifest, shapes)
    found = checksum(open_version(manifest))
    if found != manifest.checksum:
        raise WeightSyncError(f"version {manifest.version} has checksum {found}, its manifest says {manifest.checksum}")
    count = len(manifest.tensors)  # each of them has its place, and each place has one
    return WeightReport(version=manifest.version, num_matched=count, num_expected=count, checksum=found)


def check_shapes(manifest: WeightManifest, shapes: Shapes) -> None:
    """The manifest has the model's tensors, all of them and no others, or an adapter's that fits them, as floating-point numbers.

    Raises:
        WeightSyncError: It has not.
    """
    given = {piece.name: piece for piece in manifest.tensors}
    if is_adapter(given):
        shapes = _adapter_shapes(given, shapes)
    missing, unknown = sorted(set(shapes) - set(given)), sorted(set(given) - set(shapes))
    if missing or unknown:
        matching = len(set(given) & set(shapes))
        raise WeightSyncError(f"{matching} of {len(shapes)} tensors match; missing {missing[:5]}, unknown {unknown[:5]}")
    for name, shape in shapes.items():
        if given[name].shape != shape:
            raise WeightSyncError(f"tensor {name} has shape {given[name].shape}, the model has {shape}")
        if given[name].dtype not in FLOATING:
            raise WeightSyncError(f"tensor {name} is {given[name].dtype}, not a floating-point type")


def _adapter_shapes(given: Mapping[str, TensorSlice], shapes: Shapes) -> Shapes:
    """What an adapter of these layers must have: A [r, in] and B [out, r] for each weight [out, in]."""
    expected: dict[str, tuple[int, ...]] = {}
    for name in given:
        layer = name.removesuffix(A_SUFFIX).removesuffix(B_SUFFIX)
        weight, a = shapes.get(f"{layer}.weight"), given.get(f"{layer}{A_SUFFIX}")
        if weight is None or a is None or len(weight) != 2 or len(a.shape) != 2:
            raise WeightSyncError(f"tensor {name} of an adapter belongs to no linear layer of the model, or has no partner")
        expected |= {f"{layer}{A_SUFFIX}": (a.shape[0], weight[1]), f"{layer}{B_SUFFIX}": (weight[0], a.shape[0])}
    return expected
