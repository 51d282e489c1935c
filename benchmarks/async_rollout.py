"""Does generation beside training pay, and does the simulator say how much?

    python benchmarks/async_rollout.py

Two real runs of the tiny model, one after the other, on the same machine with the same capacity: two replicas of the scripted engine
(its turns take long-tailed times and no CPU), tools in sandboxes, real training. The first is synchronous (`psrl.staleness=0`), the
second has staleness 2, partial and redundant rollout. Throughput is that of the steps between the start-up and the end. Beside it
stands what `psrl simulate` says of both, from the seconds that each run's updates and syncs took, and the bound that no staleness can
pass. Ends with 1 where an aim is missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from psrl.config.load import RECIPES_FOLDER, Purpose, load_config
from psrl.simulation import SimulatedCluster, SimulationReport, Workload, measured_workload, simulate
from psrl.simulation.workload import DrawnEpisodes
from psrl.telemetry import names
from psrl.telemetry.metric_log import read_metrics
from psrl.telemetry.run_folder import RunFolder
from psrl.types.latency import Latency

TURN = "lognormal:median={median},sigma=1.2,max={longest}"
CALL = '<tool_call>\n{"name": "code_interpreter", "arguments": {"code": "print(6*7)"}}\n</tool_call><|im_end|>'
REWARD = """
import zlib


def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(zlib.crc32(solution_str.encode()) % 2)
"""
RECIPE = """
defaults: [/retool_tiny/config@_global_, _self_]
gen_actor_rollout_ref:
  rollout: {{name: scripted, script_path: {folder}/script.json, num_replicas: 2, max_num_seqs: 10}}
train_actor_rollout_ref:
  actor: {{optim: {{lr: 1e-5}}}}
  rollout: {{n: 1}}
data: {{generator: {{num_val: 2}}, train_batch_size: 4}}
psrl: {{rollout_n: 8}}
reward: {{name: custom}}
custom_reward_function: {{path: {folder}/reward.py}}
trainer:
  test_freq: 0
  val_before_train: false
  val_greedy: false
  trajectories_per_step: 0
  logger: [jsonl]
  default_local_dir: {folder}/runs
"""
RUNS = {
    "synchronous": ("psrl.staleness=0",),
    "staleness 2, partial, redundant": ("psrl.staleness=2", "psrl.redundant_episodes=1"),
}
STEPS_SHARE = {"synchronous": 0.5, "staleness 2, partial, redundant": 1.0}
"""Of --steps; asynchronous ones are shorter, and what is in flight at both ends of the measured part counts less among many."""
NUM_SIMULATED = 300
FOR_EVER = 64
"""A staleness that never holds anybody back here."""
MIN_RATIO, MIN_SHARE_OF_BOUND, MAX_ERROR = 2.0, 0.95, 0.10


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One run, and what the simulator says of it."""

    name: str
    run: Path
    workload: Workload
    step_s: float
    episodes_per_s: float
    slots_busy: float
    """As replicas said twice a second."""
    predicted: SimulationReport


def write_recipe(folder: Path, turn: Latency) -> Path:
    """Script, reward and settings: every episode calls the tool once and then answers; both turns take `turn` seconds."""
    tokenizer = AutoTokenizer.from_pretrained(RECIPES_FOLDER / "retool_tiny" / "model")
    call, (answered,) = tokenizer.encode(CALL), tokenizer.encode("<tool_response>")
    end, low = call[-1], max(tokenizer.all_special_ids) + 1
    header = tokenizer.encode("<|im_start|>assistant\n")
    gaps = len(call) - 1  # the first token comes at once
    per_token = str(replace(turn, scale=turn.scale / gaps, max_value=turn.max_value / gaps))
    answer = {"low": low, "high": low + 200, "min_tokens": gaps, "max_tokens": gaps, "by_seed": True, "last_ids": [end]}
    timing = {"per_token_s": per_token, "finish_reason": "stop"}
    script = {
        "vocab_size": len(tokenizer),
        "max_model_len": 1024,
        "turn_header": header,
        "turns": [{"when_prompt_contains": [answered], "random": answer, **timing}, {"token_ids": call, **timing}],
    }
    (folder / "script.json").write_text(json.dumps(script))
    (folder / "reward.py").write_text(REWARD)
    (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder))
    return folder / "recipe.yaml"


def train(recipe: Path, overrides: tuple[str, ...], num_steps: int) -> Path:
    """A real run; its folder."""
    arguments = ["train", str(recipe), f"trainer.total_training_steps={num_steps}", *overrides]
    with (recipe.parent / "output.txt").open("a") as output:
        subprocess.run([sys.executable, "-m", "psrl", *arguments], stdout=output, stderr=subprocess.STDOUT, check=True)
    run = RunFolder.latest(recipe.parent / "runs", recipe.stem)
    assert run is not None
    return run.path


