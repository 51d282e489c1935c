"""A tiny model learns when to call an interpreter: minutes on two cores."""
