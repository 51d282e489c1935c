"""A run on virtual time: the coordinator of `psrl train`, with models where engines, tools, graders and the trainer would be.

Who may start, what is trained on, who syncs and who plays what is decided by `psrl.staleness`, unchanged; only what takes time in the
real run is a model here. Nothing waits, so an hour of a cluster takes seconds.
"""

from psrl.simulation.bound import Bound, bound_of
from psrl.simulation.cluster import SimulatedCluster
from psrl.simulation.measured import measured_workload
from psrl.simulation.report import SimulationReport
from psrl.simulation.simulation import simulate
from psrl.simulation.workload import Failures, Workload

__all__ = ["Bound", "Failures", "SimulatedCluster", "SimulationReport", "Workload", "bound_of", "measured_workload", "simulate"]
