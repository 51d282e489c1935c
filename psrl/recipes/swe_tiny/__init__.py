"""A tiny model learns to read before it edits: small Python projects, mended by shell commands in mini-SWE-agent."""
