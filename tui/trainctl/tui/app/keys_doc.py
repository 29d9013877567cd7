"""The keys that there are: as a configuration file, and as docs/keys.md, which is made from the live bindings.

`python -m trainctl.tui.app.keys_doc [--check] [FILE]` writes the page, or tells whether it is up to date.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from trainctl.tui.app.app import TrainctlApp
from trainctl.tui.app.config import Found
from trainctl.tui.widgets import keymap
from trainctl.tui.widgets.theme import THEMES

_PAGE = """# Keys and settings

Made from the program's own bindings; `?` shows those of the moment, and a click on a key at the bottom presses it.

## config.toml

`~/.config/trainctl/config.toml` (the platform's configuration folder; `$XDG_CONFIG_HOME/trainctl` where that is set),
or the file that `trainctl --config FILE` names. `trainctl config` prints all settings as they count, in the form of
such a file, and names each line that can't be used (exit status 2); the others count all the same.

| setting | values | |
| --- | --- | --- |
| `theme` | `"auto"`, {themes} | auto: the terminal's own sixteen colours where it has no more or `NO_COLOR` is set, \
`day` on a light ground that says so (`COLORFGBG`), else `night` |
| `ascii` | `"auto"`, `true`, `false` | auto: where the locale isn't UTF-8 |
| `bell` | `true`, `false` | whether alerts ring |
| `mouse` | `true`, `false` | false leaves the mouse to the terminal |
| `read_only` | `false`, `true` | true: as `--read-only` |
| `[keys]` | `action = "key"` | one key or several, `"f5,R"`: a character, or a name such as `f5`, `home`, `pagedown`, \
`ctrl+e`, `comma`, `space` |

Keys inside dialogs are fixed: escape closes, enter sends, and what the dialog says. Ctrl-C leaves from anywhere.
"""


def by_name(keymap_: Mapping[str, str]) -> dict[str, str]:
    """Each action's keys as they count, as config.toml takes them."""
    return {row.name: row.keys.replace(" ", ",") for row in _rows(keymap_)}


def as_file(found: Found) -> str:
    """All settings as they count, as a config.toml."""
    own = found.settings
    made = [
        f"# {found.path}{'' if found.exists else ' (not there)'}",
        _setting("theme", own.theme or "auto", f"auto, {', '.join(theme.name for theme in THEMES)}"),
        _setting("ascii", "auto" if own.ascii is None else own.ascii, "auto, true, false"),
        _setting("bell", own.bell, "whether alerts ring"),
        _setting("mouse", own.mouse, "false leaves the mouse to the terminal"),
        _setting("read_only", own.read_only, "true: nothing is sent"),
        "", "[keys]",
    ]  # fmt: skip
    where = ""
    for row in _rows(own.keys):
        if row.where != where:
            where = row.where
            made.append(f"# {where}")
        made.append(_setting(row.name, row.keys.replace(" ", ","), row.words))
    return "\n".join(made)


def page() -> str:
    """docs/keys.md."""
    themes = ", ".join(f'`"{theme.name}"`' for theme in THEMES)
    made = [_PAGE.format(themes=themes)]
    where = None
    for row in keymap.table(TrainctlApp.key_tables(), {}):
        if row.where != where:
            where = row.where
            made += [f"## {where.capitalize() or 'Everywhere'}\n", "| key | action | |", "| --- | --- | --- |"]
        made.append(f"| {' '.join(f'`{key}`' for key in row.keys.split())} | `{row.name}` | {row.words} |")
    return "\n".join(made).replace("|\n##", "|\n\n##") + "\n"


def _rows(keymap_: Mapping[str, str]) -> Iterator[keymap.KeyRow]:
    """Each action once, though several screens have it."""
    seen = set()
    for row in keymap.table(TrainctlApp.key_tables(), keymap_):
        if row.name not in seen:
            seen.add(row.name)
            yield row


def _setting(name: str, value: str | bool, words: str) -> str:
    return f"{f'{name} = {json.dumps(value)}':<28}  # {words}"


def main() -> int:
    """Writes the page to a file or standard output; with --check says whether a file is as it would be written."""
    words = [word for word in sys.argv[1:] if word != "--check"]
    path = Path(words[0]) if words else None
    if path is None:
        sys.stdout.write(page())
        return 0
    if "--check" in sys.argv:
        same = path.is_file() and path.read_text(encoding="utf-8") == page()
        if not same:
            sys.stderr.write(f"{path} is not up to date: python -m trainctl.tui.app.keys_doc {path}\n")
        return 0 if same else 1
    path.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
