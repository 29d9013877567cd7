"""docs/keys.md, made from the program's own bindings.

`python -m tools.keys_page [--check] [FILE]` writes the page, or tells whether it is up to date.
"""

import sys
from pathlib import Path

from tools.protocol_docs import generated
from trainctl.tui.app import keymap
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
| `columns` | `["user:reward", "memory_use"]` | metrics of ranks, those that a run brings as \
well, with a column of their own in the fleet table of a screen of 150 columns or more, as far as there is room |
| `[keys]` | `action = "key"` | one key or several, `"f5,R"`: a character, or a name such as `f5`, `home`, `pagedown`, \
`ctrl+e`, `comma`, `space` |

Keys inside dialogs are fixed: escape closes, enter sends, and what the dialog says. Ctrl-C leaves from anywhere.
"""


def page() -> str:
    """docs/keys.md."""
    themes = ", ".join(f'`"{theme.name}"`' for theme in THEMES)
    made = [_PAGE.format(themes=themes)]
    where = None
    for row in keymap.rows({}):
        if row.where != where:
            where = row.where
            made += [f"## {where.capitalize() or 'Everywhere'}\n", "| key | action | |", "| --- | --- | --- |"]
        made.append(f"| {' '.join(f'`{key}`' for key in row.keys.split())} | `{row.name}` | {row.words} |")
    return "\n".join(made).replace("|\n##", "|\n\n##") + "\n"


if __name__ == "__main__":
    sys.exit(generated.main("tools.keys_page", page, Path("docs/keys.md")))
