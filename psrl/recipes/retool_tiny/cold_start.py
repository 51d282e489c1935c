"""What the tokenizer and the cold-started weights of `retool_tiny` are made of.

The model imitates scripted episodes (`datasets/generators/arithmetic.py`): first a diligent solver's, from which it learns to
copy an expression into a call and the output into the answer; then a lazy one's, who mostly guesses. It can call; it does not
yet know that it should.

`psrl prepare retool_tiny --output psrl/recipes/retool_tiny/model` made the folder that psrl ships.
"""

from __future__ import annotations

from psrl.config.sft import SftConfig
from psrl.recipes.tiny_model import TinyModel

SFT = SftConfig(num_steps=2000, batch_size=32, max_length=256, lr=2e-3, min_lr_ratio=0.02, seed=1, from_scratch=True)
MODEL = TinyModel(generator="arithmetic", num_tokenizer_texts=4000, vocab_size=512, intermediate_size=384, sft=SFT)
"""0.9 million parameters."""
