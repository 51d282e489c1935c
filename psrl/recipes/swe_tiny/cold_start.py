"""What the tokenizer and the cold-started weights of `swe_tiny` are made of.

The model imitates scripted episodes (`datasets/generators/swe_projects/`): first a diligent solver's, from which it learns to read
the function that the issue names and to mend what it read; then a lazy one's, who mostly edits what was never read, or gives up. It
can mend; it does not yet know that it should read before it edits.

`psrl prepare swe_tiny --output psrl/recipes/swe_tiny/model` made the folder that psrl ships.
"""

from __future__ import annotations

from psrl.config.sft import SftConfig
from psrl.datasets.generators.swe_projects.names import MODULES, PACKAGES, PLURALS, RESULTS, SCALARS
from psrl.datasets.generators.swe_projects.shapes import VERBS
from psrl.recipes.tiny_model import TinyModel

SFT = SftConfig(num_steps=1800, batch_size=16, max_length=384, lr=2e-3, min_lr_ratio=0.05, seed=1, from_scratch=True)
NAMES = (*PACKAGES, *MODULES, *SCALARS, *(word for pair in PLURALS for word in pair), *RESULTS, *VERBS)
MODEL = TinyModel(
    generator="swe_projects", num_tokenizer_texts=4000, vocab_size=1024, names=tuple(dict.fromkeys(NAMES)), intermediate_size=512, sft=SFT
)
"""1.2 million parameters."""
