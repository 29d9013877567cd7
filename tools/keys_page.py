"""docs/keys.md, made from the program's own bindings.

`python -m tools.keys_page [--check] [FILE]` writes the page, or tells whether it is up to date.
"""

import sys
from pathlib import Path

from tools.protocol_docs import generated
from trainctl.tui.app import keymap
from trainctl.tui.widgets.theme import THEMES

_PAGE = """# Keys and settings

This page is generated from the program's key bindings. Press `?` to list the keys that currently work. You can also
click a key at the bottom of the screen.

## config.toml

The settings file is `~/.config/trainctl/config.toml`, in the platform's configuration folder (or in
`$XDG_CONFIG_HOME/trainctl` if that is set). `trainctl --config FILE` uses a different file. `trainctl config` prints
the effective settings in the same format. It reports each invalid line (exit status 2); the other lines take effect.

| setting | values | |
| --- | --- | --- |
| `theme` | `"auto"`, {themes} | auto: the terminal's sixteen colours if it supports no more or `NO_COLOR` is set; \
`day` if the terminal reports a light background (`COLORFGBG`); otherwise `night` |
| `ascii` | `"auto"`, `true`, `false` | auto: true unless the locale is UTF-8 |
| `bell` | `true`, `false` | whether alerts ring the bell |
| `mouse` | `true`, `false` | false: the terminal handles the mouse |
| `read_only` | `false`, `true` | true: same as `--read-only` |
| `columns` | `["user:reward", "memory_use"]` | rank metrics to show as columns in the fleet \
table, including metrics that the run defines; this needs a screen of at least 150 columns |
| `[keys]` | `action = "key"` | one or more keys, such as `"f5,R"`: each a character or a name like `f5`, `home`, \
`pagedown`, `ctrl+e`, `comma`, `space` |

Keys inside dialogs can't be changed: escape closes the dialog, enter sends, and the dialog lists all other keys. Ctrl-C
quits from anywhere.
"""


_HEADINGS = {"stepprofile": "Profile"}
"""Of screens whose actions have another name."""


def page() -> str:
    """docs/keys.md."""
    themes = ", ".join(f'`"{theme.name}"`' for theme in THEMES)
    made = [_PAGE.format(themes=themes)]
    where = None
    for row in keymap.rows({}):
        if row.where != where:
            where = row.where
            made += [
                f"## {_HEADINGS.get(where, where.capitalize()) or 'Everywhere'}\n",
                "| key | action | |",
                "| --- | --- | --- |",
            ]
        made.append(f"| {' '.join(f'`{key}`' for key in row.keys.split())} | `{row.name}` | {row.words} |")
    return "\n".join(made).replace("|\n##", "|\n\n##") + "\n"


if __name__ == "__main__":
    sys.exit(generated.main("tools.keys_page", page, Path("docs/keys.md")))
