"""Where model-written code runs: sandboxes of one contract, a warm pool of Python interpreters, and the reaper."""

from psrl.sandbox.build import BackendSandboxes, backends, build_interpreter, build_pool, build_sandbox, limits_of
from psrl.sandbox.interpreter import PythonInterpreter
from psrl.sandbox.reaper import Leftovers, find_leftovers, reap, worker_label

__all__ = [
    "BackendSandboxes",
    "Leftovers",
    "PythonInterpreter",
    "backends",
    "build_interpreter",
    "build_pool",
    "build_sandbox",
    "find_leftovers",
    "limits_of",
    "reap",
    "worker_label",
]
