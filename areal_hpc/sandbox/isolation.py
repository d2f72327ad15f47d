"""What isolation this machine offers, found out by trying. The environment variable is read here and nowhere else."""

from __future__ import annotations

import json
import logging
import os

from areal_hpc.sandbox.box import MODES, Sandbox
from areal_hpc.sandbox.languages import LANGUAGES
from areal_hpc.sandbox.limits import Limits, SandboxError
from areal_hpc.sandbox.plan import plan

VARIABLE = "AREAL_HPC_SANDBOX"
CHOICES = ("auto", *MODES)
FULL = ("bwrap", "namespaces")
"""Equal in what they guarantee: the first builds the walls with bubblewrap, the second with `enter`."""

_log = logging.getLogger(__name__)

_LOOK = """
import os
def look(private):
    def fails(path):
        try:
            open(path, "w").close()
        except OSError:
            return True
    seen = {"home": any(os.path.lexists(path) for path in private), "root": os.getuid() == 0}
    seen["network"] = [line.split(":")[0].strip() for line in list(open("/proc/net/dev"))[2:]] != ["lo"]
    seen["processes"] = len([name for name in os.listdir("/proc") if name.isdigit()]) > 2
    seen["writable"] = not (fails("/usr/x") and fails("/x") and fails("/etc/x"))
    return seen
"""
_WHAT = {
    "home": "the home directory is in sight",
    "root": "programs run as root",
    "network": "there are network interfaces",
    "processes": "other processes are in sight",
    "writable": "the system can be written to",
}


def _private(limits: Limits) -> list[str]:
    """What lies in the user's home and does not lead to the interpreter."""
    home = os.path.realpath(os.path.expanduser("~"))
    shown = [step[-1] + "/" for step in plan(limits)]
    try:
        paths = [os.path.join(home, name) for name in (os.listdir(home) if home != "/" else [])]
    except OSError:
        paths = []
    return [path for path in paths if not any(place.startswith(path + "/") for place in shown)]


def probe(mode: str) -> None:
    """Start a sandbox and look around in it. Raises SandboxError with what is missing."""
    with Sandbox(mode) as sandbox:
        sandbox.program(LANGUAGES["python"], _LOOK)
        ended = sandbox.call("look", [_private(sandbox.limits)])
        if not ended.well:
            raise SandboxError(f"{mode}: a trial program ended by {ended.end} {ended.code}")
        seen = dict(json.loads(ended.output[4:])["dict"])
        if mode != "rlimits" and (holes := [_WHAT[name] for name, value in seen.items() if value]):
            raise SandboxError(f"{mode}: {', '.join(holes)}")


def choose(wanted: str | None = None) -> str:
    """The mode to use: `wanted`, else what AREAL_HPC_SANDBOX says (set from reward.sandbox in a run), else the first of
    FULL that works.

    "rlimits" is weaker and only taken when asked for by name, with a warning in the log.

    Raises:
        SandboxError: an unknown choice, or none that works; with every reason.
    """
    choice = wanted or os.environ.get(VARIABLE) or "auto"
    if choice not in CHOICES:
        raise SandboxError(f"{VARIABLE}={choice}: choose one of {', '.join(CHOICES)}")
    if choice == "rlimits":
        _log.warning("code rewards run with limits only: a program can read files and processes of this user")
    reasons = []
    for mode in FULL if choice == "auto" else (choice,):
        try:
            probe(mode)
            return mode
        except SandboxError as error:
            reasons.append(str(error))
    raise SandboxError(
        f"code rewards need a sandbox and this machine offers none ({'; '.join(reasons)}). Ask for user namespaces or "
        f"bubblewrap 0.7 or newer on the compute nodes, or accept less isolation with reward.sandbox=rlimits"
    )
