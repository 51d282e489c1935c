"""Parts of `psrl` that say how generation and training go on side by side."""

from dataclasses import dataclass


@dataclass(kw_only=True)
class PartialRolloutConfig:
    """What happens to turns that are being sampled when their replica takes newer weights."""

    enable: bool = True
    """They are interrupted and go on with the newer weights; false lets them end first, and new ones wait (then
    deadlines.weight_sync_s must be above rollout.request_timeout_s)."""
    interrupt_as_prompt: bool = False
    """The replica gives back what it sampled, and the turn is sent again with it as prompt, to the same replica (another only with
    routing.migrate); false: it goes on in place."""


@dataclass(kw_only=True)
class SyncConfig:
    """When a replica takes newer weights. Whatever the policy, a replica that could not be given work otherwise takes them."""

    policy: str = "eager"
    """`eager` (as soon as there are any), `request_num`, `throughput`, `kv_cache`, or `starvation` (only when it gets no work)."""
    request_num: int = 0
    """Of `request_num`: when at most so many of its episodes are in flight."""
    throughput: float = 0.5
    """Of `throughput`: when it samples fewer tokens per second than this share of its best; above 0."""
    kv_cache: float = 0.3
    """Of `kv_cache`: when the keys of its running turns are at most this share of what rollout.max_num_seqs turns of full length have."""


@dataclass(kw_only=True)
class RoutingConfig:
    """Which replica plays an episode."""

    policy: str = "request_num_balance"
    """`random`, `round_robin`, `request_num_balance` or `cache_aware`."""
    sticky: str = "group"
    """What goes to one replica whole: a `group` (its prompt is computed once), or each `trajectory` by itself."""
    migrate: bool = False
    """Move groups whose turns wait on a full replica to one with room."""


@dataclass(kw_only=True)
class ProactiveFilterConfig:
    """What is done with a group that is in flight too long."""

    action: str = "none"
    """`none`, `retry` (issue it again), `truncate` (end its episodes with what they have), `null` (leave it out, take another)."""
    time_limit_s: float = 600.0
    """Since it was admitted."""
    max_per_step: int = 1
    """Groups of one training step that it may be applied to."""


@dataclass(kw_only=True)
class RestartsConfig:
    """Processes that are started again when they die: agent workers, engine replicas, gateway, parameter server."""

    max_restarts: int = 3
    """Of one process within window_s; then the run stops with the cause. 0 stops at the first death."""
    window_s: float = 600.0
