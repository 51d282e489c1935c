"""Typed settings, one dataclass file per section. Imports neither torch nor ray."""
