"""The curves of docs/algorithms.md: `python benchmarks/curves/algorithms.py FOLDER [LABEL ...]`, all labels or those named.

Each is a `psrl train retool_tiny` with its algorithm, one after the other, in FOLDER/<label>. A label whose run is there already is not run
again. Prints the accuracies by step as a table, and writes FOLDER/algorithms.svg.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from psrl.telemetry import names
from psrl.telemetry.metric_log import read_metrics

ACTOR = "train_actor_rollout_ref.actor"
COMMON = ("trainer.total_training_steps=30", "trainer.test_freq=10")
TWO_UPDATES = (f"{ACTOR}.ppo_mini_batch_size=8", f"{ACTOR}.optim.lr=3e-4")
"""A ratio needs a second update to leave 1; at 5e-4 each the tiny model's two steps would be too long."""
RUNS = {
    "ppo": ("algorithm.adv_estimator=gae", "algorithm.lam=0.95", "critic.optim.lr=1e-3", "trainer.critic_warmup=2"),
    "rloo": ("algorithm.adv_estimator=rloo",),
    "gspo": (*TWO_UPDATES, f"{ACTOR}.policy_loss=gspo", f"{ACTOR}.loss_agg_mode=seq_mean", f"{ACTOR}.clip_ratio_low=0.03",
             f"{ACTOR}.clip_ratio_high=0.04"),
    "cispo": (*TWO_UPDATES, f"{ACTOR}.policy_loss=cispo", f"{ACTOR}.clip_ratio_low=1", f"{ACTOR}.clip_ratio_high=0.28"),
    "dr_grpo": ("algorithm.norm_adv_by_std_in_grpo=false", f"{ACTOR}.loss_agg_mode=seq_sum", f"{ACTOR}.loss_scale_factor=144"),
}  # fmt: skip


def finished_run(folder: Path, label: str) -> Path | None:
    """The run of a label that came to its end."""
    for run in sorted((folder / label / "retool_tiny").glob("*")):
        if (run / "metrics.jsonl").is_file() and 30 in accuracies(run):
            return run
    return None


def accuracies(run: Path) -> dict[int, tuple[float, float]]:
    """(mean@4 at temperature 1, greedy) by step."""
    wanted = (names.VAL_MEAN_AT_N_ACCURACY, names.VAL_GREEDY_ACCURACY)
    return {
        step: (metrics[wanted[0]], metrics[wanted[1]])
        for step, metrics in read_metrics(run / "metrics.jsonl").items()
        if all(name in metrics for name in wanted)
    }


def main() -> None:
    """Run what is missing, then show what there is."""
    folder, labels = Path(sys.argv[1]), sys.argv[2:]
    folder.mkdir(parents=True, exist_ok=True)
    for label in labels or RUNS:
        if finished_run(folder, label) is None:
            command = [Path(sys.executable).parent / "psrl", "train", "retool_tiny", *COMMON, *RUNS[label]]
            subprocess.run([*command, f"trainer.default_local_dir={(folder / label).resolve()}"], check=True, cwd=folder)
    runs = {label: run for label in RUNS if (run := finished_run(folder, label)) is not None}
    print("| algorithm | greedy, before -> after | mean@4 at temperature 1, by step |\n|---|---|---|")
    for label, run in runs.items():
        by_step = accuracies(run)
        greedy = f"{by_step[0][1]:.2f} -> {by_step[max(by_step)][1]:.2f}"
        print(f"| {label} | {greedy} | {', '.join(f'{step}: {each[0]:.2f}' for step, each in sorted(by_step.items()))} |")
    draw = Path(__file__).parent / "draw.py"
    subprocess.run([sys.executable, draw, folder / "algorithms.svg", *(f"{label}={run}" for label, run in runs.items())], check=True)


if __name__ == "__main__":
    main()
