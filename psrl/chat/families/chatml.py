"""What a ChatML template (Qwen, SmolLM2, Hermes) does not say: which other tokens end a turn."""

from __future__ import annotations

END_OF_TURN = "<|im_end|>"
OTHER_STOPS = ("<|endoftext|>",)
"""The end of a document; models that saw little chat sample it where a turn should end."""
