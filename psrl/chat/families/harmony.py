"""What GPT-OSS's template does not say: which other tokens end a turn.

A turn is several channels, each closed by `<|end|>`, which therefore ends no turn; `<|return|>` ends an answer and `<|call|>` a call.
The template shows a past answer with `<|end|>` where the policy sampled `<|return|>`: trajectories keep the sampled id.
"""

from __future__ import annotations

END_OF_TURN = "<|return|>"
OTHER_STOPS = ("<|call|>", "<|endoftext|>")
