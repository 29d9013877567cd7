"""systemctl, loginctl and launchctl for machines that lack them: programs on PATH that keep their arguments in a
folder, and say of it what the real ones would."""

import os
from pathlib import Path

SYSTEMCTL = """#!/bin/sh
# State in $FAKE: known, enabled, active (the pid).
echo "$(basename "$0") $*" >> "$FAKE/calls"
[ "$1" = "--user" ] && shift
is() { [ -e "$FAKE/$1" ]; }
is unreachable && { echo "Failed to connect to bus: No medium found" >&2; exit 1; }
case "$1" in
show)
    is known && echo LoadState=loaded || echo LoadState=not-found
    is enabled && echo UnitFileState=enabled || echo UnitFileState=
    if is active; then echo ActiveState=active; echo SubState=running; echo "MainPID=$(cat "$FAKE/active")"
    elif is known; then echo ActiveState=activating; echo SubState=auto-restart; echo MainPID=0
    else echo ActiveState=inactive; echo SubState=dead; echo MainPID=0; fi ;;
daemon-reload) [ -e "$UNIT" ] && touch "$FAKE/known" || rm -f "$FAKE/known" ;;
enable) touch "$FAKE/enabled" ;;
disable) rm -f "$FAKE/enabled"; [ "$2" = --now ] && rm -f "$FAKE/active" ;;
start|restart)
    is dies && { echo "Job for $2 failed because the control process exited with error code." >&2; exit 1; }
    is known || { echo "Unit $2 not found." >&2; exit 5; }
    echo "$PPID" > "$FAKE/active" ;;
*) echo "Unknown command verb $1." >&2; exit 1 ;;
esac
"""
LOGINCTL = """#!/bin/sh
echo "loginctl $*" >> "$FAKE/calls"
if [ "$1" = show-user ]; then
    [ -e "$FAKE/lingers" ] && echo Linger=yes || echo Linger=no
    exit 0
fi
[ -e "$FAKE/may-linger" ] && touch "$FAKE/lingers" || { echo "Could not enable linger: Access denied" >&2; exit 1; }
"""
LAUNCHCTL = """#!/bin/sh
# State in $FAKE: active (the pid), and going: for how many more looks a job that was booted out is still there.
echo "launchctl $*" >> "$FAKE/calls"
is() { [ -e "$FAKE/$1" ]; }
case "$1" in
print)
    if is going; then
        left=$(cat "$FAKE/going"); echo $((left - 1)) > "$FAKE/going"; [ "$left" -le 1 ] && rm "$FAKE/going"; exit 0
    fi
    is active || { echo "Could not find service in domain" >&2; exit 113; }
    printf '%s = {\\n\\tstate = running\\n\\n\\tpid = %s\\n}\\n' "$2" "$(cat "$FAKE/active")" ;;
print-disabled) printf 'disabled services = {\\n}\\n' ;;
bootstrap)
    is going && { echo "Bootstrap failed: 37: Operation already in progress" >&2; exit 37; }
    is active && { echo "Bootstrap failed: 5: Input/output error" >&2; exit 5; }
    echo "$PPID" > "$FAKE/active" ;;
enable) ;;
bootout) rm -f "$FAKE/active"; echo 2 > "$FAKE/going" ;;
*) exit 64 ;;
esac
"""


class Managers:
    """A folder with the programs, and the environment in which they are found."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder / "fake", folder / "home"
        programs = folder / "bin"
        for made in (self.folder, self.home, programs):
            made.mkdir()
        for name, text in (("systemctl", SYSTEMCTL), ("loginctl", LOGINCTL), ("launchctl", LAUNCHCTL)):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        self.unit = self.home / ".config/systemd/user/trainctl-agent.service"
        self.plist = self.home / "Library/LaunchAgents/trainctl.agent.plist"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "TRAINCTL_STATE"))},
            "PATH": f"{programs}:/usr/bin:/bin", "HOME": str(self.home), "FAKE": str(self.folder),
            "UNIT": str(self.unit),
        }  # fmt: skip

    def calls(self) -> list[str]:
        """Return what was called since the last time, but for questions."""
        file = self.folder / "calls"
        said = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return [line for line in said if not any(word in line for word in (" show", " print"))]
