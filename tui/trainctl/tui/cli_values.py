"""Values of the command line that are seen to be right without the parser library's validator.

Loading that (pydantic) takes longer than most commands altogether, and what a command line holds is mostly text, flags,
plain numbers and what was left out. All else, and all that is wrong, is left to it.
"""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from typer.core import TyperArgument, TyperOption


@functools.cache
def spare_validator() -> None:
    """Have all parameters of this program take simple values by themselves."""
    for kind in (TyperOption, TyperArgument):
        _wrap(kind)


def _wrap(kind: Any) -> None:
    make = kind.get_runtime_param
    kind.get_runtime_param = lambda parameter: _Late(parameter, functools.partial(make, parameter))


class _Late:
    """The library's coercion of a parameter, made when there is a value for it to look at."""

    def __init__(self, parameter: Any, make: Callable[[], Any]) -> None:
        self._make, self._default = make, parameter.default
        self._annotation = parameter.type_descriptor.annotation
        self._info = parameter.type_descriptor.parameter_info

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """As the library's own; raises its usage errors."""
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        if self._info.parser is None:
            if self._annotation == list[str] and isinstance(value, list | tuple):
                return list(value)
            if self._is_plain(value):
                return value
            if isinstance(value, str) and (found := self._simple(value)) is not None:
                return found
        return self.own.coerce(value, param=param, ctx=ctx)

    @property
    def own(self) -> Any:
        """What the library itself would coerce with."""
        return self._make()

    def _is_plain(self, value: Any) -> bool:
        """Whether a value is what is wanted already: text, one of the choices, or the declared default."""
        wanted = self._annotation
        if get_origin(wanted) is Literal:
            return value in get_args(wanted)
        return isinstance(value, str) if wanted is str else value is self._default and isinstance(value, wanted)

    def _simple(self, text: str) -> Any:
        """A plain number within its limits, or the path of what can be read; None for all else."""
        if self._annotation in (int, float) and text.isascii() and text.isdigit() and len(text) < 16:
            number = self._annotation(text)
            low, high = self._info.min, self._info.max
            return number if (low is None or low <= number) and (high is None or number <= high) else None
        if self._annotation is Path and self._any_path and "\0" not in text and os.access(text, os.R_OK):
            return Path(text)
        return None

    @property
    def _any_path(self) -> bool:
        """Whether nothing is asked of a path but that it can be read."""
        info = self._info
        asked = info.resolve_path or info.writable or info.allow_dash or info.path_type is not None
        return info.file_okay and info.dir_okay and not asked
