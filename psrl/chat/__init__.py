"""Messages to token ids and back: the renderer, the tool-call formats and the probe of chat templates."""

from psrl.chat.probe import ProbeReport, probe
from psrl.chat.renderer import HfRenderer, HistoryThinking, load_renderer

__all__ = ["HfRenderer", "HistoryThinking", "ProbeReport", "load_renderer", "probe"]
