"""The vLLM engine: vLLM's own `AsyncLLM`, as it is released, behind psrl's engine contract. Runs in vLLM's virtual environment."""
