"""Replace one file again and again, or open it: ``python replacing.py write|read PATH COUNT``.

A program, because threads of one Python take turns and leave each other too few gaps to meet.
"""

import os
import sys

DATA = b"whole" * 1000


def write(path: str, count: int) -> None:
    """Put *path* in place *count* times, by temps of this process."""
    for number in range(count):
        temp = f"{path}_{os.getpid()}{number}.tmp"
        with open(temp, "wb") as stream:
            stream.write(DATA)
        os.rename(temp, path)


def read(path: str, count: int) -> None:
    """Open and read *path*, which is always there and always whole."""
    for _ in range(count):
        with open(path, "rb") as stream:
            assert stream.read() == DATA, "a replaced file was read in part"


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
