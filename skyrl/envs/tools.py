"""Tools that a model may call: methods of a group, by name.

class Clock(ToolGroup):
    @tool
    async def time(self, zone: str) -> str: ...

text = await Tools([Clock("clock")]).call("time", "UTC")
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def tool(method: F) -> F:
    """Mark a method of a `ToolGroup`, which may be a coroutine function, as a tool. The tool has the method's name."""
    method.__dict__["is_tool"] = True
    return method


class ToolGroup:
    """Tools that share state, such as the address of a server."""

    def __init__(self, name: str):
        self.name = name
        cls = type(self)
        self._tools = {
            key: getattr(self, key) for key in dir(cls) if getattr(inspect.getattr_static(cls, key), "is_tool", False)
        }

    def get_tool_names(self) -> list[str]:
        """Return the names of the group's tools, sorted."""
        return sorted(self._tools)

    def get_tool_to_group_mapping(self) -> dict[str, str]:
        """Return this group's name for each of its tools."""
        return dict.fromkeys(self.get_tool_names(), self.name)

    def execute_tool(self, name: str, *args: Any) -> Any:
        """Call a tool and return its result, or its coroutine. Raises ValueError for an unknown name."""
        if name not in self._tools:
            raise ValueError(f"no tool named {name!r} in the group {self.name!r}; known: {', '.join(self._tools)}")
        return self._tools[name](*args)


class Tools:
    """Tools of several groups. Raises ValueError if two groups have a tool with the same name."""

    def __init__(self, groups: Iterable[ToolGroup]):
        self._group_of: dict[str, ToolGroup] = {}
        for group in groups:
            for name in group.get_tool_names():
                if name in self._group_of:
                    raise ValueError(f"groups {self._group_of[name].name!r} and {group.name!r} both have {name!r}")
                self._group_of[name] = group

    def __iter__(self):
        return iter(sorted(self._group_of))

    def __contains__(self, name: object) -> bool:
        return name in self._group_of

    async def call(self, name: str, *args: Any) -> Any:
        """Call a tool and return its result, awaited if it is a coroutine. Raises ValueError for an unknown name."""
        if name not in self._group_of:
            raise ValueError(f"no tool named {name!r}; known: {', '.join(self)}")
        result = self._group_of[name].execute_tool(name, *args)
        return await result if inspect.isawaitable(result) else result
