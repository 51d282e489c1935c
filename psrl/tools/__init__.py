"""What the policy may call: tools, groups of them, and the file that lists them."""

from psrl.tools.base import FunctionTool, problem_with, schema_of, tool, tools
from psrl.tools.code_interpreter import CodeInterpreter
from psrl.tools.config import load_tools

__all__ = ["CodeInterpreter", "FunctionTool", "load_tools", "problem_with", "schema_of", "tool", "tools"]
