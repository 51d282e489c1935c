"""A real model learns to use an interpreter on real rows."""
