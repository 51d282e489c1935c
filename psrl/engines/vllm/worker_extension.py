"""What psrl adds to vLLM's workers: they read a published version of the weights, and go back to the old one when that fails.

Invariant: after every call the worker serves one whole version, or says `broken`. vLLM loads layer by layer into the tensors that it
serves, so a load that ends half-way is undone by loading the version before.

vLLM mixes this class into its worker (`worker_extension_cls`), so `self` also has what the worker has, such as `model_runner`. Imports
nothing of vLLM's before it is in a worker.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from psrl.engine_client.bodies import manifest_from_json
from psrl.engines.torch.adapter import A_SUFFIX, B_SUFFIX, is_adapter
from psrl.errors import PsrlError, WeightSyncError
from psrl.parameter_server.layout import read_tensors
from psrl.parameter_server.transports.shared_memory import open_version
from psrl.processes.serving import die_with_parent

if TYPE_CHECKING:
    from psrl.protocols import WeightManifest
    from psrl.types import PolicyVersion

SHARED_NAMES = ("dev/shm/psm_", "dev/shm/sem.mp-", "dev/shm/vllm_dist_")
"""Of Python's multiprocessing, and of vLLM's CPU kernels."""
Tensors = dict[str, torch.Tensor]
FAILED = "failed"
BROKEN = "broken"
TIED_HEAD = "ParallelLMHead"
"""Name of vLLM's class; where embeddings are tied it shares their tensor and is loaded through them."""


class PsrlWorker:
    """Methods that the engine calls in all workers at once (`collective_rpc`). Answers are dicts; nothing is raised over the wire."""

    model_runner: Any
    parallel_config: Any
    device: torch.device
    _psrl_staged: tuple[PolicyVersion, Tensors] | None = None
    _psrl_served: Tensors | None = None
    """Where the served version lies; None: in the model's folder."""

    def psrl_begin(self) -> dict[str, Any]:
        """Once, after vLLM's start: from now on this process ends when its parent ends, also when that is killed.

        A CPU worker that computes a later part of a pipeline gets what it receives its inputs in: vLLM makes that in its warm-up, which
        it leaves out where it compiles nothing, and dies with the first request.
        """
        from vllm.distributed import get_pp_group

        die_with_parent(os.getppid())
        take_names(Path("/proc/self/maps"))
        runner = self.model_runner
        if self.device.type == "cpu" and not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            sizes = {"batch_size": runner.max_num_tokens, "dtype": runner.model_config.dtype, "device": self.device}
            runner.intermediate_tensors = runner.get_model().make_empty_intermediate_tensors(**sizes)
        return {}

    def psrl_stage(self, manifest_json: dict[str, Any]) -> dict[str, Any]:
        """Map a version, so that it stays until it is committed. Costs no time: nothing is read yet."""
        self._psrl_staged = None
        try:
            manifest = on_node(manifest_from_json(manifest_json), self.parallel_config.node_rank)
            self._psrl_staged = (manifest.version, read_tensors(open_version(manifest), manifest))
        except PsrlError as error:
            return {FAILED: str(error)}
        return {}

    def psrl_commit(self, version: int) -> dict[str, Any]:
        """Serve the staged version. The engine must stand still, and forget its keys.

        Returns:
            Nothing, or `failed` with the cause (the old version is served), or also `broken` (no version is).
        """
        if self._psrl_staged is None or self._psrl_staged[0] != version:
            return {FAILED: f"version {version} is not staged in this worker"}
        tensors = self._psrl_staged[1]
        self._psrl_staged = None
        cause = self._psrl_try(tensors)
        if cause is None:
            self._psrl_served = tensors
            return {}
        undone = self._psrl_try(self._psrl_served)
        return {FAILED: cause} if undone is None else {FAILED: cause, BROKEN: undone}

    def _psrl_try(self, tensors: Tensors | None) -> str | None:
        """Load; what went wrong, or None."""
        try:
            with torch.no_grad():
                self._psrl_load(tensors)
        except Exception as error:  # noqa: BLE001
            return f"{type(error).__name__}: {error}"
        return None

    def _psrl_load(self, tensors: Tensors | None) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        model = self.model_runner.get_model()
        if tensors is None:
            self.model_runner.reload_weights()
        else:
            expected = {name for name, _ in model.named_parameters()}  # one that is tied has the name of its first place
            initialize_layerwise_reload(model)
            try:
                loaded = model.load_weights(self._psrl_weights(tensors))
            finally:
                finalize_layerwise_reload(model, self.model_runner.model_config)
            if loaded is not None and not expected <= loaded:
                raise ValueError(f"vLLM loaded nothing into {sorted(expected - loaded)[:5]}")
        if self.device.type == "cpu":
            _pack_heads(model)
        else:
            torch.accelerator.synchronize()

    def _psrl_weights(self, tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        """A whole model as it is; an adapter added to the weights of the model's folder, in float32 and from there each time."""
        if not is_adapter(tensors):
            yield from tensors.items()
            return
        for path in sorted(Path(self.model_runner.model_config.model).glob("*.safetensors")):
            with safe_open(path, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a dict)
                    start, layer = opened.get_tensor(name), name.removesuffix(".weight")
                    a, b = tensors.get(layer + A_SUFFIX), tensors.get(layer + B_SUFFIX)
                    yield name, start if a is None or b is None else (start.float() + b.float() @ a.float()).to(start.dtype)


def take_names(maps: Path) -> None:
    """Take their names from what vLLM's processes of a node share; each of them has it open by now.

    A file of /dev/shm is memory. vLLM removes its own where it ends in peace; without a name they end with the last process that uses them,
    however that ends.
    """
    for line in maps.read_text().splitlines():
        path = line.partition("/")[2]
        if path.startswith(SHARED_NAMES) and not path.endswith(" (deleted)"):
            Path("/", path).unlink(missing_ok=True)


def on_node(manifest: WeightManifest, node_rank: int) -> WeightManifest:
    """With the place at which the workers of one of the instance's nodes find the version.

    Raises:
        WeightSyncError: It was not brought to that node.
    """
    if node_rank == 0:
        return manifest
    if node_rank > len(manifest.follower_locations):
        raise WeightSyncError(f"version {manifest.version} was not brought to node {node_rank} of the instance")
    return replace(manifest, location=manifest.follower_locations[node_rank - 1])


def _pack_heads(model: torch.nn.Module) -> None:
    """On the CPU a head computes with a packed copy of its weight, which a reload does not renew where the weight is the embedding's."""
    for layer in model.modules():
        if type(layer).__name__ == TIED_HEAD and layer.weight.numel():
            layer.quant_method.process_weights_after_loading(layer)
