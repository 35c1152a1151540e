"""Routing names: what of a key decides its disk. Pure.

A connector writes a file under a temporary name and renames it. Both names must have one owner, so
both are brought to one *routing name*: the key without the temp form and without extensions. All
extensions, so that ``a.bin.tmp`` meets ``a.bin`` as surely as ``<stem>.tmp`` meets ``<stem>.data``,
and files that belong together (``x.safetensors``, ``x.safetensors.metadata``) share a disk. The
forms are data (``DEFAULT_PATTERNS``); operators add theirs with ``pool.temp_patterns``. A changed
default changes where files go, so it goes with ``records.FORMAT``.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

PATTERN_CHARS_MAX = 200
_GROUP = "final"

# A letter first: the dot in a model name (`…-3.1-8B-Instruct_0_1`, `…-3.1@1@0@…`) starts no
# extension, else every key of that model would have one routing name, and one disk all of them.
_EXTENSION = r"\.[A-Za-z][A-Za-z0-9]{0,15}"
_HEX32 = r"[0-9a-f]{32}"
_UUID = rf"(?:{_HEX32}|[0-9a-f]{{8}}(?:-[0-9a-f]{{4}}){{3}}-[0-9a-f]{{12}})"

_EXTENSIONS_OF = re.compile(rf"(?s:.)((?:{_EXTENSION})+)\Z".encode())


@dataclass(frozen=True, slots=True)
class TempPattern:
    """One form of temporary basename, matched whole.

    Without a group ``final`` in *regex* the name says nothing of the final one.
    *final_has_extension* is False where the group may be the final name without its extension.
    """

    name: str
    regex: re.Pattern[bytes]
    final_has_extension: bool = True


def _default(name: str, regex: str, *, final_has_extension: bool = True) -> TempPattern:
    return TempPattern(name, re.compile(f"(?s:{regex})".encode()), final_has_extension)


# First match wins. The unknowable forms precede `<stem>.tmp`, which would match one of them.
DEFAULT_PATTERNS: tuple[TempPattern, ...] = (
    _default("F_<decimal>.tmp", rf"(?P<final>.+{_EXTENSION})_[0-9]{{1,19}}\.tmp"),
    _default("F.tmp.<pid>.<tid>.<uuid>", rf"(?P<final>.+)\.tmp\.[0-9]+\.[0-9]+\.{_UUID}"),
    _default("F.tmp.<hex32>", rf"(?P<final>.+)\.tmp\.{_HEX32}"),
    _default("F.tmp<hex8>", r"(?P<final>.+)\.tmp[0-9a-f]{8}"),
    _default("F.<hex32>.tmp", rf"(?P<final>.+)\.{_HEX32}\.tmp"),
    _default(".<hex32>.tmp", rf"\.{_HEX32}\.tmp"),
    _default(".tmp<6 alnum>", r"\.tmp[A-Za-z0-9]{6}"),
    _default("<stem>.tmp", r"(?P<final>.+)\.tmp", final_has_extension=False),
)


def temp_pattern(regex: str) -> TempPattern:
    """Return the pattern an operator wrote: a regex for whole basenames with a group ``final``.

    Raises:
        ValueError: it is too long, is no regex, or lacks the group.
    """
    if len(regex) > PATTERN_CHARS_MAX:
        raise ValueError(f"pattern of {len(regex)} characters, at most {PATTERN_CHARS_MAX}")
    try:
        compiled = re.compile(regex.encode(), re.DOTALL)
    except (re.error, OverflowError, RecursionError) as exc:
        raise ValueError(f"not a regular expression: {exc}") from exc
    if _GROUP not in compiled.groupindex:
        raise ValueError("no group (?P<final>…) that matches the final name")
    return TempPattern(regex, compiled)


def with_patterns(added: Sequence[TempPattern]) -> tuple[TempPattern, ...]:
    """Return *added* before the defaults, whose last one matches nearly everything."""
    return (*added, *DEFAULT_PATTERNS) if added else DEFAULT_PATTERNS


def routing_name(
    key: bytes,
    *,
    temp_dirs: frozenset[bytes] = frozenset(),
    patterns: Sequence[TempPattern] = DEFAULT_PATTERNS,
) -> bytes:
    """Return what of *key* (a path below the mountpoint) decides its owner; never empty for a key.

    *temp_dirs* are directories whose files become ``../<same name>``: a name without a slash means
    every directory called so, with one (``/tmp``, ``a/tmp``) that path below the mountpoint.
    """
    directory, slash, name = key.rpartition(b"/")
    if temp_dirs and _is_temp_dir(directory, temp_dirs):
        directory, slash, _ = directory.rpartition(b"/")
    return directory + slash + _routing_base(name, patterns)


def final_name(name: bytes, *, patterns: Sequence[TempPattern] = DEFAULT_PATTERNS) -> bytes | None:
    """Return the basename that temp basename *name* will be renamed to.

    The stem for ``<stem>.tmp``, whose final extension is unknown. None when *name* is no temp name,
    or one that says nothing of its final name.
    """
    match = _match(name, patterns)
    return None if match is None else match[1]


def final_extension(
    name: bytes, *, patterns: Sequence[TempPattern] = DEFAULT_PATTERNS
) -> bytes | None:
    """Return the extensions (with their dots, b"" for none) of what *name* is or will be called.

    None when *name* is a temp name that does not say.
    """
    match = _match(name, patterns)
    if match is None:
        return name[len(_without_extensions(name)) :]
    pattern, final = match
    if final is None or not pattern.final_has_extension:
        return None
    return final[len(_without_extensions(final)) :]


def says_nothing(name: bytes, *, patterns: Sequence[TempPattern] = DEFAULT_PATTERNS) -> bool:
    """Return whether *name* is a temp name from which the final one cannot be told."""
    match = _match(name, patterns)
    return match is not None and match[1] is None


def is_temp(name: bytes, *, patterns: Sequence[TempPattern] = DEFAULT_PATTERNS) -> bool:
    """Return whether basename *name* has a temporary form, of a knowable final name or not."""
    return _match(name, patterns) is not None


def _routing_base(name: bytes, patterns: Sequence[TempPattern]) -> bytes:
    match = _match(name, patterns)
    if match is None:
        return _without_extensions(name)
    final = match[1]
    if final is None:
        return name
    return _without_extensions(final)


def _match(name: bytes, patterns: Sequence[TempPattern]) -> tuple[TempPattern, bytes | None] | None:
    # Nearly every name is a final one, and all default forms have this in them: 0.1 µs, not 4.
    if patterns is DEFAULT_PATTERNS:
        return _match_default(name) if b".tmp" in name else None
    return _first_match(name, patterns)


@lru_cache(maxsize=1024)
def _match_default(name: bytes) -> tuple[TempPattern, bytes | None] | None:
    # A put asks half a dozen times about one name: to place it, to estimate it, to rename it.
    return _first_match(name, DEFAULT_PATTERNS)


def _first_match(
    name: bytes, patterns: Sequence[TempPattern]
) -> tuple[TempPattern, bytes | None] | None:
    for pattern in patterns:
        match = pattern.regex.fullmatch(name)
        if match is None:
            continue
        if _GROUP not in pattern.regex.groupindex:
            return pattern, None
        if match[_GROUP]:  # an operator's group may match nothing: that names no file
            return pattern, match[_GROUP]
    return None


def _without_extensions(name: bytes) -> bytes:
    match = _EXTENSIONS_OF.search(name)
    return name if match is None else name[: match.start(1)]


def _is_temp_dir(directory: bytes, temp_dirs: frozenset[bytes]) -> bool:
    if not directory:
        return False
    if directory.rpartition(b"/")[2] in temp_dirs or b"/" + directory in temp_dirs:
        return True
    return b"/" in directory and directory in temp_dirs
