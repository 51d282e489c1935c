"""Whether `psrl.ps_mode` can bring weights to other nodes, and whether there is one to bring them to."""

from __future__ import annotations

from psrl.config.deployment_checks import LOCAL
from psrl.config.fields import value_at
from psrl.config.placement import CPU, REPLICAS, Placement, Role
from psrl.config.refusals import refuse, refuse_dead
from psrl.config.tree import Config

KEY = "psrl.ps_mode"
NCCL = "nccl"
ROLLOUT = "gen_actor_rollout_ref.rollout"
INSTEAD = f"set {KEY}=cpu_ref or {KEY}=nixl_cpu"


def check_transport(config: Config) -> None:
    """What the settings alone say.

    Raises:
        ConfigError: The mode has no effect, or needs GPUs that the settings leave out.
    """
    if config.psrl.ray_address == LOCAL:
        because = f"psrl.ray_address={LOCAL}: the processes of one machine share its memory"
        refuse_dead(config, [KEY], because=because, fix="set psrl.ray_address=auto")
    if config.psrl.ps_mode != NCCL:
        return
    for key in ("trainer.device", f"{ROLLOUT}.device"):
        if value_at(config, key) == CPU:
            refuse(config, KEY, f"brings weights from GPU to GPU, and {key}={CPU}", INSTEAD)
    if config.gen_actor_rollout_ref.rollout.name == "scripted":
        refuse(config, KEY, f"brings weights from GPU to GPU, and {ROLLOUT}.name=scripted has none", INSTEAD)


def check_transport_between(config: Config, placement: Placement) -> None:
    """What the nodes say on which a training run lies.

    Raises:
        ConfigError: The mode has no effect there, or needs GPUs that the trainer or the engines do not have.
    """
    if not nodes_beyond_trainer(placement):
        fix = "place engines on another node (psrl.deployment.num_instances)"
        refuse_dead(config, [KEY], because="all engines are on the trainer's node, whose memory they share", fix=fix)
    if config.psrl.ps_mode == NCCL:
        for who, role in (("the trainer", Role.TRAIN_WORKER), ("the engines", Role.REPLICA)):
            if placement.gpus_of(role, 0) == 0:
                refuse(config, KEY, f"brings weights from GPU to GPU, and {who} would be on CPUs", INSTEAD)


def nodes_beyond_trainer(placement: Placement) -> set[int]:
    """Nodes to which weights are brought: those with engines, but for the one of rank 0."""
    engines = {node for role in (*REPLICAS, Role.FOLLOWER) for node in placement.places[role]}
    return engines - set(placement.places[Role.PARAMETER_SERVER])
