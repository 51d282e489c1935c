"""Ways in which a packed version reaches a replica."""
