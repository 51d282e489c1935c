"""Child processes of a run: how they are started, watched and ended, and what each of them does to end with its parent."""
