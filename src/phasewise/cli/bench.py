"""phasewise bench."""

from collections.abc import Sequence

from phasewise.cli.terminal import BAD_INPUT, leave

SUBJECTS = ("attention", "decode", "cpu")


def bench(arguments: Sequence[str]) -> int:
    """Measure attention on this GPU, or the library on this CPU, into a JSON record."""
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help"):
        print(
            "usage: phasewise bench attention|decode|cpu [OPTIONS]\n\n"
            "  attention  every implementation of attention on this GPU, gate first\n"
            "  decode     one query against long caches on this GPU, as shares of what copying moves\n"
            "  cpu        time against RoPE, and memory of the reference, on this CPU\n\n"
            "phasewise bench attention --help lists its options, and so for the others."
        )
        return 0
    match name:
        case "attention":
            from phasewise.bench.attention import main
        case "decode":
            from phasewise.bench.decode import main
        case "cpu":
            from phasewise.bench.cpu import main
        case _:
            return leave(f"unknown benchmark {name!r}; choose from {', '.join(SUBJECTS)}", BAD_INPUT)
    return main(rest)
