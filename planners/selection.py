"""Which keys a load is asked for. Pure: decides from strings alone."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from dcp_engine.errors import InvalidOptionError

__all__ = ["Selection", "dotted_prefixes"]


class Selection:
    """Which keys are asked for: those of which the whole, or a part up to a dot, matches one of the globs.

    ``*`` also matches dots. ``"model"`` asks for all of ``model.*``.

    Args:
        patterns: globs by the rules of ``fnmatch``, case-sensitive. ``None`` asks for all keys.

    Raises:
        InvalidOptionError: a single string, or an empty or non-string pattern.

    Thread-safety: immutable after construction.
    """

    def __init__(self, patterns: Sequence[str] | None = None) -> None:
        if patterns is not None and (isinstance(patterns, str) or not all(isinstance(glob, str) and glob for glob in patterns)):
            raise InvalidOptionError("keys is not a sequence of globs", expected="such as ['model.*']", found=repr(patterns))
        self.is_all = patterns is None
        self._plain = {glob for glob in patterns or () if not _GLOB.search(glob)}
        self._globs = [glob for glob in patterns or () if _GLOB.search(glob)]
        self._matches = [_compile_globs([glob]) for glob in self._globs]
        self._match_any = _compile_globs(self._globs) if self._globs else None

    def __call__(self, key: str) -> bool:
        """Whether ``key`` is asked for."""
        if self.is_all:
            return True
        if self._plain and any(part in self._plain for part in dotted_prefixes(key)):
            return True
        return self._match_any is not None and self._match_any(key) is not None

    def unmatched(self, keys: Iterable[str]) -> tuple[str, ...]:
        """Patterns that none of ``keys`` matches."""
        if self.is_all:
            return ()
        plain, globs = set(self._plain), dict(zip(self._globs, self._matches, strict=True))
        for key in keys:
            plain.difference_update(dotted_prefixes(key))
            for glob in [glob for glob, match in globs.items() if match(key)]:
                del globs[glob]
            if not plain and not globs:
                break
        return (*sorted(plain), *globs)


_GLOB = re.compile(r"[*?\[]")


def _compile_globs(globs: Sequence[str]) -> Callable[[str], re.Match[str] | None]:
    return re.compile("|".join(fnmatch.translate(form) for glob in globs for form in (glob, f"{glob}.*"))).match


def dotted_prefixes(key: str) -> Iterator[str]:
    """``a``, ``a.b`` and ``a.b.c`` for ``a.b.c``."""
    at = key.find(".")
    while at >= 0:
        yield key[:at]
        at = key.find(".", at + 1)
    yield key