def compare(name: str, recipe: Path, turn: Latency, options: argparse.Namespace) -> Compared:
    """Run it, and simulate it with the seconds that its parts took."""
    num_steps = round(options.steps * STEPS_SHARE[name])
    steady = range(options.skip + 1, num_steps - options.leave + 1)
    run = train(recipe, RUNS[name], num_steps)
    cluster = SimulatedCluster.of(load_config(str(recipe), RUNS[name], purpose=Purpose.SIMULATION))
    metrics = read_metrics(RunFolder.open(run).metrics)
    steps = [metrics[number] for number in steady]
    step_s = fmean(step[names.STEP_SECONDS] for step in steps)
    looks = [step for step in steps if names.REPLICAS_RUNNING_MEAN in step]
    running = sum(step[names.REPLICAS_RUNNING_MEAN] * step[names.STEP_SECONDS] for step in looks)
    return Compared(
        name=name,
        run=run,
        step_s=step_s,
        episodes_per_s=cluster.groups_per_buffer * cluster.psrl.rollout_n / step_s,
        slots_busy=running / sum(step[names.STEP_SECONDS] for step in looks) / cluster.slots_per_instance,
        workload=(workload := workload_of(run, turn, steady)),
        predicted=predict(cluster, workload),
    )


def workload_of(run: Path, turn: Latency, steady: range) -> Workload:
    """Turns as the script has them, everything else as the run's steady part measured it."""
    measured = measured_workload(run, first_step=steady[0], last_step=steady[-1])
    episodes = DrawnEpisodes(turn=turn, tool=measured.episodes.tools(), reward=measured.episodes.grading(), min_turns=2, max_turns=2)
    return replace(measured, episodes=episodes)


def predict(cluster: SimulatedCluster, workload: Workload) -> SimulationReport:
    """Many steps, so that chance is the run's alone."""
    return simulate(cluster, workload, num_steps=NUM_SIMULATED, num_warmup=10)


def main() -> int:
    """Run, simulate, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="updates of the asynchronous run; the synchronous one has half of them")
    parser.add_argument("--skip", type=int, default=4, help="first ones that are not measured")
    parser.add_argument("--leave", type=int, default=4, help="last ones that are not measured")
    parser.add_argument("--median", type=float, default=0.4, help="seconds of half of the turns")
    parser.add_argument("--longest", type=float, default=5.0, help="seconds of the longest turn")
    parser.add_argument("--folder", type=Path, help="kept with runs and script; a temporary one unless named")
    options = parser.parse_args()
    turn = Latency.parse(TURN.format(median=options.median, longest=options.longest), key="turn")
    with tempfile.TemporaryDirectory(prefix="async-rollout-") as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        recipe = write_recipe(folder.absolute(), turn)
        slow, fast = (compare(name, recipe, turn, options) for name in RUNS)
        cluster = SimulatedCluster.of(load_config(str(recipe), RUNS[fast.name], purpose=Purpose.SIMULATION))
        unbound = replace(cluster, psrl=replace(cluster.psrl, staleness=FOR_EVER))
        return report(slow, fast, turn, foretold=predict(cluster, slow.workload), unbound=predict(unbound, fast.workload))


def report(slow: Compared, fast: Compared, turn: Latency, *, foretold: SimulationReport, unbound: SimulationReport) -> int:
    """Print everything side by side; 0 where all aims are reached."""
    console = Console(highlight=False, width=130)
    console.print(f"turns of {turn} seconds, mean {turn.mean():.3f}; two an episode")
    table = Table("", "s/update", "episodes/s", "simulated", "error", "slots busy", "simulated", box=SIMPLE_HEAD)
    errors = []
    for each in (slow, fast):
        error = each.predicted.episodes_per_s / each.episodes_per_s - 1
        errors.append(abs(error))
        table.add_row(
            each.name,
            f"{each.step_s:.2f}",
            f"{each.episodes_per_s:.2f}",
            f"{each.predicted.episodes_per_s:.2f}",
            f"{error:+.1%}",
            f"{each.slots_busy:.0%}",
            f"{each.predicted.engines_busy:.0%}",
        )
    table.add_row("no bound on staleness", "", "", f"{unbound.episodes_per_s:.2f}", "", "", f"{unbound.engines_busy:.0%}")
    console.print(table)
    ratio, share = fast.episodes_per_s / slow.episodes_per_s, fast.episodes_per_s / unbound.episodes_per_s
    simulated = fast.predicted.episodes_per_s / slow.predicted.episodes_per_s
    console.print(f"foretold from the synchronous run's seconds alone: {foretold.episodes_per_s:.2f} episodes/s asynchronously")
    console.print(f"ratio {ratio:.2f} (aim {MIN_RATIO:g}; simulated {simulated:.2f})")
    console.print(f"of the simulated throughput without a bound on staleness {share:.1%} (aim {MIN_SHARE_OF_BOUND:.0%})")
    analytic = fast.predicted.bound
    console.print(f"slots / mean busy seconds allow {analytic.episodes_per_s:.2f} episodes/s (limited by the {analytic.limiting})")
    console.print(f"largest error of the simulator {max(errors):.1%} (aim {MAX_ERROR:.0%})")
    return 0 if ratio >= MIN_RATIO and share >= MIN_SHARE_OF_BOUND and max(errors) <= MAX_ERROR else 1


if __name__ == "__main__":
    sys.exit(main())
