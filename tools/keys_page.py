"""docs/keys.md, made from the program's own bindings.

`python -m tools.keys_page [--check] [FILE]` writes the page, or tells whether it is up to date.
"""

import sys
from pathlib import Path

from tools.protocol_docs import generated
from trainctl.tui.app import keymap
from trainctl.tui.widgets.theme import THEMES

_PAGE = """# Keys and settings

Generated from the program's bindings. `?` shows the keys that work right now; clicking a key at the bottom presses it.

## config.toml

`~/.config/trainctl/config.toml` (the platform's configuration folder; `$XDG_CONFIG_HOME/trainctl` where that is set),
or the file that `trainctl --config FILE` names. `trainctl config` prints the effective settings in the form of
such a file and names each line that it can't use (exit status 2); the other lines take effect.

| setting | values | |
| --- | --- | --- |
| `theme` | `"auto"`, {themes} | auto: the terminal's sixteen colours if it has no more or `NO_COLOR` is set, \
`day` if the terminal reports a light background (`COLORFGBG`), else `night` |
| `ascii` | `"auto"`, `true`, `false` | auto: true unless the locale is UTF-8 |
| `bell` | `true`, `false` | true: alerts ring the bell |
| `mouse` | `true`, `false` | false leaves the mouse to the terminal |
| `read_only` | `false`, `true` | true: the same as `--read-only` |
| `columns` | `["user:reward", "memory_use"]` | metrics of ranks, those that a run brings as \
well, with a column of their own in the fleet table of a screen of 150 columns or more, as far as there is room |
| `[keys]` | `action = "key"` | one key or several, `"f5,R"`: a character, or a name such as `f5`, `home`, `pagedown`, \
`ctrl+e`, `comma`, `space` |

Keys inside dialogs are fixed: escape closes, enter sends, and the dialog lists the others. Ctrl-C quits from anywhere.
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
