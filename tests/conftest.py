"""Property tests draw the same examples in every ordinary run, so that it says the same everywhere; `make fuzz` draws new ones."""

from docker_engine import docker_engine, own_engine
from hypothesis import settings
from sandbox_service import sandbox_service

__all__ = ["docker_engine", "own_engine", "sandbox_service"]

settings.register_profile("same", derandomize=True)
settings.register_profile("new")
settings.load_profile("same")
