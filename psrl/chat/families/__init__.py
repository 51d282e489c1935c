"""What belongs to whom in a template family: derived from the template where possible, a small file where not."""

from psrl.chat.families.base import Family, ToolSupport, derive_family
from psrl.chat.families.markup import markup_of
from psrl.chat.families.plain import as_plain_messages, text_with_calls
from psrl.chat.families.shape import alternating, with_one_text_per_call, with_system_as_user

__all__ = [
    "Family",
    "ToolSupport",
    "alternating",
    "as_plain_messages",
    "derive_family",
    "markup_of",
    "text_with_calls",
    "with_one_text_per_call",
    "with_system_as_user",
]
