"""What an experiment takes from its command line."""

import argparse


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """For `python -m experiments.NAME`, whose --help is the module's docstring as it is written."""
    return argparse.ArgumentParser(
        prog=f"python -m experiments.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
