"""`actor` and `ref`: the policy's loss, optimizer and batches."""

from dataclasses import dataclass, field

from psrl.config.model import ModelConfig


@dataclass(kw_only=True)
class OptimConfig:
    """AdamW and its schedule."""

    lr: float = 1e-6
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    lr_warmup_steps: int = 0
    lr_scheduler_type: str = "constant"
    """`constant`, `linear` or `cosine`, after the warm-up, over trainer.total_training_steps (the policy's: less trainer.critic_warmup)."""
    min_lr_ratio: float = 0.0
    """Where `linear` and `cosine` end, as a share of lr."""


@dataclass(kw_only=True)
class FsdpConfig:
    """How the ranks of the trainer hold the model (FSDP2). Names and meanings are verl's."""

    fsdp_size: int = -1
    """Ranks that hold one copy of the model together; -1: all of them. Fewer (a node's cards) make copies that average their gradients
    (HSDP)."""
    reshard_after_forward: bool = True
    """False keeps each layer whole between its forward and its backward pass: more memory, one gathering less."""
    offload_policy: bool = False
    """Parameters, gradients and optimizer lie in the host's memory, and AdamW runs on its cores; for CUDA."""
    optimizer_offload: bool = False
    """The optimizer's moments alone lie in the host's memory, and are on the card during an update; for CUDA."""

    def holds(self, model: ModelConfig, *, num_ranks: int) -> bool:
        """Whether FSDP2 is needed to hold the model: with several ranks, and for what it alone can do with one."""
        return num_ranks > 1 or model.served_dtype != model.dtype or self.offload_policy


@dataclass(kw_only=True)
class ActorConfig:
    """How a batch of trajectories becomes an update. Names and meanings are verl's where verl has them, but for `loss_agg_mode`,
    `policy_loss` and `old_logprobs`, which say what they are in verl."""

    optim: OptimConfig = field(default_factory=OptimConfig)
    policy_loss: str = "ppo_clip"
    """A name of `algorithms.losses`: `ppo_clip`, `gspo`, `cispo`, or `reinforce` (no ratio, for importance weights instead of clipping).
    verl's is `policy_loss.loss_mode`, where ppo_clip is vanilla. docs/algorithms.md says what each of them is."""
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    """Above clip_ratio_low gives DAPO's clip-higher."""
    clip_ratio_c: float = 3.0
    """Dual clip: bound of the loss where the advantage is negative."""
    loss_agg_mode: str = "token_mean"
    """`token_mean` (verl: token-mean), `seq_mean` (verl: seq-mean-token-mean), `seq_sum` (verl: seq-mean-token-sum-norm; Dr. GRPO's) or
    `turn_mean` (verl has none)."""
    loss_scale_factor: int = 0
    """Tokens that `seq_sum` divides each trajectory's sum by, such as rollout.response_length."""
    entropy_coeff: float = 0.0
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.001
    kl_loss_type: str = "k3"
    """`k1`, `k2` or `k3` (Schulman, Approximating KL Divergence); of verl's other names, low_var_kl is k3. `k1+` and `k3+` have the
    gradient of k2, the only one that is the KL's own."""
    ppo_epochs: int = 1
    ppo_mini_batch_size: int = 0
    """Groups in one optimizer step; 0 takes the whole batch."""
    ppo_max_token_len_per_gpu: int = 16384
    """Most tokens in one micro-batch of one rank."""
    grad_clip: float = 1.0
    old_logprobs: str = "rollout"
    """Policy that the ratio is against: `rollout` (the one that sampled) or `recompute` (the weights at the start of the buffer:
    decoupled PPO, with algorithm.rollout_correction.rollout_is between the two). verl's is rollout_correction.bypass_mode, true for
    `rollout`; its default is the other one, `recompute`."""
    use_remove_padding: bool = True
    """Rows of a micro-batch lie behind one another without padding, and attention keeps them apart. False pads them to the longest: for
    models whose layers are not plain attention (sliding windows, state spaces)."""
    use_prefix_grouper: bool = True
    """What rows of a micro-batch begin with alike, such as the prompt of a group, is computed once for all of them."""
    gradient_checkpointing: bool = False
    """Keep only each layer's input, and compute the layer again in the backward pass."""
    fsdp_config: FsdpConfig = field(default_factory=FsdpConfig)
    num_threads: int = 0
    """CPU threads of each train worker; 0 shares the machine's cores among the ranks."""


@dataclass(kw_only=True)
class RefConfig:
    """The frozen reference of the KL; loaded only with actor.use_kl_loss or algorithm.use_kl_in_reward."""

    path: str | None = None
    """Weights of the reference; None takes the starting weights of the run."""
