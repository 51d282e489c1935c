"""What belongs to whom in a template family: derived from the template where possible, a small file where not."""

from psrl.chat.families.base import Family, ToolSupport, derive_family
from psrl.chat.families.plain import as_plain_messages

__all__ = ["Family", "ToolSupport", "as_plain_messages", "derive_family"]
