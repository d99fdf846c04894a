"""The user's settings file, `~/.hetero_kv/config.yaml`: written on first run, read on every run.

It lists every setting with its default and meaning, commented out. An unedited file therefore changes nothing, and
does not pin the defaults of the version that wrote it. The command line and rules files win over it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hetero_kv.contexts.settings import ContextCacheSettings
from hetero_kv.durable_file import write_atomically
from hetero_kv.errors import ConfigError, shown
from hetero_kv.rules.owners import every_settings_class, labels, registered_owners
from hetero_kv.rules.setting_groups import default_words, setting_groups
from hetero_kv.rules.trusted_names import TRUST_RULES, trusted_names
from hetero_kv.settings.description import describe
from hetero_kv.settings.located_yaml import LocatedMapping, located, read_yaml
from hetero_kv.settings.mapping import canonical

ENVIRONMENT_VARIABLE = "HETERO_KV_CONFIG"
#: The block for saved contexts.
CONTEXTS = "contexts"

_logger = logging.getLogger(__name__)


def settings_path() -> Path | None:
    """The settings file's path: `$HETERO_KV_CONFIG`, else in the home directory; None without a home directory."""
    path = Path(os.path.expanduser(os.environ.get(ENVIRONMENT_VARIABLE) or "~/.hetero_kv/config.yaml"))
    return None if path.parts[0] == "~" else path


def settings_text() -> str:
    """The initial text of the settings file: every setting of the engine and of every operator, with default, unit and
    meaning."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Settings of hetero-kv for long contexts."
    yield "# To change one, remove the # before its name. Each line shows the default."
    yield "# The command line and the rules file (--config) win over this file; this file wins over the defaults."
    yield "# A setting applies to all operators that have it, under any rules."
    yield "# Rules may also name operators of modules listed here, whose code then runs (read it first):"
    yield f"#{TRUST_RULES}: [my_methods]"
    yield "long_context:"
    owners = registered_owners()
    for title, settings in setting_groups(owners):
        yield ""
        yield f"  # --- {title} ---"
        for setting in settings:
            yield ""
            for sense in setting.senses:
                unit = f", in {sense.row.unit}" if sense.row.unit else ""
                aliases = f" (also: {', '.join(sense.row.aliases)})" if sense.row.aliases else ""
                several = len(setting.senses) > 1 or setting.elsewhere
                yield f"  # {sense.row.doc}{aliases}{f' [{labels(sense.owners, owners)}]' if several else ''}"
                yield f"  #   {sense.row.type}{unit}"
                if len(sense.defaults) > 1:
                    yield f"  #   default {default_words(sense)}"
            yield f"  #{setting.row.name}: {_written(setting.row.default)}"
    yield ""
    yield f"{CONTEXTS}:"
    for row in describe(ContextCacheSettings):
        yield ""
        yield f"  # {row.doc}"
        yield f"  #   {row.type}"
        yield f"  #{row.name}: {_written(row.default)}"


def _written(default: Any) -> str:
    """A default in YAML syntax."""
    return str(default) if default != "" else "''"


def ensure_settings_file(path: Path | None = None) -> Path | None:
    """Write the settings file if there is none.

    The write is atomic, and never changes an existing file.

    Returns:
        Its path; None when it could not be written, which is logged as a warning and is no error.
    """
    path = path or settings_path()
    if path is None:
        _logger.warning("no settings file: no home directory is known; set %s to a path", ENVIRONMENT_VARIABLE)
        return None
    if os.path.lexists(path):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, settings_text(), replaces=False)
    except (OSError, ValueError) as error:
        _logger.warning(
            "the settings file %s cannot be written (%s), and defaults apply; set %s to another path",
            path,
            getattr(error, "strerror", None) or error,
            ENVIRONMENT_VARIABLE,
        )
        return None
    return path


def read_settings_file(path: Path | None = None) -> dict[str, Any]:
    """The file's settings by canonical key; {} when there is no file.

    They are in a `long_context:` block, or at the top level as in KTransformers' documentation.

    Raises:
        ConfigError: the file cannot be read, or has a mistake in it; it names file, line and key.
    """
    source, document = _document(path)
    if not isinstance(document, Mapping):
        return canonical(every_settings_class(), document, where=source)
    if "long_context" in document:
        outside = [key for key in document if key not in ("long_context", CONTEXTS, TRUST_RULES)]
        if outside:
            raise ConfigError(
                f"{located(source, document, outside[0])}: {shown(outside[0])} is outside long_context; move it inside"
            )
        return canonical(every_settings_class(), document["long_context"], where=f"{source}: long_context")
    if isinstance(document, LocatedMapping):
        for block in (CONTEXTS, TRUST_RULES):
            document.pop(block, None)
    return canonical(every_settings_class(), document, where=source)


def read_context_settings(path: Path | None = None) -> dict[str, Any]:
    """The settings in the file's `contexts:` block; {} when there is no file.

    Raises:
        ConfigError: the file cannot be read, or has a mistake there; it names file, line and key.
    """
    source, document = _document(path)
    block = document.get(CONTEXTS) if isinstance(document, Mapping) else None
    if isinstance(block, LocatedMapping):
        # YAML parses on and off as booleans.
        block.update({key: "on" if value else "off" for key, value in block.items() if isinstance(value, bool)})
    return canonical((ContextCacheSettings,), block, where=f"{source}: {CONTEXTS}")


def read_trusted_modules(path: Path | None = None) -> tuple[str, ...]:
    """The modules that the file lists under `trust_rules:`; none when there is no file.

    Raises:
        ConfigError: the file cannot be read, or an entry is no module name.
    """
    source, document = _document(path)
    if not isinstance(document, Mapping) or TRUST_RULES not in document:
        return ()
    return trusted_names(document[TRUST_RULES], located(source, document, TRUST_RULES))


def _document(path: Path | None) -> tuple[str, Any]:
    """The file's name and parsed content; the content is None when there is no file."""
    path = path or settings_path()
    if path is None or not _exists(path):
        return str(path), None
    return str(path), read_yaml(path)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{shown(str(path))}: cannot be read: {error}") from error
