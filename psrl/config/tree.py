"""The whole tree. `config/` checks it and plans with it, the driver builds from it; a part receives its section."""

from dataclasses import dataclass, field

from psrl.config.actor import ActorConfig, RefConfig
from psrl.config.algorithm import AlgorithmConfig
from psrl.config.critic import CriticConfig
from psrl.config.data import DataConfig
from psrl.config.model import ModelConfig
from psrl.config.psrl_section import PsrlConfig
from psrl.config.reward import CustomRewardFunctionConfig, RewardConfig
from psrl.config.rollout import RolloutConfig
from psrl.config.sandbox import SandboxConfig
from psrl.config.sft import SftConfig
from psrl.config.trainer import TrainerConfig
from psrl.config.transfer_queue import TransferQueueConfig


@dataclass(kw_only=True)
class GenActorRolloutRefConfig:
    """Training rollouts."""

    rollout: RolloutConfig = field(default_factory=RolloutConfig)


@dataclass(kw_only=True)
class TrainActorRolloutRefConfig:
    """The trained model, and validation rollouts."""

    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Every value follows gen_actor_rollout_ref.rollout unless set."""


@dataclass(kw_only=True)
class Config:
    """Everything that a run can choose."""

    recipe: str = ""
    """Name of the recipe; part of the run folder's path."""
    import_folder: str = ""
    """Put on Python's path of every process; the folder of the user's own YAML file unless set."""
    gen_actor_rollout_ref: GenActorRolloutRefConfig = field(default_factory=GenActorRolloutRefConfig)
    train_actor_rollout_ref: TrainActorRolloutRefConfig = field(default_factory=TrainActorRolloutRefConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    custom_reward_function: CustomRewardFunctionConfig = field(default_factory=CustomRewardFunctionConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    psrl: PsrlConfig = field(default_factory=PsrlConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    transfer_queue: TransferQueueConfig = field(default_factory=TransferQueueConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    sft: SftConfig = field(default_factory=SftConfig)
