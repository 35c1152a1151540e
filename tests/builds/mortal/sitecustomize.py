"""Makes another build of kvfuse, for tests: its servers die as they are told, at the worst moment.

A file in the directory KVFUSE_TEST_FATES tells them. Named as an opcode, it holds a number: so many
servers die after they have executed a request of that kind, before they answer it. Named
``closing``, it ends a server that has noted a file as closed and done nothing else about it; named
``watchdog`` or ``lead``, only that thread of one; named ``opened``, one that has opened a file
which then lost its name, and has told the kernel nothing of it.
"""

import os
import sys
import threading
from pathlib import Path

_claiming = threading.Lock()


def _claim(path: Path) -> bool:
    """Whether the fate *path* is on this server; one death less is left."""
    with _claiming:
        try:
            left = int(path.read_text() or 1)
        except FileNotFoundError:
            return False
        if left == 1:
            path.unlink()
        else:
            fresh = path.with_suffix(".new")
            fresh.write_text(str(left - 1))
            fresh.replace(path)
        return True


def _make(fates: Path) -> None:
    from kvfuse.drivers.direct.abi import opcode_name
    from kvfuse.drivers.direct.contents import Contents
    from kvfuse.drivers.direct.crew import Crew
    from kvfuse.drivers.direct.executor import Executor
    from kvfuse.heart.handletable import HandleTable

    execute, look, parsed = Executor.execute, Crew._look, Crew._parsed
    closing, opened = HandleTable.closing, Contents._opened

    def execute_and_die(self, request):
        reply = execute(self, request)
        if _claim(fates / opcode_name(request.opcode).removesuffix("_64")):
            os._exit(9)
        return reply

    def look_and_end(self, now_s):
        if _claim(fates / "watchdog"):
            raise SystemExit
        look(self, now_s)

    def parse_and_end(self, message):
        if _claim(fates / "lead"):
            raise SystemExit
        return parsed(self, message)

    def close_and_die(self, fh):
        closing(self, fh)
        if _claim(fates / "closing"):
            os._exit(9)

    def take_in_and_die(self, node_id, fh, flags, *, temp):
        if _claim(fates / "opened"):
            pool = self._pool
            node = pool.getattr(node_id)
            pool.request.unique = 0  # as another thread does it for another client
            pool.unlink(node.parent, node.name)
            os._exit(9)
        return opened(self, node_id, fh, flags, temp=temp)

    HandleTable.closing, Contents._opened = close_and_die, take_in_and_die
    Executor.execute, Crew._look, Crew._parsed = execute_and_die, look_and_end, parse_and_end


if "daemon" in sys.orig_argv:
    _make(Path(os.environ["KVFUSE_TEST_FATES"]))
