"""What a Llama 3 template does not say: which other tokens end a turn."""

from __future__ import annotations

END_OF_TURN = "<|eot_id|>"
OTHER_STOPS = ("<|eom_id|>", "<|end_of_text|>")
"""A turn that waits for a tool's answer, and the end of a document."""
