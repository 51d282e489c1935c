"""How finished episodes are judged. What can hang runs in child processes that are killed."""
