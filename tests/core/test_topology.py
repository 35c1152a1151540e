"""Topologies: their bytes, their succession, and which of several holds."""

import itertools
import json
import uuid

import pytest

from kvfuse.core.records import FORMAT
from kvfuse.core.topology import EPOCH_MAX, HISTORY_MAX, Member, Topology, settle


def u(number: int) -> str:
    return str(uuid.UUID(int=number, version=4))


POOL = u(99)
A, B, C, D = (Member(u(n), 1.0) for n in range(1, 5))


def first(*members: Member) -> Topology:
    return Topology.first(POOL, u(1000), members or (B, A))


def test_json_is_read_back():
    """What is written to a disk is what is read from it, through real JSON."""
    topology = first(A, Member(B.disk_id, 2.5)).changed([A, C], u(1001))
    assert Topology.from_json(json.loads(json.dumps(topology.to_json()))) == topology
    assert topology.to_json()["format"] == FORMAT


def test_members_are_sorted():
    """The same members in another order are the same topology."""
    assert first(A, B) == first(B, A)


def test_change_bumps_the_epoch():
    """The next topology has the next epoch, its parent's id, and the parent in its history."""
    before = first()
    after = before.changed([A, B, C], u(1001))
    assert (after.epoch, after.parent, after.members) == (2, before.id, (A, B, C))
    assert after.history == ((1, before.id),)


def test_history_keeps_sixteen():
    """However often a pool changes, a topology stays small."""
    topology = first()
    for number in range(40):
        topology = topology.changed([A, B], u(2000 + number))
    assert len(topology.history) == HISTORY_MAX
    assert topology.history[-1] == (40, topology.parent)


def test_change_needs_a_fresh_id():
    """An id names one topology."""
    with pytest.raises(ValueError, match="is the id of the one before"):
        first().changed([A], first().id)


def test_highest_epoch_wins():
    """A disk that was away learns the newest topology, whatever order they are read in."""
    old = first()
    new = old.changed([A, B, C], u(1001))
    for found in itertools.permutations([old, old, new]):
        assert settle(found, u(5000)) == new


def test_equal_epochs_become_a_new_one():
    """Two histories at one epoch join: members of both, a higher epoch, both in the history."""
    old = first(A, B, C, D)
    left, right = old.changed([A, B], u(1001)), old.changed([C, D], u(1002))
    for found in itertools.permutations([old, left, right]):
        joined = settle(found, u(5000))
        assert (joined.epoch, joined.id, joined.parent) == (3, u(5000), right.id)
        assert joined.members == (A, B, C, D)
        assert joined.history == ((1, old.id), (2, left.id), (2, right.id))
    assert settle([left, joined], u(5001)) == joined


def test_one_id_with_two_contents_is_settled_too():
    """A rewritten copy under the same id is a conflict like any other, not a crash."""
    one, two = first(A), first(B)
    joined = settle([one, two], u(5000))
    assert joined.members == (A, B)
    assert joined.history == ((1, one.id),)


def test_pools_are_not_mixed():
    """Topologies of two pools cannot be settled, nor can none."""
    with pytest.raises(ValueError, match="different pools"):
        settle([first(), Topology.first(u(98), u(1), [A])], u(5000))
    with pytest.raises(ValueError, match="none found"):
        settle([], u(5000))


def broken(**changes: object) -> dict[str, object]:
    return {**first().changed([A, B], u(1001)).to_json(), **changes}


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (None, "topology is None, not an object"),
        ([], "not an object"),
        (broken(format=FORMAT + 1), "newer than"),
        (broken(format=0), "does not exist"),
        (broken(format="1"), "format is '1', not int"),
        (broken(format=True), "format is True, not int"),
        (broken(extra=1), "unknown key 'extra'"),
        (broken(pool_id="x"), "'x' is not a UUID"),
        (broken(pool_id=u(1).upper().replace("0", "A")), "is not a UUID"),
        (broken(id=None), "id is None, not str"),
        (broken(id="x" * 10_000), "is not a UUID"),
        (broken(parent=3), "parent is 3, not str"),
        (broken(epoch=0), "epoch 0 is not in"),
        (broken(epoch=-1), "epoch -1 is not in"),
        (broken(epoch=EPOCH_MAX + 1), "is not in"),
        (broken(epoch=1.0), "not int"),
        (broken(disks=[]), "0 disks"),
        (broken(disks={}), "disks is {}, not list"),
        (broken(disks=[3]), "disk is 3, not an object"),
        (broken(disks=[{"id": A.disk_id}]), "weight None is not a number"),
        (broken(disks=[{"id": A.disk_id, "weight": True}]), "is not a number"),
        (broken(disks=[{"id": A.disk_id, "weight": 0}]), "need > 0"),
        (broken(disks=[{"id": A.disk_id, "weight": -1}]), "need > 0"),
        (broken(disks=[{"id": A.disk_id, "weight": float("nan")}]), "need > 0"),
        (broken(disks=[{"id": A.disk_id, "weight": float("inf")}]), "need > 0"),
        (broken(disks=[{"id": A.disk_id, "weight": 10**400}]), "too large"),
        (broken(disks=[{"id": A.disk_id, "weight": 1, "x": 1}]), "unknown key 'x'"),
        (broken(disks=[{"id": A.disk_id, "weight": 1}] * 2), "listed twice"),
        (broken(disks=[{"id": u(n), "weight": 1} for n in range(5000)]), "5000 disks"),
        (broken(history=[{"epoch": 3, "id": u(1)}]), "not before this one"),
        (broken(history=[{"epoch": 1, "id": u(1)}] * 17), "at most 16"),
        (broken(history=[[1, u(1)]]), "not an object"),
        (broken(history=None), "history is None"),
    ],
)
def test_odd_files_are_refused(data, problem):
    """Whatever is odd in a topology file is one short line that says what."""
    with pytest.raises(ValueError, match="topology") as caught:
        Topology.from_json(data)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("key", list(first().to_json()))
def test_every_key_but_the_parent_is_needed(key):
    """A file without one of its keys is refused; only a first topology has no parent."""
    data = first().to_json()
    del data[key]
    if key == "parent":
        assert Topology.from_json(data) == first()
    else:
        with pytest.raises(ValueError, match=key):
            Topology.from_json(data)
