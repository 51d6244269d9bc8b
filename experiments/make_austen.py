r"""Writes src/phasewise/data/austen.txt.xz, the six novels, from the R package janeaustenr.

    pip install rdata
    apt-get download r-cran-janeaustenr && dpkg -x r-cran-janeaustenr_*.deb unpacked
    python experiments/make_austen.py \
        unpacked/usr/lib/R/site-library/janeaustenr/data src/phasewise/data/austen.txt.xz

Novels stand in order of publication, the two posthumous ones last, with a form feed between them. The one
passage that is not Austen's, a modern "A NOTE ON THE TEXT" after Northanger Abbey, is left out.
"""

import lzma
import sys
import zlib
from pathlib import Path

import rdata

ORDER = ("sensesensibility", "prideprejudice", "mansfieldpark", "emma", "northangerabbey", "persuasion")
LENGTH_PREFIX = 4


def main(folder: Path, out: Path) -> None:
    """Reads the lazy-load database Rdata.rdx and Rdata.rdb in `folder`, writes compressed text to `out`."""
    places = rdata.read_rds(folder / "Rdata.rdx")["variables"]
    database = (folder / "Rdata.rdb").read_bytes()
    novels = []
    for name in ORDER:
        start, size = (int(value) for value in places[name])
        variable = zlib.decompress(database[start + LENGTH_PREFIX : start + size])
        lines = rdata.conversion.convert(rdata.parser.parse_data(variable, extension=".rds"))
        novel = "\n".join(str(line).rstrip() for line in lines).partition("A NOTE ON THE TEXT")[0]
        novels.append(novel.strip("\n") + "\n")
    out.write_bytes(lzma.compress("\f".join(novels).encode(), preset=9 | lzma.PRESET_EXTREME))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
