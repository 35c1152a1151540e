"""Every step of every verb fails once: the verb did it or not, and nothing is left half done."""

import errno

import pytest

from kvfuse.pool.check import Kind
from tests.shell.faults import error, make_faulty
from tests.shell.pools import Box, Tree, boxed, tree
from tests.shell.verbs import VERBS, Verb

STEPS_MAX = 60


def run(box: Box, verb: Verb, at: int, code: int, **how: bool) -> bool:
    """Run *verb* with a fault at step *at* in a fresh pool; False when it has no such step."""
    pool = box.open(upkeep=False)
    arguments = verb.prepare(pool)
    box.check()
    before = tree(pool)
    faults = make_faulty(pool)
    faults.arm(at, error(code), **how)
    failure: OSError | None = None
    try:
        verb.act(pool, *arguments)
    except OSError as exc:
        failure = exc
    hit, names = faults.hit, faults.names
    faults.disarm()
    said = f"{verb.name}: step {at} of {names}, {errno.errorcode[code]} {how}: {failure!r}"
    if not hit:
        assert failure is None, said
        return False
    seen = None if how.get("always") else tree(pool)
    pool = box.reopen(upkeep=False)
    judge(verb, said, before, seen, tree(pool), succeeded=failure is None)
    # A mode that was set on the disk, and not recorded: clients see the record's.
    box.check(allowed=(Kind.OWNER,) if failure and verb.name == "chmod" else ())
    return True


def judge(
    verb: Verb, said: str, before: Tree, seen: Tree | None, after: Tree, *, succeeded: bool
) -> None:
    wanted = AFTER[verb.name]
    allowed = [wanted] if succeeded else [before, wanted]
    if verb.torn and not succeeded:
        return
    if seen is not None:
        assert seen in allowed, (
            f"{said}: between, before the restart: {differ(seen, before, wanted)}"
        )
    assert after in allowed, f"{said}: between: {differ(after, before, wanted)}"


def differ(found: Tree, before: Tree, wanted: Tree) -> str:
    def delta(other: Tree) -> dict[str, object]:
        keys = found.keys() | other.keys()
        gone = "absent"
        return {
            k: (found.get(k, gone), other.get(k, gone))
            for k in keys
            if found.get(k, gone) != other.get(k, gone)
        }

    return f"from before {delta(before)}, from after {delta(wanted)}"


AFTER: dict[str, Tree] = {}


def learn(verb: Verb) -> None:
    """Note what the verb does when nothing fails."""
    with boxed() as box:
        pool = box.open(upkeep=False)
        arguments = verb.prepare(pool)
        verb.act(pool, *arguments)
        AFTER[verb.name] = tree(pool)
        box.check()
        pool = box.reopen()
        assert tree(pool) == AFTER[verb.name]
        box.check()


HOW = {
    "early EIO": (errno.EIO, {}),
    "late EIO": (errno.EIO, {"late": True}),
    "ENOSPC": (errno.ENOSPC, {}),
    "EROFS": (errno.EROFS, {}),
    "question EIO": (errno.EIO, {"questions": True}),
    "dead": (errno.EIO, {"always": True, "questions": True}),
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name.replace(" ", "-"))
def test_verb_survives_a_fault_at_every_step(verb, how):
    """Whatever step fails: before or after, never between; after a restart the same, and clean."""
    if verb.name not in AFTER:
        learn(verb)
    code, options = HOW[how]
    for at in range(1, STEPS_MAX):
        with boxed() as box:
            if not run(box, verb, at, code, **options):
                assert at > 1, "no step was seen"
                return
    raise AssertionError("more steps than expected")
