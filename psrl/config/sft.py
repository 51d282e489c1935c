"""`sft`: supervised fine-tuning, the cold start of ReTool."""

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class SftConfig:
    """Episodes written by a demonstrator, learned by their assistant turns."""

    train_files: list[str] = field(default_factory=list)
    """JSONL or parquet rows with `messages` (and optionally `tools`)."""
    generator: str | None = None
    """A name of `datasets.generators` that yields demonstrations; excludes train_files."""
    num_steps: int = 300
    batch_size: int = 32
    max_length: int = 1024
    lr: float = 2e-3
    min_lr_ratio: float = 0.05
    warmup_steps: int = 50
    weight_decay: float = 0.01
    beta2: float = 0.98
    grad_clip: float = 1.0
    seed: int = 1
    output_path: str = "sft-model"
    from_scratch: bool = False
    """Take only the architecture of model.path and start from random weights."""
