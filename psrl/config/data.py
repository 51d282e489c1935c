"""`data`: where tasks come from and in which order."""

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class GeneratorConfig:
    """Tasks made by a generator instead of files."""

    name: str | None = None
    """A name of `datasets.generators` or a dotted path; excludes train_files."""
    num_train: int = 2048
    num_val: int = 128
    seed: int = 1


@dataclass(kw_only=True)
class DataConfig:
    """Rows, batches, order."""

    train_files: list[str] = field(default_factory=list)
    """Parquet or JSONL."""
    trajectory_files: list[str] = field(default_factory=list)
    """Stored episodes to train on instead of playing the training tasks: psrl train --from-trajectories (docs/rollout.md)."""
    val_files: list[str] = field(default_factory=list)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    prompt_key: str = "prompt"
    train_batch_size: int = 16
    """Groups (tasks) per training step."""
    train_max_samples: int = 0
    """Most training tasks, the first ones; 0 takes all."""
    val_max_samples: int = 0
    """Most validation tasks; 0 takes all."""
    max_prompt_length: int = 512
    filter_overlong_prompts: bool = False
    """True leaves too long prompts out and counts them; false refuses to start. Nothing is ever cut."""
    max_bad_rows: int = 0
    """Rows that may be unreadable before the start is refused; each is counted by reason and named."""
    shuffle: bool = True
    seed: int = 1
    return_raw_chat: bool = True
    """verl's switch; psrl always keeps messages, so false is refused."""
