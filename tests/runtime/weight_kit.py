"""Train workers, replicas and what their processes have mapped, for tests of weights over Ray."""

import os
from pathlib import Path

import psutil
import ray

from psrl.config.actor import ActorConfig, RefConfig
from psrl.config.algorithm import AlgorithmConfig
from psrl.config.critic import CriticConfig
from psrl.config.model import ModelConfig
from psrl.config.rollout import RolloutConfig
from psrl.runtime.actors.engine_replica import EngineReplicaActor
from psrl.runtime.actors.train_worker import TrainWorkerActor, TrainWorkerSettings

WAIT_S = 120


def wait(reference):
    return ray.get(reference, timeout=WAIT_S)


def train_worker(folder: Path, *, ps_mode: str = "cpu_ref", **options):
    settings = TrainWorkerSettings(
        model=ModelConfig(path=str(folder)),
        actor=ActorConfig(),
        ref=RefConfig(),
        algorithm=AlgorithmConfig(),
        critic=CriticConfig(),
        critic_warmup=0,
        total_steps=1,
        seed=0,
        device="cpu",
        rank=0,
        world_size=1,
        collective_timeout_s=WAIT_S,
        data_plane_deadline_s=WAIT_S,
        startup_deadline_s=WAIT_S,
        ps_mode=ps_mode,
        export_dtype=None,
        import_folder=str(folder),
    )
    worker = TrainWorkerActor.options(name="train-worker-0", **options).remote(settings=settings)
    wait(worker.load.remote(wait(worker.rendezvous.remote())))
    return worker


def replica_actor(folder: Path, log_folder: Path, index: int, *, weight_sync_s: float = WAIT_S, script_path: str | None = None, **options):
    """With a script the engine is the scripted one."""
    engine = {"name": "torch"} if script_path is None else {"name": "scripted", "script_path": script_path}
    rollout = RolloutConfig(**engine, num_threads=1, max_num_seqs=8, prompt_length=64, response_length=1000)
    settings = {"index": index, "model": ModelConfig(path=str(folder)), "rollout": rollout, "log_folder": log_folder}
    return EngineReplicaActor.options(**options).remote(**settings, weight_sync_s=weight_sync_s)


def engines() -> list[psutil.Process]:
    """Engine processes of this test."""
    found = psutil.Process().children(recursive=True)
    return [process for process in found if "psrl.engines.torch" in process.cmdline()]


def mapped_versions(pid: int) -> dict[str, set[str]]:
    """Inodes by name of the versions that a process has mapped."""
    versions: dict[str, set[str]] = {}
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "/memfd:psrl-weights-" in line:
            fields = line.split()
            versions.setdefault(fields[5].removeprefix("/memfd:"), set()).add(fields[4])
    return versions


def open_files_of_trainer() -> list[str]:
    found = [process for process in psutil.Process().children(recursive=True) if "TrainWorkerActor" in " ".join(process.cmdline())]
    assert len(found) == 1
    links = Path(f"/proc/{found[0].pid}/fd").iterdir()
    return [os.readlink(link) for link in links if link.is_symlink()]


def listening_at(process: psutil.Process) -> str:
    return " ".join(f":{one.laddr.port}" for one in process.net_connections() if one.status == psutil.CONN_LISTEN)
