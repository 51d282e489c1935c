"""Names of the metrics that psrl logs, once: everybody who logs or shows one imports it from here.

A name is `area/noun/stat` with the unit in the stat where it has one. `env/<name>` and `agent/<name>` are the exception: numbers that
an environment says in its info, or that a black-box agent returns.
"""

from __future__ import annotations

import re
from enum import StrEnum

from psrl.types import Outcome

REWARD_MEAN = "reward/episode/mean"
"""Mean reward of the step's judged episodes."""
REWARD_STD = "reward/episode/std"
ACCURACY_MEAN = "accuracy/episode/mean"
"""Share of the step's judged episodes that were solved."""

TURNS_MEAN = "episode/turns/mean"
TOOL_RATE = "episode/tool_rate/mean"
"""Share of episodes with at least one tool call."""
TOOL_ERRORS_MEAN = "episode/tool_errors/mean"
"""Failed tool calls per episode."""
SAMPLED_TOKENS_MEAN = "episode/sampled_tokens/mean"
"""Tokens that the policy sampled, per episode."""

SESSION_DRIFT_COUNT = "session/drift/tokens"
"""Tokens that a session's record and the agent data of its episode tell differently; 0, or the episodes are `infra_error`."""
SESSION_BRANCHES_MEAN = "session/branches/mean"
"""Branches beyond the first, per episode of a session."""
SESSION_OVERRIDES_MEAN = "session/sampling_overrides/mean"
"""Sampling parameters of the agent's that gave way to the run's, per episode of a session."""

GENERATION_TOKENS_PER_SECOND = "generation/tokens/per_second"
"""Sampled tokens of the episodes that the step trained on, over the step's wall time."""
GENERATION_TOKENS_COUNT = "generation/tokens/count"

STEP_SECONDS = "time/step/seconds"
"""Wall time of the whole step."""

TRAIN_LOSS = "train/loss/value"
TRAIN_GRAD_NORM = "train/grad_norm/mean"
TRAIN_LR = "train/lr/value"
TRAIN_ENTROPY = "train/entropy/mean"
"""Nats per sampled token."""
TRAIN_CLIP_FRACTION = "train/clip/fraction"
TRAIN_LOGPROB_GAP_MAX = "train/logprob_gap/max"
"""Largest |engine's - trainer's| logprob of a sampled token, nats, on the same weights."""
TRAIN_LOGPROB_GAP_MEAN = "train/logprob_gap/mean"
TRAIN_TOKENS_COUNT = "train/tokens/count"
TRAIN_STEP_SECONDS = "train/step/seconds"

STALENESS_VERSION_GAP_MAX = "staleness/version_gap/max"
"""Largest age, in policy versions, of what the step trained on."""
STALENESS_VERSION_GAP_MEAN = "staleness/version_gap/mean"
"""Mean age of the step's groups."""
STALENESS_IN_FLIGHT_COUNT = "staleness/in_flight/count"
"""Groups being generated when the step was done."""
STALENESS_ARRIVED_COUNT = "staleness/arrived/count"
"""Groups that waited for a later update when the step was done."""
SYNC_PUSH_SECONDS = "sync/push/seconds"
"""From the trainer's weights to a version that replicas can take."""
SYNC_PULLS_COUNT = "sync/pulls/count"
"""Replicas that took weights during the step."""
SYNC_PULL_SECONDS_MEAN = "sync/pull/seconds"
SYNC_PAUSED_SECONDS_MAX = "sync/paused/seconds"
"""Longest that a replica stood still for it."""
SYNC_PAUSED_SECONDS_MEAN = "sync/paused_mean/seconds"
"""The same, in the mean of the step's syncs."""
REPLICAS_IDLE_SHARE = "replicas/idle/share"
"""Share of looks at replicas (two a second) that found one without a turn."""
REPLICAS_RUNNING_MEAN = "replicas/running/mean"
"""Turns that a replica samples at once."""
REPLICAS_WAITING_MEAN = "replicas/waiting/mean"
"""Turns that wait for a place in a replica."""
GROUPS_SURPLUS_COUNT = "groups/surplus/count"
"""Redundant groups that came too late and were not issued again."""
GROUPS_REISSUED_COUNT = "groups/reissued/count"
"""Groups that were ended and issued again."""
GROUPS_MOVED_COUNT = "groups/moved/count"
"""Groups moved to another replica in mid-episode."""
GROUPS_OVERDUE_COUNT = "groups/overdue/count"
"""Groups that the proactive filter acted on."""
GROUPS_FILTERED_COUNT = "groups/filtered/count"
"""Groups that dynamic sampling replaced."""
GROUPS_DROPPED_COUNT = "groups/dropped/count"
"""Groups that lost members to `infra_error` and were replaced."""
GROUPS_TRAINED_COUNT = "groups/trained/count"
ERRORS_INFRA_RATE = "errors/infra/rate"
"""Share of the episodes that arrived, trained on or not, that ended in `infra_error` after all retries."""
ERRORS_RETRIES_COUNT = "errors/retries/count"
"""How often an episode that ended `infra_error` was played again."""
PROCESSES_RESTARTS_COUNT = "processes/restarts/count"
"""Processes of the run that died during the step and were started again."""
NETWORK_WEIGHTS_BYTES = "network/weights/bytes"
"""Weights that were brought to other nodes than the trainer's; these six are there only while a run has several nodes."""
NETWORK_WEIGHTS_SECONDS = "network/weights/seconds"
NETWORK_ROWS_BYTES = "network/rows/bytes"
"""Rows that agent workers put into, and ranks took out of, storage on another node."""
NETWORK_ROWS_SECONDS = "network/rows/seconds"
"""Of these calls, one after the other; several may run at once."""
NETWORK_TURNS_BYTES = "network/turns/bytes"
"""Requests and answers of turns that were sampled on another node than their agent worker's."""
NETWORK_TURNS_SECONDS = "network/turns/seconds"
"""From these requests to their answers, one after the other, the sampling included."""
ERRORS_NOT_FINITE_COUNT = "errors/not_finite_metrics/count"
"""Metrics of this step that were NaN or infinite and therefore not logged."""

