"""The command line: `areal-hpc COMMAND ...`. Each command is one function of its arguments, imported when used."""

from __future__ import annotations

import importlib
import os
import signal
import sys

from areal_hpc import __version__
from areal_hpc.exits import Exit

COMMANDS = {
    "run": ("areal_hpc.launch", "run a configuration on this machine"),
    "evaluate": ("areal_hpc.evaluate", "measure a model on held-out prompts: pass@1, pass@k, majority votes"),
    "submit": ("areal_hpc.submission", "put a run into the Slurm queue"),
    "sweep": ("areal_hpc.sweep.command", "put many runs into the queue, look after them, tabulate them"),
    "doctor": ("areal_hpc.doctor.command", "tell whether a Slurm allocation can carry a run"),
    "export": ("areal_hpc.export", "make a model directory of a checkpoint"),
    "check": ("areal_hpc.check", "check a configuration and explain every field"),
    "bench": ("areal_hpc.bench.menu", "measure this machine: wire, weights, engine, packing, log, verifier, sandbox"),
}


def usage() -> str:
    lines = [
        f"areal-hpc {__version__}: asynchronous RL for language models in one MPI world",
        "",
        "usage: areal-hpc COMMAND ...",
        "",
    ]
    lines += [f"  {name:<8} {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else int(Exit.CONFIG)
    if arguments[0] == "--version":
        print(__version__)
        return 0
    name = arguments[0]
    if name not in COMMANDS:
        print(f"areal-hpc: no command {name!r}\n\n{usage()}", file=sys.stderr)
        return int(Exit.CONFIG)
    try:
        code: int = importlib.import_module(COMMANDS[name][0]).main(arguments[1:])
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `areal-hpc check --explain | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


if __name__ == "__main__":
    sys.exit(main())
