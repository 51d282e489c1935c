"""`trainer`: how long, how often, where to."""

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class TrainerConfig:
    """Run length, validation, checkpoints, trackers; names and meanings are verl's where verl has them."""

    project_name: str = "psrl"
    experiment_name: str = "run"
    total_training_steps: int = 10
    critic_warmup: int = 0
    """Steps at the start in which only the critic learns, with algorithm.adv_estimator=gae."""
    test_freq: int = 0
    """Validate every so many steps; 0 validates at the end only."""
    val_before_train: bool = True
    val_greedy: bool = True
    """Validate greedily beside mean@n."""
    save_freq: int = 0
    """Checkpoint every so many steps; 0 saves at the end and on Ctrl-C only."""
    max_ckpt_to_keep: int = 2
    logger: list[str] = field(default_factory=lambda: ["console", "jsonl", "tensorboard"])
    """Names of `telemetry.trackers`."""
    default_local_dir: str = "runs"
    """Run folders are made below it."""
    num_workers: int = 1
    """Train workers (FSDP2 ranks)."""
    export_dtype: str | None = None
    """`float32` or `bfloat16`, of the Hugging Face folder at the end; null: as model.dtype."""
    device: str = "auto"
    """`auto`, `cpu` or `cuda`."""
    seed: int = 1
    trajectories_per_step: int = 16
    """Episodes of each step that are written to the run folder; 0 writes all."""
