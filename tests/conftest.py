"""Property tests draw the same examples in every ordinary run, so that it says the same everywhere; `make fuzz` draws new ones."""

from hypothesis import settings

settings.register_profile("same", derandomize=True)
settings.register_profile("new")
settings.load_profile("same")
