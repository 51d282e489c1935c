"""Arithmetic that more than one program needs and that torch does not choose best by itself."""
