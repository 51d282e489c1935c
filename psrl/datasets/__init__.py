"""Where tasks come from: rows of files or generators, in a seeded order that survives a resume."""
