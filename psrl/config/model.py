"""`model`: which weights and tokenizer are trained, in which numbers, and whether all of them or an adapter."""

from dataclasses import dataclass, field

ALL_LINEAR = "all-linear"
"""peft's and verl's word for every linear layer but the output embedding."""


@dataclass(kw_only=True)
class ModelConfig:
    """A Hugging Face folder on this machine. Names of the adapter's settings are verl's."""

    path: str = "???"
    """Folder with config.json, weights and tokenizer; `${package:recipes/...}` names one that psrl ships."""
    tokenizer_path: str | None = None
    """Folder of the tokenizer where it is not the model's own."""
    dtype: str = "float32"
    """`float32` or `bfloat16`, of the parameters and the optimizer's moments in training."""
    compute_dtype: str | None = None
    """`bfloat16` beside dtype=float32 is mixed precision: training computes in it, and the engines serve it. Null: as dtype. verl's is
    `actor.fsdp_config.dtype`."""
    history_thinking: str = "keep"
    """What happens to reasoning of earlier turns: `keep` or `strip` (strip makes branches)."""
    lora_rank: int = 0
    """Above 0 trains low-rank adapters of this rank (LoRA) and leaves the model's own weights as they are."""
    lora_alpha: float = 16.0
    """An adapter's product counts lora_alpha / lora_rank times."""
    target_modules: list[str] = field(default_factory=lambda: [ALL_LINEAR])
    """Linear layers with an adapter, by the ends of their names (`q_proj`), or `[all-linear]`."""

    lora_merge: bool = False
    """False sends the engines the adapter alone, which they merge themselves; true sends merged weights. verl's is `model.lora.merge`."""

    @property
    def served_dtype(self) -> str:
        """In which training computes, weights are published and engines run: one distribution on both sides."""
        return self.compute_dtype or self.dtype
