"""Weight versions: their layout, where they are kept, and how they travel."""
