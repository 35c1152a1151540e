"""How far the disks were read, as people and programs are told."""

import pytest

from kvfuse.cli.status import _recovery
from kvfuse.output import bar
from tests.shell.pools import boxed, commit


@pytest.mark.parametrize(
    ("share", "shown"),
    [
        (0.0, "[..............................]   0 % x"),
        (0.5, "[###############...............]  50 % x"),
        (0.999, "[#############################.]  99 % x"),
        (1.0, "[##############################] 100 % x"),
        (-1.0, "x"),
    ],
)
def test_a_bar_shows_what_is_done(share, shown):
    assert bar("x", share) == shown
    assert len(bar("y" * 200, share)) == 79


def test_the_share_grows_from_none_of_it_to_all():
    with boxed() as box:
        pool = box.open()
        for number in range(30):
            commit(pool, f"{number}.bin", b"data")
        box.close()
        box.lose_catalog()
        box.recovery = {"scan_files_per_s": 10}
        pool = box.open(at_once=True)
        early = pool.status()["recovery"]
        assert early["state"] == "scanning"
        assert 0 <= early["share"] < 1
        assert pool.wait_complete(60)
        late = pool.status()["recovery"]
        assert (late["state"], late["share"], late["files"]) == ("complete", 1, 30)


@pytest.mark.parametrize(
    ("recovery", "shown"),
    [
        ({"state": "complete", "files": 0}, "complete, 0 files"),
        (
            {"state": "scanning", "files": 1234, "share": 0.126, "seconds": 2.6},
            "scanning, 1,234 files; about 12 % in 3 s",
        ),
        (
            {"state": "scanning", "files": 1, "share": None, "seconds": 2},
            "scanning, 1 files; in 2 s",
        ),
        (
            {"state": "complete", "files": 0, "check": {"state": "running", "compared": 5000}},
            "complete, 0 files; catalog and disks are being compared: 5,000 rows and names",
        ),
        (
            {"state": "complete", "files": 0, "check": {"state": "done", "mended": 2, "faults": 1}},
            "complete, 0 files; compared: 2 differences mended, 1 left",
        ),
    ],
)
def test_status_says_it_in_a_line(recovery, shown):
    assert _recovery(recovery) == shown
