"""Words that projects are named with. All are lower case, so that a name is written the same wherever it stands."""

from __future__ import annotations

PACKAGES = ("shop", "bank", "farm", "school", "library", "kitchen", "garage", "clinic", "hotel", "museum", "harbor", "studio")
MODULES = ("cart", "order", "ledger", "report", "stock", "plan", "invoice", "record", "survey", "budget", "counter", "basket")
SCALARS = (
    "tax",
    "fee",
    "cost",
    "weight",
    "rate",
    "level",
    "speed",
    "width",
    "height",
    "depth",
    "bonus",
    "limit",
    "offset",
    "margin",
    "credit",
    "debit",
    "volume",
    "length",
    "amount",
    "charge",
    "target",
    "quota",
    "share",
    "rent",
    "wage",
    "fine",
    "tip",
    "load",
    "power",
    "delay",
)
"""Parameters that hold one value; a function's last name is one of them too."""
PLURALS = (
    ("items", "item"),
    ("prices", "price"),
    ("words", "word"),
    ("scores", "score"),
    ("rows", "row"),
    ("lines", "line"),
    ("books", "book"),
    ("marks", "mark"),
    ("tags", "tag"),
    ("notes", "note"),
    ("seats", "seat"),
    ("coins", "coin"),
    ("boxes", "box"),
    ("cards", "card"),
    ("plants", "plant"),
    ("rooms", "room"),
    ("cakes", "cake"),
    ("tools", "tool"),
    ("parts", "part"),
    ("stones", "stone"),
)
"""Parameters that hold several, and one of them."""
RESULTS = ("total", "result", "found", "answer", "value", "outcome", "final", "output", "number", "figure", "built", "made")
TEXTS = ("amber", "basil", "cedar", "daisy", "ember", "fern", "ginger", "hazel", "iris", "lemon", "maple", "olive")
"""Values of tests."""
