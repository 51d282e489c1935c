"""`psrl`: what psrl adds to the field's knobs."""

from dataclasses import dataclass, field

from psrl.config.asynchrony import PartialRolloutConfig, ProactiveFilterConfig, RestartsConfig, RoutingConfig, SyncConfig
from psrl.config.deployment import DeploymentConfig
from psrl.config.rollout_gateway import RolloutGatewayConfig


@dataclass(kw_only=True)
class DeadlinesConfig:
    """Seconds after which a unit in flight is failed and named."""

    startup_s: float = 180.0
    train_step_s: float = 1800.0
    weight_sync_s: float = 180.0
    """Of a push, and of a pull. With partial_rollout.enable=false a pull has rollout.request_timeout_s more, in which running turns end;
    each of its calls to the engine has weight_sync_s alone, which must therefore be above rollout.request_timeout_s."""
    data_plane_s: float = 60.0
    stall_s: float = 60.0
    """Without any progress for so long, the watchdog says what is outstanding and who holds it."""
    shutdown_s: float = 30.0


@dataclass(kw_only=True)
class PsrlConfig:
    """Groups, staleness, weight path, failure policy."""

    staleness: int = 0
    """Most versions by which trained data may be older than the weights; 0 is exactly on-policy."""
    rollout_n: int = 8
    """Episodes per training task."""
    redundant_episodes: int = 0
    """Episodes of a group played beyond rollout_n: the first rollout_n that can be judged are kept, the others ended."""
    redundant_groups: int = 0
    """Groups admitted for an update beyond data.train_batch_size: the first to arrive are trained on."""
    max_reissues: int = 1
    """How often a group that was ended because others came first (or by proactive_filter.action=retry) is issued again."""
    max_groups_in_flight: int = 0
    """Groups generated at once; 0 takes as many as the agent workers play at once."""
    partial_rollout: PartialRolloutConfig = field(default_factory=PartialRolloutConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    proactive_filter: ProactiveFilterConfig = field(default_factory=ProactiveFilterConfig)
    restarts: RestartsConfig = field(default_factory=RestartsConfig)
    ps_mode: str = "cpu_ref"
    """How weights travel: memory that a node's processes share, and between nodes Ray's object store (`cpu_ref`), reads from the trainer's
    memory by NIXL, RDMA where the network has it (`nixl_cpu`; needs `pip install nixl`), or NCCL from the trainer's GPU to one of the
    engines' (`nccl`)."""
    max_episode_retries: int = 2
    """How often an episode that ended infra_error is issued again."""
    incomplete_groups: str = "drop"
    """A group that lost members for good: `drop` it and refill, or `allow_partial` down to min_group_size."""
    min_group_size: int = 2
    max_infra_error_rate: float = 0.5
    """Share of the last 64 episodes that may end infra_error before the run stops with the cause; 1 sets no limit."""
    ray_address: str = "local"
    """`local` starts Ray on this machine, `auto` joins the cluster that this machine is part of, HOST:PORT another one."""
    deadlines: DeadlinesConfig = field(default_factory=DeadlinesConfig)
    rollout_gateway: RolloutGatewayConfig = field(default_factory=RolloutGatewayConfig)
    deployment: DeploymentConfig = field(default_factory=DeploymentConfig)
