"""Commands, one file each. A command reads settings, calls the runtime and prints; it decides nothing else.

Nothing heavy is imported before a command needs it, so that a wrong setting is answered within a second.
"""
