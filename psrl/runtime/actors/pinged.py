"""What every actor of a run answers, so that one whose event loop is blocked is told from one that is busy."""


class Pinged:
    """Base of the shells in this folder."""

    async def alive(self) -> None:
        """Answers while this process's event loop goes round; Ray's own calls are answered elsewhere, also when it is blocked."""
