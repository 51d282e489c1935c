"""What a Gemma template does not say: which other tokens end a turn."""

from __future__ import annotations

END_OF_TURN = "<end_of_turn>"
OTHER_STOPS = ("<eos>",)
"""The end of a document."""
