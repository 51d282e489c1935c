"""Wrong settings: each is a ConfigError with key, value and fix before anything starts, within three seconds."""

import resource
import subprocess
import sys
import time

import pytest
from config_files import write_recipe

from psrl.cli.main import main
from psrl.config.cross_checks import check_names
from psrl.config.load import Purpose, load_config
from psrl.errors import ConfigError

GEN = "gen_actor_rollout_ref.rollout"
VAL = "train_actor_rollout_ref.rollout"
ACTOR = "train_actor_rollout_ref.actor"
MODEL = "train_actor_rollout_ref.model"
SINGLE = (f"{GEN}.agent.default_agent_loop=generate_only_agent", f"{GEN}.multi_turn.max_turns=1")
BY_NCCL = ("psrl.ps_mode=nccl", "psrl.ray_address=auto")
GATEWAY = "psrl.rollout_gateway.enable=true"
MAX_SECONDS = 3.0
"""Of computing: what the program itself takes, however busy the machine is with other tests."""

# (overrides, key of the error, value shown, words of the fix)
WRONG = [
    # Names.
    (["psrl.rolout_n=4"], "psrl.rolout_n", 4, "psrl.rollout_n"),
    (["temperature=0.5"], "temperature", 0.5, f"{GEN}.temperature"),
    (["trainer.total_epochs=3"], "trainer.total_epochs", 3, "trainer.total_training_steps"),
    (["foo.bar=3"], "foo.bar", 3, "--dry-run"),
    (["actor.optim.lr=0.1"], "actor.optim.lr", 0.1, f"{ACTOR}.optim.lr"),
    (["rollout.multi_turn.max_turn=3"], "rollout.multi_turn.max_turn", 3, "multi_turn.max_turns"),
    (["psrl=4"], "psrl", 4, "psrl.staleness"),
    ([f"{GEN}.multi_turn=true"], f"{GEN}.multi_turn", True, f"{GEN}.multi_turn.enable"),
    # Grammar.
    (["+psrl.rollout_n=4"], "psrl.rollout_n", "+psrl.rollout_n=4", "psrl.rollout_n=VALUE"),
    (["~psrl.rollout_n"], "psrl.rollout_n", "~psrl.rollout_n", "psrl.rollout_n=VALUE"),
    (["psrl.rollout_n=4,8"], "psrl.rollout_n", "psrl.rollout_n=4,8", "psrl.rollout_n=VALUE"),
    (["psrl.rollout_n"], "psrl.rollout_n", "psrl.rollout_n", "key=value"),
    # Types.
    (["psrl.rollout_n=four"], "psrl.rollout_n", "four", "psrl.rollout_n=8"),
    (["psrl.rollout_n=4.5"], "psrl.rollout_n", 4.5, "psrl.rollout_n=8"),
    (["psrl.rollout_n=true"], "psrl.rollout_n", True, "psrl.rollout_n=8"),
    (["psrl.rollout_n=null"], "psrl.rollout_n", None, "psrl.rollout_n=8"),
    ([f"{ACTOR}.use_kl_loss=1"], f"{ACTOR}.use_kl_loss", 1, f"{ACTOR}.use_kl_loss=true"),
    ([f"{ACTOR}.optim.lr=fast"], f"{ACTOR}.optim.lr", "fast", f"{ACTOR}.optim.lr=1e-06"),
    (["data.train_files=rows.jsonl"], "data.train_files", "rows.jsonl", "data.train_files=[a,b]"),
    (["trainer.logger=[console,3]"], "trainer.logger", ["console", 3], "trainer.logger=[a,b]"),
    # Bounds.
    ([f"{ACTOR}.optim.lr=-0.001"], f"{ACTOR}.optim.lr", -0.001, f"{ACTOR}.optim.lr=1e-06"),
    ([f"{ACTOR}.optim.lr=nan"], f"{ACTOR}.optim.lr", "nan", f"{ACTOR}.optim.lr=1e-06"),
    ([f"{ACTOR}.optim.beta1=1.0"], f"{ACTOR}.optim.beta1", 1.0, f"{ACTOR}.optim.beta1=0.9"),
    ([f"{GEN}.response_length=0"], f"{GEN}.response_length", 0, f"{GEN}.response_length=512"),
    ([f"{GEN}.temperature=-1"], f"{GEN}.temperature", -1.0, f"{GEN}.temperature=1.0"),
    ([f"{GEN}.top_p=0"], f"{GEN}.top_p", 0.0, f"{GEN}.top_p=1.0"),
    ([f"{GEN}.top_p=1.5"], f"{GEN}.top_p", 1.5, f"{GEN}.top_p=1.0"),
    (["data.train_batch_size=0"], "data.train_batch_size", 0, "data.train_batch_size=16"),
    (["trainer.total_training_steps=0"], "trainer.total_training_steps", 0, "trainer.total_training_steps=10"),
    (["psrl.max_infra_error_rate=2"], "psrl.max_infra_error_rate", 2.0, "psrl.max_infra_error_rate=0.5"),
    (["psrl.deadlines.startup_s=0"], "psrl.deadlines.startup_s", 0.0, "psrl.deadlines.startup_s=180.0"),
    (["psrl.rollout_gateway.retry_for_s=-1"], "psrl.rollout_gateway.retry_for_s", -1.0, "psrl.rollout_gateway.retry_for_s=30.0"),
    (["psrl.rollout_gateway.agent_sampling=keep"], "psrl.rollout_gateway.agent_sampling", "keep", "override, refuse"),
    (["sandbox.memory_mb=1"], "sandbox.memory_mb", 1, "sandbox.memory_mb=512"),
    (["sandbox.wall_s=-3"], "sandbox.wall_s", -3.0, "sandbox.wall_s=10.0"),
    (["sandbox.max_starts=0"], "sandbox.max_starts", 0, "sandbox.max_starts=4"),
    (["sandbox.cpus=-1"], "sandbox.cpus", -1.0, "sandbox.cpus=0.0"),
    # Choices.
    ([f"{GEN}.name=sglang"], f"{GEN}.name", "sglang", "torch, vllm, scripted"),
    (["psrl.ps_mode=mooncake"], "psrl.ps_mode", "mooncake", "cpu_ref, nixl_cpu, nccl"),
    (["sandbox.backend=sandboxfusion"], "sandbox.backend", "sandboxfusion", "sandbox_fusion"),
    (["sandbox.max_queue_s=0"], "sandbox.max_queue_s", 0.0, "sandbox.max_queue_s=60.0"),
    ([f"{ACTOR}.loss_agg_mode=token-mean"], f"{ACTOR}.loss_agg_mode", "token-mean", "token_mean"),
    ([f"{ACTOR}.optim.lr_scheduler_type=cosin"], f"{ACTOR}.optim.lr_scheduler_type", "cosin", "cosine"),
    ([f"{MODEL}.dtype=float16"], f"{MODEL}.dtype", "float16", "bfloat16"),
    (["trainer.device=gpu"], "trainer.device", "gpu", "cuda"),
    # Files.
    ([f"{MODEL}.path=???"], f"{MODEL}.path", "???", f"{MODEL}.path="),
    ([f"{MODEL}.path=/nowhere/model"], f"{MODEL}.path", "/nowhere/model", "psrl prepare"),
    ([f"{MODEL}.tokenizer_path=/nowhere/tok"], f"{MODEL}.tokenizer_path", "/nowhere/tok", "a folder with a tokenizer"),
    (["data.train_files=[/nowhere/a.jsonl]"], "data.train_files[0]", "/nowhere/a.jsonl", "relative paths"),
    (["data.val_files=[/nowhere/v.jsonl]"], "data.val_files[0]", "/nowhere/v.jsonl", "relative paths"),
    ([f"{GEN}.multi_turn.tool_config_path=/nowhere/t.yaml"], f"{GEN}.multi_turn.tool_config_path", "/nowhere/t.yaml", "a file"),
    (["reward.name=custom", "custom_reward_function.path=/nowhere/r.py"], "custom_reward_function.path", "/nowhere/r.py", "a file"),
    # Combinations that cannot work.
    (["psrl.ps_mode=nccl"], "psrl.ps_mode", "nccl", "psrl.ray_address=auto"),
    (["psrl.ps_mode=nixl_cpu"], "psrl.ps_mode", "nixl_cpu", "psrl.ray_address=auto"),
    ([*BY_NCCL, "trainer.device=cpu"], "psrl.ps_mode", "nccl", "psrl.ps_mode=cpu_ref or psrl.ps_mode=nixl_cpu"),
    ([*BY_NCCL, f"{GEN}.device=cpu"], "psrl.ps_mode", "nccl", "psrl.ps_mode=cpu_ref or psrl.ps_mode=nixl_cpu"),
    (["sandbox.image=debian"], "sandbox.image", "debian", "sandbox.backend=docker"),
    (["sandbox.user=agent"], "sandbox.user", "agent", "sandbox.backend=docker"),
    (["sandbox.cpus=2", "sandbox.backend=process"], "sandbox.cpus", 2.0, "sandbox.backend=docker"),
    (["sandbox.backend=docker", "sandbox.image=''"], "sandbox.image", "", "sandbox.image=null"),
    (["sandbox.backend=docker", "sandbox.engine_url=localhost"], "sandbox.engine_url", "localhost", "unix:///var/run/docker.sock"),
    (["sandbox.backend=docker", "sandbox.image=debian", "sandbox.packages=[pytest]"],
     "sandbox.packages", ["pytest"], "install them in the image"),
    (["sandbox.backend=sandbox_fusion"], "sandbox.urls", [], "psrl serve sandbox"),
    (["sandbox.backend=sandbox_fusion", "sandbox.urls=[localhost:8080]"], "sandbox.urls", "localhost:8080", "http://127.0.0.1:8080"),
    (["sandbox.backend=sandbox_fusion", "sandbox.urls=['http://h:x']"], "sandbox.urls", "http://h:x", "http://127.0.0.1:8080"),
    (["sandbox.backend=sandbox_fusion", "sandbox.urls=['http://u:p@h']"], "sandbox.urls", "***", "sandbox.api_key_file"),
    (["sandbox.backend=sandbox_fusion", "sandbox.urls=['http://h:1','http://h:1/run_code']"],
     "sandbox.urls", ["http://h:1", "http://h:1/run_code"], "leave one of them out"),
    (["sandbox.urls=['http://h:1']"], "sandbox.urls", ["http://h:1"], "sandbox.backend=sandbox_fusion"),
    (["sandbox.max_queue_s=5"], "sandbox.max_queue_s", 5.0, "sandbox.backend=sandbox_fusion"),
    (["sandbox.backend=sandbox_fusion", "sandbox.urls=['http://h:1']", "sandbox.num_processes=9"],
     "sandbox.num_processes", 9, "leave sandbox.num_processes out"),
    (["sandbox.packages=[no-such-distribution]"], "sandbox.packages", "no-such-distribution", "pip install no-such-distribution"),
    (["psrl.rollout_n=1"], "psrl.rollout_n", 1, "psrl.rollout_n=8"),
    (["psrl.staleness=-1"], "psrl.staleness", -1, "psrl.staleness=0"),
    (["data.max_prompt_length=300"], "data.max_prompt_length", 300, "data.max_prompt_length=256"),
    ([f"{ACTOR}.ppo_mini_batch_size=32"], f"{ACTOR}.ppo_mini_batch_size", 32, f"{ACTOR}.ppo_mini_batch_size=16"),
    ([f"{ACTOR}.ppo_mini_batch_size=5"], f"{ACTOR}.ppo_mini_batch_size", 5, "[1, 2, 4, 8, 16]"),
    ([f"{ACTOR}.ppo_max_token_len_per_gpu=100"], f"{ACTOR}.ppo_max_token_len_per_gpu", 100, f"{ACTOR}.ppo_max_token_len_per_gpu=768"),
    ([f"{ACTOR}.clip_ratio_high=0.1"], f"{ACTOR}.clip_ratio_high", 0.1, f"{ACTOR}.clip_ratio_high=0.2"),
    ([f"{ACTOR}.optim.lr_warmup_steps=50"], f"{ACTOR}.optim.lr_warmup_steps", 50, f"{ACTOR}.optim.lr_warmup_steps=10"),
    (["data.generator.name=arithmetic"], "data.train_files", "arithmetic", "data.generator.name=null"),
    (["data.train_files=[]"], "data.train_files", [], "data.generator.name=NAME"),
    (["data.return_raw_chat=false"], "data.return_raw_chat", False, "data.return_raw_chat=true"),
    ([f"{GEN}.temperature=0"], f"{GEN}.temperature", 0.0, f"{GEN}.temperature=1.0"),
    ([f"{GEN}.top_p=0.9", f"{ACTOR}.old_logprobs=recompute"], f"{GEN}.top_p", 0.9, f"{ACTOR}.old_logprobs=rollout"),
    ([f"{GEN}.top_k=50", f"{ACTOR}.old_logprobs=recompute"], f"{GEN}.top_k", 50, f"{GEN}.top_k=0"),
    ([f"{GEN}.n=4"], f"{GEN}.n", 4, "psrl.rollout_n=4"),
    ([f"{GEN}.n=4", f"{VAL}.n=1"], f"{GEN}.n", 4, f"{VAL}.n=4"),
    ([f"{VAL}.temperature=0", f"{VAL}.n=4"], f"{VAL}.n", 4, f"{VAL}.n=1"),
    ([f"{VAL}.temperature=0"], "trainer.val_greedy", True, "trainer.val_greedy=false"),
    ([f"{VAL}.response_length=600"], f"{VAL}.response_length", 600, f"{VAL}.response_length=512"),
    ([f"{VAL}.num_replicas=2"], f"{VAL}.num_replicas", 2, f"leave {VAL}.num_replicas out"),
    ([f"{VAL}.request_timeout_s=7"], f"{VAL}.request_timeout_s", 7.0, f"leave {VAL}.request_timeout_s out"),
    ([f"{VAL}.multi_turn.tool_config_path=/t.yaml"], f"{VAL}.multi_turn.tool_config_path", "/t.yaml", "leave"),
    (["psrl.incomplete_groups=allow_partial", "psrl.min_group_size=9"], "psrl.min_group_size", 9, "psrl.min_group_size=8"),
    (["psrl.incomplete_groups=allow_partial", "psrl.min_group_size=1"], "psrl.min_group_size", 1, "psrl.min_group_size=2"),
    (["reward.name=custom"], "custom_reward_function.path", None, "custom_reward_function.path=my_reward.py"),
    (["reward.execution.mode=shaped"], "reward.execution.mode", "shaped", "reward.name=execution"),
    (["reward.name=execution", "reward.execution.mode=half"], "reward.execution.mode", "half", "partial_credit"),
    (["reward.name=execution", "reward.timeout_s=5"], "reward.timeout_s", 5.0, "reward.execution.timeout_s"),
    (["reward.name=execution", "reward.execution.max_patch_kb=9999"], "reward.execution.max_patch_kb", 9999, "max_patch_kb=512"),
    ([f"{GEN}.name=scripted"], f"{GEN}.script_path", None, f"{GEN}.script_path="),
    ([f"{GEN}.agent.env.name=null"], f"{GEN}.agent.env.name", None, "tool_env"),
    ([f"{GEN}.agent.default_agent_loop=multi_turn_completion_agent", f"{GEN}.agent.data.name=null"],
     f"{GEN}.agent.data.name", None, "tool_agent_data"),
    ([f"{MODEL}.history_thinking=strip"], f"{MODEL}.history_thinking", "strip", "history_thinking=keep"),
    ([f"{GEN}.agent.branch_reward=mine"], f"{GEN}.agent.branch_reward", "mine", "shared, last"),
    ([f"{GEN}.agent.branch_reward=last"], f"{GEN}.agent.branch_reward", "last", "leave"),
    ([f"{GEN}.agent.agent_loop_config_path=a.yaml"], f"{GEN}.agent.agent_loop_config_path", "a.yaml", "leave"),
    ([f"{GEN}.agent.step_timeout_s=900"], f"{GEN}.agent.step_timeout_s", 900.0, f"{GEN}.agent.step_timeout_s=300"),
    ([f"{GEN}.multi_turn.max_tokens_per_turn=600"], f"{GEN}.multi_turn.max_tokens_per_turn", 600, "max_tokens_per_turn=0"),
    (["psrl.rollout_gateway.max_sessions=9"], "psrl.rollout_gateway.max_sessions", 9, "psrl.rollout_gateway.enable=true"),
    ([GATEWAY, "psrl.rollout_gateway.max_sessions=9"], "psrl.rollout_gateway.max_sessions", 9, "max_sessions=512"),
    ([GATEWAY, "psrl.rollout_gateway.session_idle_timeout_s=60"], "psrl.rollout_gateway.session_idle_timeout_s", 60.0, "=300"),
    (["transfer_queue.total_storage_size=10"], "transfer_queue.total_storage_size", 10, "transfer_queue.total_storage_size=256"),
    (["trainer.save_freq=11"], "trainer.save_freq", 11, "trainer.save_freq=0"),
    (["trainer.logger=[jsonl,jsonl]"], "trainer.logger", ["jsonl", "jsonl"], "trainer.logger=[jsonl]"),
    (["trainer.experiment_name=a/b"], "trainer.experiment_name", "a/b", "trainer.default_local_dir"),
    # Settings without effect.
    ([f"{GEN}.multi_turn.enable=false"], f"{GEN}.multi_turn.max_turns", 4, f"{GEN}.multi_turn.enable=true"),
    ([SINGLE[0]], f"{GEN}.multi_turn.enable", True, f"{GEN}.agent.default_agent_loop=multi_turn_agent"),
    ([*SINGLE, f"{GEN}.multi_turn.enable=false", f"{GEN}.multi_turn.tool_config_path=t.yaml"],
     f"{GEN}.multi_turn.tool_config_path", "t.yaml", f"{GEN}.multi_turn.enable=true"),
    ([f"{ACTOR}.kl_loss_coef=0.1"], f"{ACTOR}.kl_loss_coef", 0.1, f"{ACTOR}.use_kl_loss=true"),
    ([f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=0"], f"{ACTOR}.kl_loss_coef", 0.0, f"{ACTOR}.use_kl_loss=false"),
    (["train_actor_rollout_ref.ref.path=/ref"], "train_actor_rollout_ref.ref.path", "/ref", f"{ACTOR}.use_kl_loss=true"),
    (["algorithm.filter_groups.max_num_gen_batches=3"], "algorithm.filter_groups.max_num_gen_batches", 3, "filter_groups.enable=true"),
    (["psrl.min_group_size=4"], "psrl.min_group_size", 4, "psrl.incomplete_groups=allow_partial"),
    (["reward.overlong_buffer.len=64"], "reward.overlong_buffer.len", 64, "reward.overlong_buffer.enable=true"),
    (["reward.overlong_buffer.enable=true", "reward.overlong_buffer.len=600"],
     "reward.overlong_buffer.len", 600, "reward.overlong_buffer.len=128"),
    (["reward.overlong_buffer.enable=true", f"{GEN}.response_length=300"],
     "reward.overlong_buffer.max_sampled_tokens", 512, "reward.overlong_buffer.max_sampled_tokens=300"),
    ([f"{GEN}.script_path=s.yaml"], f"{GEN}.script_path", "s.yaml", f"{GEN}.name=scripted"),
    ([f"{ACTOR}.optim.min_lr_ratio=0.1"], f"{ACTOR}.optim.min_lr_ratio", 0.1, "linear or cosine"),
    (["data.shuffle=false", "data.seed=7"], "data.seed", 7, "data.shuffle=true"),
    (["data.generator.num_val=7"], "data.generator.num_val", 7, "data.generator.name"),
    (["custom_reward_function.name=score"], "custom_reward_function.name", "score", "reward.name=custom"),
    (["algorithm.adv_estimator=rloo", "algorithm.norm_adv_by_std_in_grpo=false"],
     "algorithm.norm_adv_by_std_in_grpo", False, "algorithm.adv_estimator=grpo"),
]  # fmt: skip


def test_the_recipe_from_which_the_wrong_ones_are_made_is_right(tmp_path):
    config = load_config(str(write_recipe(tmp_path)))
    assert config.gen_actor_rollout_ref.rollout.multi_turn.max_turns == 4


@pytest.mark.parametrize(("overrides", "key", "value", "fix"), WRONG, ids=[" ".join(row[0]) for row in WRONG])
def test_a_wrong_config_is_refused_with_key_value_and_fix(tmp_path, capsys, overrides, key, value, fix):
    recipe = write_recipe(tmp_path)
    began = time.process_time()
    with pytest.raises(SystemExit) as exit_info:
        main(["train", str(recipe), *overrides])
    seconds = time.process_time() - began
    printed = capsys.readouterr().err
    assert exit_info.value.code == 2
    assert f"ConfigError: {key} = " in printed
    shown = value if isinstance(value, str) else repr(value)
    assert shown in printed
    fix_line = printed[printed.index("Fix: ") :]
    assert fix in fix_line
    assert seconds < MAX_SECONDS


def test_there_are_at_least_fifty_wrong_configs():
    assert len(WRONG) >= 50


@pytest.mark.parametrize(
    ("more", "key", "words"),
    [
        ("psrl: {rolout_n: 4}\n", "psrl.rolout_n", "did you mean psrl.rollout_n?"),
        ("psrl: {rollout_n: many}\n", "psrl.rollout_n", "whole number"),
        ("psrl: [1, 2]\n", "psrl", "is a section"),
        ("psrl: {rollout_n: 4, rollout_n: 5}\n", "recipe", "duplicate"),
        ("psrl: {rollout_n: 4\n", "recipe", "cannot be read as YAML"),
        ("reward: {name: '${nothing.here}'}\n", "reward.name", "nothing"),
    ],
    ids=["unknown key", "wrong type", "list for a section", "duplicate key", "broken YAML", "broken interpolation"],
)
def test_a_wrong_yaml_file_is_refused_with_its_key(tmp_path, more, key, words):
    with pytest.raises(ConfigError) as info:
        load_config(str(write_recipe(tmp_path, more)))
    assert info.value.key == key
    assert words in str(info.value)


@pytest.mark.parametrize("text", ["", "retool_tyni", "/nowhere", "missing.yaml"])
def test_a_recipe_that_is_not_there_is_refused(text):
    with pytest.raises(ConfigError) as info:
        load_config(text)
    assert info.value.key == "recipe"


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["sft.generator=null"], "sft.train_files"),
        (["sft.train_files=[a.jsonl]"], "sft.train_files"),
        (["sft.warmup_steps=200"], "sft.warmup_steps"),
        (["sft.generator=null", "sft.train_files=[/nowhere/d.jsonl]"], "sft.train_files[0]"),
    ],
)
def test_wrong_sft_settings_are_refused(tmp_path, overrides, key):
    with pytest.raises(ConfigError) as info:
        load_config(str(write_recipe(tmp_path)), overrides, purpose=Purpose.SFT)
    assert info.value.key == key


