"""Combinations of settings that cannot work, or of which one has no effect.

Invariant: a setting that differs from its default changes the run, or the start is refused. Each check is a small function of
the whole tree; `check_combinations` runs them in order, cheap and general ones first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from psrl.config.agent_checks import check_agent_yaml, check_isolation
from psrl.config.algorithm_checks import ESTIMATORS, LOSSES, check_algorithm
from psrl.config.async_checks import check_asynchrony
from psrl.config.correction_checks import check_correction
from psrl.config.fields import leaves_of, value_at
from psrl.config.file_checks import check_model_files, require_file
from psrl.config.gateway_checks import APPENDING_LOOPS, check_gateway, check_history_thinking
from psrl.config.ranges import ROLLOUTS
from psrl.config.refusals import DEFAULTS, refuse, refuse_dead
from psrl.config.rollout import RolloutConfig
from psrl.config.sandbox_checks import check_sandbox
from psrl.config.size_checks import check_size
from psrl.config.stored_checks import check_stored
from psrl.config.transport_checks import check_transport
from psrl.config.tree import Config
from psrl.config.vllm_checks import VLLM_KEYS, check_vllm
from psrl.errors import ConfigError

GEN, VAL = ROLLOUTS
ACTOR = "train_actor_rollout_ref.actor"
MODEL = "train_actor_rollout_ref.model"
SHARED_ROLLOUT_KEYS = (
    "name",
    "num_replicas",
    "max_num_seqs",
    "num_threads",
    "startup_timeout_s",
    "device",
    "script_path",
    "request_timeout_s",
    "multi_turn.format",
    "multi_turn.tool_config_path",
    "agent.num_workers",
    "agent.max_concurrent_episodes",
    *VLLM_KEYS,
)
"""Properties of processes that training and validation share: one value for both."""

ENVIRONMENT_LOOPS = ("multi_turn_agent", "multi_turn_completion_agent")
"""Loops that play an environment, so that an episode has one branch."""
SHIPPED_NAMES: dict[str, tuple[str, ...]] = {
    "algorithm.adv_estimator": ESTIMATORS,
    "train_actor_rollout_ref.actor.policy_loss": LOSSES,
    "reward.name": ("custom", "environment", "execution", "math_answer", "retool"),
    "trainer.logger": ("console", "jsonl", "tensorboard", "trackio", "wandb"),
    **{
        f"{rollout}.{key}": names
        for rollout in ROLLOUTS
        for key, names in (
            ("multi_turn.format", ("deepseek", "harmony", "hermes", "llama3_json", "mistral", "qwen3_coder")),
            ("agent.default_agent_loop", ("generate_only_agent", "mini_swe_agent", *ENVIRONMENT_LOOPS)),
            ("agent.env.name", ("mini_swe_env", "single_turn", "tool_env")),
            ("agent.data.name", ("conversation", "mini_swe_agent_data", "tool_agent_data")),
        )
    },
}
"""What the registries hold, so that a misspelt name is refused before they are imported; a test compares the two."""


def check_combinations(config: Config, *, is_trained: bool = True) -> None:
    """Every rule that a training or validation run must keep; without training, those of groups, batches and losses do not count.

    Raises:
        ConfigError: The first broken rule.
    """
    training = (check_algorithm, _check_batches, _check_optimizer, _check_training_sampling, check_transport) if is_trained else ()
    for check in (_check_data, *training, _check_reward, _check_trainer):
        check(config)
    for rollout in ROLLOUTS:
        _check_rollout(config, rollout)
    _check_one_set_of_engines(config)
    check_correction(config)
    check_gateway(config)
    check_asynchrony(config)
    check_history_thinking(config)
    check_sandbox(config)
    check_stored(config)
    check_size(config)
    check_vllm(config)
    check_isolation(config)
    check_names(config, SHIPPED_NAMES)


def check_sft(config: Config) -> None:
    """Rules of supervised fine-tuning, files included.

    Raises:
        ConfigError: The first broken rule.
    """
    sft = config.sft
    if bool(sft.train_files) == bool(sft.generator):
        value = {"train_files": sft.train_files, "generator": sft.generator}
        fix = "set sft.train_files=[demonstrations.jsonl] or sft.generator=NAME, and only one"
        raise ConfigError(key="sft.train_files", value=value, rule="demonstrations come from files or from a generator", fix=fix)
    if sft.warmup_steps > sft.num_steps:
        refuse(config, "sft.warmup_steps", f"warms up longer than sft.num_steps={sft.num_steps}", f"set at most {sft.num_steps}")
    for index, path in enumerate(sft.train_files):
        require_file(f"sft.train_files[{index}]", path)
    check_model_files(config)


def check_names(config: Config, known: Mapping[str, Sequence[str]]) -> None:
    """Settings that name something in a registry.

    Args:
        config: The whole tree.
        known: Dotted key -> registered names, such as {"algorithm.adv_estimator": ("grpo",)}. A name with a dot is a Python
            path, which its registry resolves; an unset name (null) is left to the checks of its section.

    Raises:
        ConfigError: A name is not known; the message lists those that are.
    """
    for key, names in known.items():
        value = value_at(config, key)
        for name in value if isinstance(value, list) else [value]:
            if name is None or name in names or "." in name:
                continue
            close = get_close_matches(name, list(names), n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            fix = f"{hint}use one of {', '.join(sorted(names))}, or a dotted path package.module.Name"
            raise ConfigError(key=key, value=name, rule="is not registered", fix=fix)


def _check_data(config: Config) -> None:
    data = config.data
    if not data.return_raw_chat:
        refuse(config, "data.return_raw_chat", "psrl always keeps messages", "set data.return_raw_chat=true or leave it out")
    value = {"train_files": data.train_files, "generator.name": data.generator.name}
    if data.train_files and data.generator.name:
        rule = "tasks come from files or from a generator, not from both"
        raise ConfigError(key="data.train_files", value=value, rule=rule, fix="set data.generator.name=null or data.train_files=[]")
    if not data.train_files and not data.val_files and not data.generator.name and not data.trajectory_files:
        fix = "set data.train_files=[rows.jsonl] or data.generator.name=NAME"
        raise ConfigError(key="data.train_files", value=value, rule="no source of tasks is set", fix=fix)
    if data.generator.name and data.val_files:
        fix = "use data.generator.num_val, or files for both"
        refuse(config, "data.val_files", "has no effect while data.generator.name makes the validation tasks", fix)
    if not data.generator.name:
        keys = [key for key in DEFAULTS if key.startswith("data.generator.")]
        refuse_dead(config, keys, because="data.generator.name is null", fix="set data.generator.name")
    if not data.shuffle:
        refuse_dead(config, ["data.seed"], because="data.shuffle=false", fix="set data.shuffle=true")
    for rollout in ROLLOUTS:
        prompt_length = value_at(config, f"{rollout}.prompt_length")
        if data.max_prompt_length > prompt_length:
            rule = f"prompts longer than {rollout}.prompt_length={prompt_length} cannot be generated from"
            refuse(config, "data.max_prompt_length", rule, f"set data.max_prompt_length={prompt_length} or raise {rollout}.prompt_length")
    if data.generator.name and data.generator.num_train < data.train_batch_size:
        fix = f"set data.generator.num_train to at least {data.train_batch_size}"
        refuse(config, "data.generator.num_train", f"is less than one batch (data.train_batch_size={data.train_batch_size})", fix)


def _check_batches(config: Config) -> None:
    actor, batch = config.train_actor_rollout_ref.actor, config.data.train_batch_size
    key, mini = f"{ACTOR}.ppo_mini_batch_size", actor.ppo_mini_batch_size
    if mini > batch:
        refuse(config, key, f"is more than data.train_batch_size={batch}", f"set {key}={batch}, or 0 for the whole batch")
    if mini and batch % mini:
        divisors = [size for size in range(1, batch + 1) if batch % size == 0]
        refuse(config, key, f"does not divide data.train_batch_size={batch}", f"set {key} to one of {divisors}")
    longest = config.gen_actor_rollout_ref.rollout.prompt_length + config.gen_actor_rollout_ref.rollout.response_length
    key = f"{ACTOR}.ppo_max_token_len_per_gpu"
    if actor.ppo_max_token_len_per_gpu < longest:
        rule = f"cannot hold one trajectory ({GEN}.prompt_length + response_length = {longest} tokens); nothing is ever cut"
        refuse(config, key, rule, f"set {key}={longest} or more")


def _check_optimizer(config: Config) -> None:
    optim, steps = config.train_actor_rollout_ref.actor.optim, config.trainer.total_training_steps
    if optim.lr_warmup_steps > steps:
        rule = f"warms up longer than trainer.total_training_steps={steps}"
        refuse(config, f"{ACTOR}.optim.lr_warmup_steps", rule, f"set {ACTOR}.optim.lr_warmup_steps={steps} or less")
    if optim.lr_scheduler_type == "constant":
        because = f"{ACTOR}.optim.lr_scheduler_type=constant"
        refuse_dead(config, [f"{ACTOR}.optim.min_lr_ratio"], because=because, fix="choose linear or cosine")


def _check_reward(config: Config) -> None:
    reward, custom = config.reward, config.custom_reward_function
    if reward.name == "custom" and not custom.path:
        fix = "set custom_reward_function.path=my_reward.py"
        refuse(config, "custom_reward_function.path", "reward.name=custom needs the file of the function", fix)
    if reward.name != "custom":
        keys = ["custom_reward_function.path", "custom_reward_function.name"]
        refuse_dead(config, keys, because=f"reward.name={reward.name}", fix="set reward.name=custom")
    if reward.name == "execution":
        fix = "set reward.execution.timeout_s"
        refuse_dead(config, ["reward.timeout_s"], because="reward.name=execution has its own limit", fix=fix)
    else:
        keys = [leaf for leaf in DEFAULTS if leaf.startswith("reward.execution.")]
        refuse_dead(config, keys, because=f"reward.name={reward.name}", fix="set reward.name=execution")
    buffer, key = reward.overlong_buffer, "reward.overlong_buffer"
    if not buffer.enable:
        keys = [f"{key}.{leaf.key}" for leaf in leaves_of(type(buffer)) if leaf.key != "enable"]
        refuse_dead(config, keys, because=f"{key}.enable=false", fix=f"set {key}.enable=true")
        return
    length = config.gen_actor_rollout_ref.rollout.response_length
    if buffer.max_sampled_tokens > length:
        rule = f"is never reached: no episode is longer than {GEN}.response_length={length}"
        refuse(config, f"{key}.max_sampled_tokens", rule, f"set {key}.max_sampled_tokens={length} or less")
    if buffer.len >= buffer.max_sampled_tokens:
        rule = f"is not less than {key}.max_sampled_tokens={buffer.max_sampled_tokens}: every episode would be punished"
        refuse(config, f"{key}.len", rule, f"set {key}.len={max(1, buffer.max_sampled_tokens // 4)}")


def _check_trainer(config: Config) -> None:
    trainer = config.trainer
    for key, every in (("trainer.test_freq", trainer.test_freq), ("trainer.save_freq", trainer.save_freq)):
        if every > trainer.total_training_steps:
            rule = f"is never reached in trainer.total_training_steps={trainer.total_training_steps}"
            refuse(config, key, rule, f"set {key}=0 (at the end) or at most {trainer.total_training_steps}")
    if len(set(trainer.logger)) != len(trainer.logger):
        refuse(config, "trainer.logger", "names a tracker twice", f"set trainer.logger=[{','.join(sorted(set(trainer.logger)))}]")
    if "/" in trainer.project_name or "/" in trainer.experiment_name:
        key = "trainer.project_name" if "/" in trainer.project_name else "trainer.experiment_name"
        refuse(config, key, "is a name, not a path", "leave the / out; trainer.default_local_dir is the folder of runs")


def _check_rollout(config: Config, key: str) -> None:
    rollout: RolloutConfig = value_at(config, key)
    turns, agent = rollout.multi_turn, rollout.agent
    if not turns.enable:
        keys = [f"{key}.multi_turn.{leaf.key}" for leaf in leaves_of(type(turns)) if leaf.key != "enable"]
        refuse_dead(config, keys, because=f"{key}.multi_turn.enable=false", fix=f"set {key}.multi_turn.enable=true")
        if agent.default_agent_loop.startswith("multi_turn"):
            fix = f"set {key}.multi_turn.enable=true, or {key}.agent.default_agent_loop=generate_only_agent"
            refuse(config, f"{key}.agent.default_agent_loop", f"needs {key}.multi_turn.enable=true", fix)
    if agent.default_agent_loop == "generate_only_agent":
        because, fix = f"{key}.agent.default_agent_loop=generate_only_agent", f"set {key}.agent.default_agent_loop=multi_turn_agent"
        if turns.enable:
            refuse(config, f"{key}.multi_turn.enable", f"has no effect while {because}: that loop takes one turn", fix)
    if agent.default_agent_loop in APPENDING_LOOPS:
        because, fix = f"{key}.agent.default_agent_loop={agent.default_agent_loop}", "choose a loop of an agent with branches"
        refuse_dead(config, [f"{key}.agent.branch_reward"], because=because, fix=fix)
    if agent.default_agent_loop in ENVIRONMENT_LOOPS:
        for part in ("env", "data"):
            if not value_at(config, f"{key}.agent.{part}.name"):
                example = {"env": "tool_env", "data": "tool_agent_data"}[part]
                rule = f"{agent.default_agent_loop} plays an environment through a data adapter: both must be named"
                refuse(config, f"{key}.agent.{part}.name", rule, f"set {key}.agent.{part}.name={example}")
    if turns.max_tokens_per_turn > rollout.response_length:
        rule = f"is more than a whole trajectory ({key}.response_length={rollout.response_length})"
        refuse(config, f"{key}.multi_turn.max_tokens_per_turn", rule, f"set {key}.multi_turn.max_tokens_per_turn=0")
    if agent.step_timeout_s > agent.episode_timeout_s:
        rule = f"is more than a whole episode has ({key}.agent.episode_timeout_s={agent.episode_timeout_s:g})"
        refuse(config, f"{key}.agent.step_timeout_s", rule, f"set {key}.agent.step_timeout_s={agent.episode_timeout_s:g} or less")
    check_agent_yaml(config, key)
    _check_scripted(config, key, rollout)


def _check_scripted(config: Config, key: str, rollout: RolloutConfig) -> None:
    if rollout.name == "scripted" and not rollout.script_path:
        fix = f"set {key}.script_path=answers.yaml"
        refuse(config, f"{key}.script_path", f"{key}.name=scripted answers from a file, which must be named", fix)
    if rollout.name != "scripted" and rollout.script_path:
        fix = f"set {key}.name=scripted, or leave {key}.script_path out"
        refuse(config, f"{key}.script_path", f"has no effect while {key}.name={rollout.name}", fix)


def _check_one_set_of_engines(config: Config) -> None:
    for name in SHARED_ROLLOUT_KEYS:
        gen, val = value_at(config, f"{GEN}.{name}"), value_at(config, f"{VAL}.{name}")
        if gen != val:
            rule = f"differs from {GEN}.{name}={gen!r}: training and validation share engines and agent workers"
            refuse(config, f"{VAL}.{name}", rule, f"leave {VAL}.{name} out")
    gen, val = config.gen_actor_rollout_ref.rollout, config.train_actor_rollout_ref.rollout
    longest = gen.prompt_length + gen.response_length
    if val.prompt_length + val.response_length > longest:
        rule = f"makes validation episodes longer than the engines' slots ({GEN}.prompt_length + response_length = {longest})"
        refuse(config, f"{VAL}.response_length", rule, f"set {VAL}.response_length={max(1, longest - val.prompt_length)} or less")


def _check_training_sampling(config: Config) -> None:
    rollout, actor = config.gen_actor_rollout_ref.rollout, config.train_actor_rollout_ref.actor
    if rollout.temperature == 0:
        rule = "greedy episodes of a task are all equal: a group has nothing to compare"
        refuse(config, f"{GEN}.temperature", rule, f"set {GEN}.temperature=1.0")
    if rollout.n != 1:
        rule = "has no effect on training: the episodes of a task are psrl.rollout_n (validation's are train_actor_rollout_ref.rollout.n)"
        refuse(config, f"{GEN}.n", rule, f"set psrl.rollout_n={rollout.n}, or {VAL}.n={rollout.n}, and leave {GEN}.n out")
    truncated = [name for name, is_cut in (("top_p", rollout.top_p < 1), ("top_k", rollout.top_k > 0)) if is_cut]
    if truncated and actor.old_logprobs == "recompute":
        name = truncated[0]
        rule = f"cuts the distribution that is sampled from, which {ACTOR}.old_logprobs=recompute does not know"
        refuse(config, f"{GEN}.{name}", rule, f"set {GEN}.{name}={DEFAULTS[f'{GEN}.{name}']}, or {ACTOR}.old_logprobs=rollout")
    if config.train_actor_rollout_ref.rollout.temperature == 0 and config.train_actor_rollout_ref.rollout.n > 1:
        rule = "greedy validation gives the same episode every time"
        refuse(config, f"{VAL}.n", rule, f"set {VAL}.n=1, or a positive {VAL}.temperature")
    if config.train_actor_rollout_ref.rollout.temperature == 0 and config.trainer.val_greedy:
        rule = f"repeats the validation, which is greedy already ({VAL}.temperature=0)"
        refuse(config, "trainer.val_greedy", rule, "set trainer.val_greedy=false")
