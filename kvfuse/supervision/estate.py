"""What outlives a server, and what outlives even its supervisor where systemd keeps it.

Standard library only, and little of it: the supervisor imports this.
"""

from kvfuse.supervision import processes
from kvfuse.supervision.ledger import Memory
from kvfuse.supervision.notify import forget, keep
from kvfuse.supervision.processes import Process
from kvfuse.system.fdstore import FUSE, FdStore, Message


class Estate:
    """The descriptors of a mount, copies of them at the service manager, and a memory there.

    *kept* is what the manager kept of a supervisor before this one.
    """

    def __init__(self, kept: list[tuple[str, int]]) -> None:
        self.store = FdStore()
        memory = None
        for name, fd in kept:
            if name == Memory.NAME and memory is None:
                memory = Memory(fd)
            else:
                self.store.put(name, fd)
        if memory is None:
            memory = Memory()
            keep(memory.NAME, memory.fd)
        self._memory = memory
        if not self.has_connection:
            self.clear()

    @property
    def has_connection(self) -> bool:
        """Whether there is a mount to go on with."""
        return FUSE in self.store

    def recall(self) -> tuple[dict[str, object], list[tuple[int, int]]]:
        """Return what the supervisor before noted: the facts; (pid, start) of its servers."""
        noted = self._memory.read()
        facts, pids = noted.get("facts"), noted.get("pids")
        return (
            facts if isinstance(facts, dict) else {},
            [(pid, started) for pid, started in pids] if isinstance(pids, list) else [],
        )

    def note(self, facts: dict[str, object], running: list[Process]) -> None:
        """Note for a supervisor after this one what it has to know."""
        pids = [[process.pid, process.started] for process in running]
        self._memory.write({"facts": facts, "pids": pids})

    def change(self, message: Message) -> bool:
        """Keep the descriptors that *message* brought, or drop what it names.

        Return whether there was room.

        Raises:
            ChannelError: names and descriptors do not match.
        """
        names = message.texts("names")
        if message.kind == "drop":
            for name in names:
                self.drop(name)
            return True
        for name, fd in zip(names, message.fds, strict=False):
            if name in self.store:
                forget(name)
            keep(name, fd)
        return self.store.take(message)

    def drop(self, name: str) -> None:
        """Close the descriptor *name*, here and at the manager."""
        self.store.drop(name)
        forget(name)

    def clear(self) -> None:
        """Close all descriptors."""
        for name in self.store.names():
            self.drop(name)

    def end(self) -> None:
        """Leave nothing at the manager."""
        self.clear()
        forget(self._memory.NAME)


def formers(pids: list[tuple[int, int]]) -> list[Process]:
    """Return those of *pids* that are still there, killed by now."""
    found = []
    for pid, started in pids:
        process = processes.find(pid, started)
        if process is not None:
            process.kill()
            found.append(process)
    return found
