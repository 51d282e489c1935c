"""`rollout`: how episodes are generated. `train_...rollout` (validation) follows `gen_...rollout` unless set."""

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class MultiTurnConfig:
    """Episodes of several turns; names and meanings are verl's where verl has them."""

    enable: bool = False
    max_turns: int = 1
    """Most model turns of an episode; 1 when enable is false."""
    tool_config_path: str | None = None
    """YAML list of tools."""
    format: str = "hermes"
    """Tool-call format: a name of `chat.parsers`."""
    max_calls_per_turn: int = 4
    """Further calls of a turn are answered with an error."""
    max_tool_response_length: int = 512
    """Most characters of one observation; head and tail are kept."""
    max_tokens_per_turn: int = 0
    """Most sampled tokens of one turn; 0 leaves only response_length."""


@dataclass(kw_only=True)
class NameConfig:
    """A registered name or a dotted path `package.module.Class`."""

    name: str | None = None


@dataclass(kw_only=True)
class AgentConfig:
    """Which loop, environment and data adapter serve a task that does not say so itself."""

    default_agent_loop: str = "generate_only_agent"
    env: NameConfig = field(default_factory=NameConfig)
    data: NameConfig = field(default_factory=NameConfig)
    num_workers: int = 1
    """Agent worker processes."""
    agent_loop_config_path: str | None = None
    """YAML with settings of the agent program, for black-box loops."""
    branch_reward: str = "shared"
    """Of a session with branches (sub-agents, a rewritten history): each carries the episode's reward (`shared`), or only the
    branch of the last turn is trained on (`last`)."""
    max_concurrent_episodes: int = 256
    """Per worker."""
    episode_timeout_s: float = 300.0
    step_timeout_s: float = 60.0
    """Of one environment step."""


@dataclass(kw_only=True)
class RolloutConfig:
    """Engine and sampling."""

    name: str = "torch"
    """Engine: `torch`, `vllm` or `scripted`."""
    num_replicas: int = 1
    engine_python: str | None = None
    """Of `vllm`: the Python that has it; null finds `.venv-vllm`, which `scripts/setup.sh vllm` makes, else this one where it has vLLM."""
    tensor_model_parallel_size: int = 1
    """Of `vllm`: processes (GPUs) over which each layer of a replica is split."""
    pipeline_model_parallel_size: int = 1
    """Of `vllm`: processes (GPUs) over which a replica's layers are divided."""
    data_parallel_size: int = 1
    """Of `vllm`: copies of the model inside a replica, which shares its requests out among them."""
    gpu_memory_utilization: float = 0.5
    """Of `vllm` on a GPU: the share of its memory that weights and keys take. On a CPU the keys have what max_num_seqs needs."""
    enforce_eager: bool = True
    """Of `vllm`: start at once, without compilation and CUDA graphs; false decodes faster after a start of minutes."""
    max_num_batched_tokens: int = 8192
    """Of `vllm`: most tokens of one step, prompts included."""
    enable_prefix_caching: bool = True
    """Of `vllm`: keys of a prompt's beginning are used again. They never cross a version of the weights."""
    n: int = 1
    """Of train_actor_rollout_ref: episodes per validation task (mean@n). Of gen_actor_rollout_ref: 1; training groups have
    psrl.rollout_n."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    prompt_length: int = 512
    """Most tokens of the first prompt."""
    response_length: int = 512
    """Most tokens of a trajectory after its first prompt, observations included."""
    max_num_seqs: int = 64
    """Sequences that the engine decodes at once."""
    num_threads: int = 0
    """CPU threads of a replica (of `vllm`: of each of its processes that compute); 0 shares the machine's cores among the replicas, and
    `torch` then takes one for each 4M parameters at most."""
    request_timeout_s: float = 120.0
    startup_timeout_s: float = 120.0
    device: str = "auto"
    """`auto`, `cpu` or `cuda`."""
    script_path: str | None = None
    """What the `scripted` engine answers."""
    multi_turn: MultiTurnConfig = field(default_factory=MultiTurnConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