VAL_GREEDY_ACCURACY = "val/greedy/accuracy"
VAL_MEAN_AT_N_ACCURACY = "val/mean_at_n/accuracy"
VAL_MEAN_AT_N_REWARD = "val/mean_at_n/reward"
VAL_TOOL_RATE = "val/tool_rate/mean"
VAL_OTHER_VERSION_SHARE = "val/other_version/share"
"""Share of validation tasks with tokens of other weights than those that are validated; absent where there are none."""
VAL_SECONDS = "val/time/seconds"

MISMATCH_KL_K1 = "mismatch/kl_k1/mean"
"""Estimates of KL(rollout || train), nats per sampled token: k1 may be negative, k3 may not (docs/off_policy.md)."""
MISMATCH_KL_K3 = "mismatch/kl_k3/mean"
MISMATCH_VERSION_GAP_MEAN = "mismatch/version_gap/mean"
"""Versions by which sampled tokens are older than the weights at the start of their buffer."""
MISMATCH_VERSION_GAP_MAX = "mismatch/version_gap/max"
MISMATCH_RATIO_EFFECTIVE_SHARE = "mismatch/ratio/effective_share"
"""Effective sample size of the tokens under their ratios train / rollout, as a share of the tokens."""
MISMATCH_WEIGHT_EFFECTIVE_SHARE = "mismatch/weight/effective_share"
"""The same under the importance weights that the loss has."""
MISMATCH_WEIGHT_TRUNCATED = "mismatch/weight/truncated_share"
"""Share of tokens whose importance weight was cut."""
MISMATCH_WEIGHT_MAX_UNTRUNCATED = "mismatch/weight/max_untruncated"
MISMATCH_REJECTED_TOKENS = "mismatch/rejected/token_share"
MISMATCH_REJECTED_TRAJECTORIES = "mismatch/rejected/trajectory_share"
"""Share of trajectories that lost a token or more."""
MISMATCH_VETOED_TRAJECTORIES = "mismatch/vetoed/trajectory_share"

_NAME = re.compile(r"[a-z][a-z0-9_]*(/[A-Za-z0-9_.@-]+){2}|(env|agent)(/[A-Za-z0-9_.@-]+)+")


class TimeUse(StrEnum):
    """What the wall time of a step goes to."""

    GENERATION = "generation"
    TOOLS = "tools"
    REWARD = "reward"
    TRAINING = "training"
    SYNC = "sync"
    SAVING = "saving"
    VALIDATION = "validation"
    """Waiting for the validation before, so that another can begin or a checkpoint be made; it stops nobody otherwise."""
    IDLE = "idle"
    """None of the others was going on."""


def time_share(use: TimeUse) -> str:
    """Name of the share of the step's wall time that went to `use`; they add up to 1."""
    return f"time/share/{use.value}"


def startup_seconds(part: str) -> str:
    """Name of the seconds from the command until `part` of the run was up.

    Example:
        "train workers" -> "startup/train_workers/seconds"
    """
    return f"startup/{part.lower().replace(' ', '_')}/seconds"


def outcome_share(outcome: Outcome) -> str:
    """Name of the share of the step's episodes that ended in `outcome`."""
    return f"episode/outcome/{outcome.value}"


def mismatch_kl_of_gap(gap: int) -> str:
    """Name of `MISMATCH_KL_K3` of the tokens that weights `gap` versions older sampled."""
    return f"{MISMATCH_KL_K3}_gap{gap}"


def mismatch_kl_of_turn(turn: int) -> str:
    """Name of `MISMATCH_KL_K3` of the tokens of a turn, counted from 0."""
    return f"{MISMATCH_KL_K3}_turn{turn}"


def said_metric(area: str, name: str) -> str:
    """Metric name of a number that an environment (area `env`) or an agent (`agent`) calls `name`, whatever characters it chose.

    Example:
        "env", "board size (cm)" -> "env/board_size_cm"
    """
    return f"{area}/" + (re.sub(r"[^A-Za-z0-9_.@/-]+", "_", name).strip("_/") or "unnamed")


def is_metric_name(name: str) -> bool:
    """Whether `name` is `area/noun/stat`, `env/...` or `agent/...`."""
    return _NAME.fullmatch(name) is not None
