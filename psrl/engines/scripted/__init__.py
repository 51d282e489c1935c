"""The scripted engine: the contract with answers from a file, for tests and benchmarks of everything around an engine."""
