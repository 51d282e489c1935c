"""Projects with a bug: what is done with one in a sandbox that is given. Pure but for that sandbox."""
