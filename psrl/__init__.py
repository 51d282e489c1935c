"""psrl: train language models by reinforcement learning to act over many turns."""

__version__ = "0.1.0"
