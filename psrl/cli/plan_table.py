"""What `psrl train --dry-run` prints: the settings as YAML, then the plan of processes."""

from rich.console import Console
from rich.table import Table

from psrl.config.load import to_yaml
from psrl.config.plan import Plan
from psrl.config.plan_of_nodes import PlanOfNodes
from psrl.config.tree import Config


def print_dry_run(config: Config, plan: Plan | PlanOfNodes) -> None:
    """YAML first, plain, so that it can be copied; then the table, or one for each node and what lies where."""
    console = Console(soft_wrap=True)
    console.print(to_yaml(config), markup=False, highlight=False)
    if isinstance(plan, Plan):
        print_plan(plan)
        console.print("nothing was started")
        return
    for names, plan_of_node in _equal_plans(plan):
        console.print(f"[bold]{names}[/bold]")
        print_plan(plan_of_node)
    for line in plan.placement.lines():
        console.print(line, markup=False, highlight=False)
    console.print("nothing was started")


def _equal_plans(plan: PlanOfNodes) -> list[tuple[str, Plan]]:
    """Plans of nodes, with the names of those that have it."""
    found: list[tuple[list[str], Plan]] = []
    for name, plan_of_node in plan.plans.items():
        same = next((names for names, known in found if known == plan_of_node), None)
        if same is None:
            found.append(([name], plan_of_node))
        else:
            same.append(name)
    return [(", ".join(names), plan_of_node) for names, plan_of_node in found]


def print_plan(plan: Plan) -> None:
    """The table and its sums."""
    console = Console(soft_wrap=True)
    console.print(plan_table(plan))
    machine = plan.machine
    gpus = f", {machine.num_gpus} GPUs" if machine.num_gpus else ""
    memory = f"{plan.memory_bytes / 2**30:.1f} of {machine.memory_bytes / 2**30:.1f} GiB"
    console.print(f"{plan.num_processes} processes, {memory}, {machine.num_cores} cores{gpus}")


def plan_table(plan: Plan) -> Table:
    """One row per kind of process."""
    has_gpus = any(process.gpu_bytes for process in plan.processes)
    table = Table("process", "count", "cores each", "MiB each", *(("GiB on a GPU",) if has_gpus else ()), "what for")
    for process in plan.processes:
        cores = str(process.num_cores) if process.num_cores else "shared"
        on_gpu = (f"{process.gpu_bytes / 2**30:.1f}" if process.gpu_bytes else "",) if has_gpus else ()
        table.add_row(process.role, str(process.count), cores, f"{process.memory_bytes / 2**20:.0f}", *on_gpu, process.reason)
    return table
