"""Servers of the engine contract: `torch`, `scripted`, and the child process that each runs in."""
