"""The command line: parsing only. What a command needs is imported when that command is given."""

import io
import os
import sys
from collections.abc import Sequence

from phasewise.interrupt import starting
from phasewise.memory import shortage, within_machine

with starting():
    from phasewise.cli.advise import advise
    from phasewise.cli.bench import bench
    from phasewise.cli.compare import compare
    from phasewise.cli.doctor import doctor
    from phasewise.cli.evaluate import evaluate
    from phasewise.cli.export import export
    from phasewise.cli.extend import extend
    from phasewise.cli.inspect import inspect
    from phasewise.cli.profile import profile
    from phasewise.cli.terminal import BAD_INPUT, FAILED, INTERRUPTED, Left, code_of, leave, one_line
    from phasewise.cli.together import speaker
    from phasewise.cli.tokenize import tokenize
    from phasewise.cli.train import train

COMMANDS = {
    "compare": compare,
    "tokenize": tokenize,
    "train": train,
    "extend": extend,
    "export": export,
    "evaluate": evaluate,
    "profile": profile,
    "inspect": inspect,
    "advise": advise,
    "doctor": doctor,
    "bench": bench,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns 0; 1 when its run failed or found something wrong; 2 for bad input; 130 after Ctrl-C."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # As stderr: no sign or name may end what was measured.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read the output has gone: what is still buffered goes nowhere, so that leaving is silent.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _run(arguments: Sequence[str] | None) -> int:
    name, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print("usage: phasewise COMMAND [OPTIONS]\n")
        for command, function in COMMANDS.items():
            print(f"  {command:10}{(function.__doc__ or '').splitlines()[0]}")
        print("\nphasewise COMMAND --help lists a command's options; phasewise --version, what it runs on.")
        return 0
    if name == "--version":
        from phasewise.record import versions

        print(", ".join(f"{package} {version}" for package, version in versions().items()))
        return 0
    if name not in COMMANDS:
        return leave(f"unknown command {name!r}; choose from {', '.join(COMMANDS)}", BAD_INPUT)
    try:
        with within_machine():
            return COMMANDS[name](rest)
    except BrokenPipeError:
        raise
    except SystemExit as end:
        # tyro has said what is wrong, in the first process, which the launcher stops when another one ends.
        speaker(f"left with {end.code}")
        raise
    except Left as end:
        return leave(str(end), end.code)
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        said = shortage(error)
        if said is None and isinstance(error, RuntimeError):
            raise
        return leave(said or one_line(error), code_of(error))
    except KeyboardInterrupt:
        return leave("interrupted", INTERRUPTED)
