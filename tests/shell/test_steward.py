"""The process that reads one disk: what it sends, and how fast."""

import os
import socket
import threading
from pathlib import Path

import pytest

from kvfuse.core import records
from kvfuse.core.records import ROOT_ID, Label
from kvfuse.disks.disk import Disk
from kvfuse.disks.sighting import Terms
from kvfuse.scan.reading import Job, Line, Report, Work
from kvfuse.steward.__main__ import Steward

FILES = 600  # more than one haul
TERMS = Terms(number=0, adopting=False, stale=False, unsure=[], floor=1 << 62)


class Clock:
    """Time that passes while somebody sleeps, and not else."""

    def __init__(self) -> None:
        self.at_s = 0.0

    def now_s(self) -> float:
        return self.at_s

    def sleep(self, seconds: float) -> None:
        self.at_s += seconds


def lay(root: Path, count: int) -> list[bytes]:
    """Put files of the pool at the top of a disk, the last one with the lowest id."""
    disk = Disk.open_root(str(root))
    names = [b"%04d.bin" % number for number in range(count)]
    for number, name in enumerate(names):
        (root / os.fsdecode(name)).write_bytes(b"data")
        node_id = records.FIRST_ID + count - number
        label = Label(node_id, 1000 + number, records.verify_hash(ROOT_ID, name), 0)
        disk.write_label_at(disk.root_fd, name, records.pack_label(label))
    disk.close()
    return names


def read_root(root: Path, clock: Clock, files_per_s: float) -> list[Report]:
    """Let a steward read the top of a disk; return what it reported."""
    disk = Disk.open_root(str(root))
    traits = disk.traits
    job = Job(
        disk.path, traits.device, traits.filesystem, traits.use_openat2, traits.label_name, TERMS,
        files_per_s,
    )  # fmt: skip
    here, there = socket.socketpair()
    ours, theirs = Line(here), Line(there)
    steward = Steward(theirs, job, disk.root_fd, now_s=clock.now_s, sleep=clock.sleep)

    def work() -> None:
        steward.run()
        theirs.close()

    thread = threading.Thread(target=work)
    before = os.getcwd()
    thread.start()
    ours.send(Work([(ROOT_ID, b"")]))
    reports: list[Report] = []
    while not reports or not reports[-1].asks:
        report = ours.receive(Report)
        assert report is not None, "the steward ended before it was done"
        reports.append(report)
    here.shutdown(socket.SHUT_WR)
    thread.join(10)
    os.chdir(before)
    ours.close()
    disk.close()
    return reports


def test_all_files_are_sent_once_in_the_order_of_their_ids(tmp_path):
    names = lay(tmp_path, FILES)
    reports = read_root(tmp_path, Clock(), 0)
    found: list[bytes] = []
    for report in reports:
        files = report.haul.files
        assert files.nodes == sorted(files.nodes)
        found += [records.split_entry_key(key)[1] for key in files.entries]
        for key, value, entry in zip(files.nodes, files.entry_values, files.entries, strict=True):
            assert records.unpack_entry(value)[0] == records.unpack_id(key)
            assert entry.startswith(records.pack_id(ROOT_ID))
    assert sorted(found) == names
    assert [dir_id for report in reports for dir_id in report.haul.done] == [ROOT_ID]


@pytest.mark.parametrize("files_per_s", [50, 2000])
def test_files_are_read_no_faster_than_configured(tmp_path, files_per_s):
    """Also a directory that fits into one haul, and whatever was sent last."""
    lay(tmp_path, FILES)
    clock = Clock()
    reports = read_root(tmp_path, clock, files_per_s)
    assert sum(len(report.haul.files) for report in reports) == FILES
    assert clock.at_s >= FILES / files_per_s
    # In small steps: what a client asks for meanwhile does not wait long.
    assert max(len(report.haul.files) for report in reports) <= max(1, files_per_s / 10)


def test_without_a_rate_nobody_rests(tmp_path):
    lay(tmp_path, 10)
    clock = Clock()
    read_root(tmp_path, clock, 0)
    assert clock.at_s == 0