def test_a_name_that_no_registry_knows_is_refused_with_the_nearest_one(tmp_path):
    config = load_config(str(write_recipe(tmp_path)))
    config.reward.name = "retol"
    with pytest.raises(ConfigError, match="did you mean retool"):
        check_names(config, {"reward.name": ("environment", "retool")})
    check_names(config, {"reward.name": ("retol",), f"{GEN}.agent.env.name": ("tool_env",), "trainer.logger": config.trainer.logger})


def test_a_dotted_path_is_left_to_its_registry(tmp_path):
    config = load_config(str(write_recipe(tmp_path)), ["reward.name=my_package.my_file.score"])
    check_names(config, {"reward.name": ("environment",)})


@pytest.mark.parametrize(
    "overrides",
    [
        ["psrl.rolout_n=4"],
        ["psrl.rollout_n=1"],
        [f"{MODEL}.path=/nowhere"],
        ["reward.name=retol"],
        [f"{GEN}.agent.default_agent_loop=multi_turn_agnt"],
        [f"{GEN}.agent.env.name=toolenv"],
        [f"{GEN}.agent.data.name=tool_data"],
        [f"{GEN}.multi_turn.format=hermess"],
    ],
    ids=" ".join,
)
def test_the_real_program_answers_a_wrong_config_within_three_seconds(tmp_path, overrides):
    recipe = write_recipe(tmp_path)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    program = [sys.executable, "-m", "psrl", "train", str(recipe), *overrides]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert done.returncode == 2
    assert done.stderr.startswith("ConfigError: ")
    assert "Fix: " in done.stderr
    assert "Traceback" not in done.stderr
    assert seconds < MAX_SECONDS
