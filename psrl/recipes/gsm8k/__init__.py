"""Grade-school mathematics in one turn."""
