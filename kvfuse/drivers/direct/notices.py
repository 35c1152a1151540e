"""What the kernel is told unasked: names and attributes that changed without a client's doing.

A notification waits in the kernel while a request in the same directory is unanswered, so none is
sent by a thread that answers requests: there is a queue and a thread for each disk, and a spare one
takes over what stands behind a notification that waits. Publish the new state first, then notify,
and hold no lock meanwhile.

Concurrency: any thread; one mutex for all queues.
"""

import errno
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from kvfuse.drivers.direct import abi, replies
from kvfuse.drivers.direct.negotiation import Agreement

log = logging.getLogger(__name__)

QUEUED_MAX = 4096  # of one disk; then everything is expired instead
THREADS_MAX = 4  # of one disk
SPARE_AFTER_S = 0.1

# ENOENT: the kernel does not know the name, which is as good. ENOTDIR, EBUSY: nor can it be there.
_NOTHING_TO_DO = (errno.ENOENT, errno.ENOTDIR, errno.EBUSY, errno.ENODEV)

_Key = tuple[int, bytes | None]  # parent and name, or node id and None for its attributes


_Message = tuple[bytes, tuple[Callable[[], None], ...]]  # and who is told when it was sent


class _Queue:
    """The notifications of one disk. A key stands in it once; the later message wins."""

    __slots__ = ("busy_parents", "messages", "since_s", "threads")

    def __init__(self) -> None:
        self.messages: OrderedDict[_Key, _Message] = OrderedDict()
        self.busy_parents: set[int] = set()  # one outstanding for each: the next would wait anyway
        self.threads = 0
        self.since_s = 0.0  # when a thread last took a message


class Notices:
    """Tells the kernel of one connection what changed."""

    def __init__(self, device_fd: int, agreement: Agreement) -> None:
        self._fd = device_fd
        self._agreement = agreement
        self._mutex = threading.Lock()
        self._queues: dict[int | None, _Queue] = {}
        self.sent = 0
        self.overflows = 0

    def name_changed(self, disk: int | None, parent: int, name: bytes) -> None:
        """Drop *name* in *parent*: what it names has changed."""
        self._put(disk, (parent, name), replies.invalidate_entry(parent, name, 0))

    def name_expired(
        self,
        disk: int | None,
        parent: int,
        name: bytes,
        done: Callable[[], None] | None = None,
    ) -> None:
        """Make the kernel ask for *name* again, but keep what is open below it.

        *done* is called when the kernel has been told; not at all if that had to be given up.
        """
        flags = abi.EXPIRE_ONLY if self._agreement.has_expire_only else 0
        self._put(disk, (parent, name), replies.invalidate_entry(parent, name, flags), done)

    def attributes_changed(self, disk: int | None, node_id: int) -> None:
        """Make the kernel ask for the attributes of *node_id* again."""
        self._put(disk, (node_id, None), replies.invalidate_attributes(node_id))

    def everything_changed(self) -> bool:
        """Make the kernel ask for every name again; return False where it cannot be told (< 6.16).

        There the entry timeouts are the bound.
        """
        if not self._agreement.has_epoch:
            return False
        self._send(replies.invalidate_all_entries())
        return True

    def _put(
        self,
        disk: int | None,
        key: _Key,
        message: bytes,
        done: Callable[[], None] | None = None,
    ) -> None:
        with self._mutex:
            queue = self._queues.get(disk)
            if queue is None:
                queue = self._queues[disk] = _Queue()
            overflow = len(queue.messages) >= QUEUED_MAX and key not in queue.messages
            if overflow:
                self.overflows += 1
                if self._agreement.has_epoch:
                    queue.messages.clear()
                else:  # the oldest is nearest to its timeout, which is the bound then
                    queue.messages.popitem(last=False)
            if not (overflow and self._agreement.has_epoch):
                told = queue.messages[key][1] if key in queue.messages else ()
                queue.messages[key] = message, told if done is None else (*told, done)
            hire = self._wants_thread(queue)
            queue.threads += hire
        if overflow:
            self.everything_changed()
        if hire:
            threading.Thread(
                target=self._serve, args=(queue,), daemon=True, name="fuse-notices"
            ).start()

    def _wants_thread(self, queue: _Queue) -> bool:
        if queue.threads == 0:
            queue.since_s = time.monotonic()
            return True
        late = time.monotonic() - queue.since_s > SPARE_AFTER_S
        return late and queue.threads < THREADS_MAX

    def _serve(self, queue: _Queue) -> None:
        """Send what can be sent now, then end."""
        while True:
            with self._mutex:
                key = next((k for k in queue.messages if k[0] not in queue.busy_parents), None)
                if key is None:
                    queue.threads -= 1
                    return
                message, told = queue.messages.pop(key)
                queue.busy_parents.add(key[0])
                queue.since_s = time.monotonic()
            try:
                if self._send(message):
                    for done in told:
                        done()
            finally:
                with self._mutex:
                    queue.busy_parents.discard(key[0])

    def _send(self, message: bytes) -> bool:
        """Tell the kernel; return whether it knows now."""
        self.sent += 1
        try:
            os.write(self._fd, message)
        except OSError as exc:
            if exc.errno not in _NOTHING_TO_DO:
                log.warning("a notification was refused: %s", exc.strerror)
                return False
            return exc.errno == errno.ENOENT  # else the name may be there, and be kept
        return True
