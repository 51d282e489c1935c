"""Worlds that answer actions with observations; importing this package registers those that psrl brings."""

from psrl.environments import mini_swe_env, single_turn, tool_env
from psrl.environments.base import Environment, EnvironmentParts, build_environment, environments, register_environment
from psrl.environments.check import EnvironmentReport, Finding, check_environment

__all__ = [
    "Environment",
    "EnvironmentParts",
    "EnvironmentReport",
    "Finding",
    "build_environment",
    "check_environment",
    "environments",
    "mini_swe_env",
    "register_environment",
    "single_turn",
    "tool_env",
]
