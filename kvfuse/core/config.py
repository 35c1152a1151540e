"""The configuration in force, and where each value came from. Pure.

File, environment and command line use the same key names and become one frozen ``Config``, checked
as far as that goes without looking at the machine. Every mistake is reported at once.
"""

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from kvfuse.core.errors import ConfigMistakesError
from kvfuse.core.quantities import show
from kvfuse.core.settings import (
    ControlSettings,
    DiskSettings,
    HealthSettings,
    MetadataCacheSettings,
    PoolSettings,
    RecoverySettings,
    SpaceSettings,
    conflicts,
    space_conflicts,
)

DEFAULT = "default"
COMMAND_LINE = "command line"
_ENVIRONMENT_PREFIX = "KVFUSE_"
_DISK_TABLES = "disk"

_SECTIONS: dict[str, type[BaseModel]] = {
    "pool": PoolSettings,
    "space": SpaceSettings,
    "metadata_cache": MetadataCacheSettings,
    "health": HealthSettings,
    "recovery": RecoverySettings,
    "control": ControlSettings,
}


class Config(BaseModel):
    """Everything that can be configured, checked."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    pool: PoolSettings = PoolSettings()
    space: SpaceSettings = SpaceSettings()
    metadata_cache: MetadataCacheSettings = MetadataCacheSettings()
    health: HealthSettings = HealthSettings()
    recovery: RecoverySettings = RecoverySettings()
    control: ControlSettings = ControlSettings()

    def socket_path(self, pool: str) -> str:
        """Return the control socket of the pool whose run directory is called *pool*."""
        return self.control.socket or f"{self.pool.run_dir}/{pool}/control.sock"


class Row(NamedTuple):
    """One line of ``config show``: *value* is JSON-ready, written as in the file."""

    key: str
    value: Any
    origin: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration, and for each ``section.key`` where its value came from."""

    config: Config
    origins: Mapping[str, str]

    def rows(self) -> list[Row]:
        """Return every key with its value and origin, in the order of the file."""
        return [
            Row(f"{section}.{key}", value, self.origins[f"{section}.{key}"])
            for section, values in self.config.model_dump(mode="json").items()
            for key, value in values.items()
        ]

    def to_json(self) -> dict[str, Any]:
        """Return this as a JSON-ready object, for handing to another process."""
        return {"config": self.config.model_dump(mode="json"), "origins": dict(self.origins)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Resolved":
        """Return what ``to_json`` gave."""
        return cls(Config.model_validate(data["config"]), dict(data["origins"]))


def parse(
    text: str | None,
    *,
    source: str,
    environment: Mapping[str, str],
    flags: Mapping[str, object],
) -> Resolved:
    """Return the configuration of the file *text* (TOML), under *environment*, under *flags*.

    *source* names the file in messages. *flags* maps ``section.key`` to a value of the command
    line; one that is None was not given.

    Raises:
        ConfigMistakesError: one line for each mistake: where, which key, what, and what to do.
    """
    gathered = _Gathered(source)
    is_read = text is None or gathered.add_file(text)
    gathered.add_environment(environment)
    gathered.add_flags(flags)
    sections = {name: gathered.section(name, model) for name, model in _SECTIONS.items()}
    pool, control, space = sections["pool"], sections["control"], sections["space"]
    # Otherwise "no disks" would be a second message for one mistake.
    if is_read and isinstance(pool, PoolSettings) and isinstance(control, ControlSettings):
        for key, problem in conflicts(pool, control):
            gathered.error(key, problem)
    if isinstance(space, SpaceSettings):
        for key, problem in space_conflicts(space):
            gathered.error(key, problem)
    if gathered.errors:
        raise ConfigMistakesError(gathered.errors)
    return Resolved(Config.model_validate(sections), gathered.all_origins())


class _Gathered:
    """The values said so far, by section and key, with their origins, and what is wrong."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.values: dict[str, dict[str, object]] = {name: {} for name in _SECTIONS}
        self.origins: dict[str, str] = {}
        self.errors: list[str] = []
        self.disk_tables = False

    def add_file(self, text: str) -> bool:
        """Take the values of a file; return False when its disks cannot be told."""
        try:
            document = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as exc:
            self.errors.append(_syntax_error(self.source, text, exc))
            return False
        origin = f"file {self.source}"
        tables = document.pop(_DISK_TABLES, None)
        is_pool_read = isinstance(document.get("pool", {}), dict)
        for name, section in document.items():
            if name not in _SECTIONS:
                self.errors.append(f"{self.source}: {_shown_key(name)}: {_unknown_section(name)}")
            elif not isinstance(section, dict):
                problem = f"{show(section)} is no table; write [{name}] and its keys below it"
                self.errors.append(f"{self.source}: {name}: {problem}")
            else:
                for key, value in section.items():
                    self._say(name, key, value, origin)
        return (tables is None or self._add_disk_tables(tables, origin)) and is_pool_read

    def _add_disk_tables(self, tables: object, origin: str) -> bool:
        if "disks" in self.values["pool"]:
            self.errors.append(
                f"{self.source}: disk: disks are in pool.disks already; use one of the two"
            )
            return False
        if not isinstance(tables, list):
            self.errors.append(f"{self.source}: disk: {show(tables)} is no disk; write [[disk]]")
            return False
        self._say("pool", "disks", tables, origin)
        self.disk_tables = True
        return True

    def add_environment(self, environment: Mapping[str, str]) -> None:
        for variable in sorted(environment):
            name = _section_of(variable)
            if name is None:  # not ours to judge: other programs may use the prefix
                continue
            key = variable.removeprefix(_variable(name, ""))
            known = {_variable(name, known): known for known in _keys(name)}
            if variable not in known:
                hint = _nearest(variable, known) or f"known are {', '.join(known)}"
                self.errors.append(f"environment {_shown_key(variable)}: unknown; {hint}")
                continue
            self._say_text(name, key.lower(), environment[variable], f"environment {variable}")

    def add_flags(self, flags: Mapping[str, object]) -> None:
        for dotted, value in flags.items():
            if value is None:
                continue
            name, _, key = dotted.partition(".")
            if name not in _SECTIONS:
                self.errors.append(
                    f"{COMMAND_LINE}: {_shown_key(dotted)}: {_unknown_section(name)}"
                )
            elif isinstance(value, str):
                self._say_text(name, key, value, COMMAND_LINE)
            else:
                self._say(name, key, value, COMMAND_LINE)

    def _say_text(self, name: str, key: str, text: str, origin: str) -> None:
        try:
            value = _from_text(name, key, text)
        except ValueError as exc:
            self.errors.append(_line(origin, f"{name}.{key}", str(exc)))
            return
        self._say(name, key, value, origin)

    def _say(self, name: str, key: str, value: object, origin: str) -> None:
        if key not in _keys(name):
            self.errors.append(_line(origin, f"{name}.{_shown_key(key)}", _unknown_key(name, key)))
            return
        if key == "disks":
            self.disk_tables = False
        self.values[name][key] = value
        self.origins[f"{name}.{key}"] = origin

    def section(self, name: str, model: type[BaseModel]) -> BaseModel | None:
        try:
            return model.model_validate(self.values[name])
        except ValidationError as exc:
            for error in exc.errors():
                key, *rest = error["loc"]
                self.error(f"{name}.{key}", _problem(error), rest)
            return None

    def error(self, key: str, problem: str, rest: Iterable[int | str] = ()) -> None:
        origin = self.origins.get(key, f"file {self.source}")
        shown = _DISK_TABLES if key == "pool.disks" and self.disk_tables else key
        parts = list(rest)
        if key == "pool.disks" and parts[1:] == ["path"] and not self.disk_tables:
            parts.pop()  # there a disk is its path
        for part in parts:
            shown += f"[{part}]" if isinstance(part, int) else f".{_shown_key(part)}"
        self.errors.append(_line(origin, shown, problem))

    def all_origins(self) -> dict[str, str]:
        every = (f"{name}.{key}" for name in _SECTIONS for key in _keys(name))
        return {dotted: self.origins.get(dotted, DEFAULT) for dotted in every}


def _line(origin: str, key: str, problem: str) -> str:
    return f"{origin.removeprefix('file ')}: {key}: {problem}"


def _keys(section: str) -> list[str]:
    return list(_SECTIONS[section].model_fields)


def _variable(section: str, key: str) -> str:
    return f"{_ENVIRONMENT_PREFIX}{section}_{key}".upper()


def _section_of(variable: str) -> str | None:
    return next((name for name in _SECTIONS if variable.startswith(_variable(name, ""))), None)


def _from_text(section: str, key: str, text: str) -> object:
    """Return the value *text* stands for, by the kind of the key; text where the kind is unknown.

    Lists are TOML arrays, or directories joined by colons; a pattern, which may hold colons, alone.
    """
    field = _SECTIONS[section].model_fields.get(key)
    if field is None or field.annotation is str:
        return text
    if field.annotation is bool:
        if text.lower() not in ("true", "false", "1", "0", "yes", "no"):
            raise ValueError(f"{show(text)} is neither true nor false; write one of them")
        return text.lower() in ("true", "1", "yes")
    if isinstance(field.default, tuple):
        return _list_from_text(key, text)
    if key.endswith("_secs"):
        try:
            return float(text)
        except ValueError:
            raise ValueError(f"{show(text)} is no number; write one") from None
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 20 else text


def _list_from_text(key: str, text: str) -> object:
    if text.lstrip().startswith("["):
        try:
            return tomllib.loads(f"list = {text}")["list"]
        except (tomllib.TOMLDecodeError, RecursionError):
            raise ValueError(f'{show(text)} is no list; write ["…", "…"]') from None
    if key == "temp_patterns":
        return [text]
    parts = text.split(":") if text else []
    if key == "disks" and not all(parts):
        raise ValueError(f"{show(text)} holds an empty path; write a directory between the colons")
    return [part for part in parts if part]


def _syntax_error(source: str, text: str, exc: Exception) -> str:
    if isinstance(exc, RecursionError):
        return f"{source}: nested too deeply; write plain tables and lists"
    what, _, where = str(exc).partition(" (at ")
    line = text.count("\n") + 1
    if where.startswith("line "):
        line = int(where.removeprefix("line ").partition(",")[0])
    return f"{source}:{line}: {_one_line(what)}; mend the TOML there"


def _one_line(text: str) -> str:
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


_REMEDIES = {
    "bool_type": "is neither true nor false; write one of them",
    "float_type": "is no number; write one",
    "finite_number": "is no number; write one",
    "string_type": "is no text; write it in quotes",
    "string_unicode": "is not UTF-8; use text that is",
}


def _problem(error: ErrorDetails) -> str:
    """Return what is wrong and what to do, of one error of pydantic."""
    kind, value = error["type"], show(error["input"])
    match kind:
        case "value_error":
            return str(error["ctx"]["error"])
        case "literal_error":
            return f"{value} is unknown; write {error['ctx']['expected'].replace(chr(39), '')}"
        case "extra_forbidden":
            key = str(error["loc"][-1])
            known = list(DiskSettings.model_fields)
            return f"unknown key; {_nearest(key, known) or 'known are ' + ', '.join(known)}"
        case "missing":
            return "is missing; write it"
        case _:
            return f"{value} {_REMEDIES.get(kind, error['msg'] + '; mend it')}"


def _nearest(word: str, known: Iterable[str]) -> str | None:
    near = difflib.get_close_matches(word[:100], list(known), n=1)
    return f"did you mean {near[0]}?" if near else None


def _unknown_key(section: str, key: str) -> str:
    elsewhere = next((name for name in _SECTIONS if key in _keys(name)), None)
    if elsewhere is not None:
        return f"unknown key; it belongs to [{elsewhere}]"
    return (
        f"unknown key; {_nearest(key, _keys(section)) or 'known are ' + ', '.join(_keys(section))}"
    )


def _unknown_section(name: str) -> str:
    home = next((section for section in _SECTIONS if name in _keys(section)), None)
    if home is not None:
        return f"unknown section; it is a key of [{home}]"
    known = [*_SECTIONS, _DISK_TABLES]
    return f"unknown section; {_nearest(name, known) or 'known are ' + ', '.join(known)}"


def _shown_key(key: object) -> str:
    text = str(key)
    return text if text.isascii() and text.replace("_", "a").isalnum() else show(text)
