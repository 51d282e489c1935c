"""The torch engine: continuous batching over a slotted KV cache, written for small models on few cores."""
