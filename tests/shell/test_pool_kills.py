"""The daemon dies before every step of every verb; the next one finds each file absent or whole.

Death before step k+1 is death after step k, so each step is tried from both sides.
"""

from collections import Counter

import pytest

from kvfuse.pool.check import Kind
from tests.shell.deaths import die_at
from tests.shell.pools import Tree, boxed, files, tree
from tests.shell.verbs import VERBS, Verb

STEPS_MAX = 60
IN_TIME, TOO_LATE = "killed", "done"
BEFORE: dict[str, Tree] = {}
AFTER: dict[str, Tree] = {}


def learn(verb: Verb) -> None:
    """Note what is there before the verb and after it."""
    with boxed() as box:
        pool = box.open(upkeep=False)
        arguments = verb.prepare(pool)
        BEFORE[verb.name] = tree(pool)
        verb.act(pool, *arguments)
        AFTER[verb.name] = tree(pool)


def sweep(verb: Verb, judge, *, lose_catalog: bool) -> None:
    if verb.name not in AFTER:
        learn(verb)
    for at in range(1, STEPS_MAX):
        with boxed() as box:
            end = IN_TIME if die_at(box, verb.name, at) else TOO_LATE
            if lose_catalog:
                box.lose_catalog()
            pool = box.open(upkeep=False)
            judge(verb, f"{verb.name}: step {at}, {end}", tree(pool), end)
            # A mode that was set on the disk, and not recorded: clients see the record's.
            allowed = [Kind.OWNER] if verb.name == "chmod" and end == IN_TIME else []
            if lose_catalog:
                allowed.append(Kind.FOREIGN)  # an empty file that had no label yet
            box.check(allowed=tuple(allowed))
            first = tree(pool)
            pool = box.reopen(upkeep=False)
            assert tree(pool) == first, "a second restart changed something"
            box.check(allowed=tuple(allowed))
        if end == TOO_LATE:
            assert at > 1, "no step was seen"
            return
    raise AssertionError("more steps than expected")


def judge_kept(verb: Verb, said: str, found: Tree, end: str) -> None:
    """Before or after; after when it was answered; what was being written may be gone."""
    wanted = [AFTER[verb.name]] if end == TOO_LATE else [BEFORE[verb.name], AFTER[verb.name]]
    if verb.torn and end == IN_TIME:
        written = {
            path
            for path in BEFORE[verb.name].keys() | AFTER[verb.name].keys()
            if BEFORE[verb.name].get(path) != AFTER[verb.name].get(path)
        }
        found = {path: content for path, content in found.items() if path not in written}
        wanted = [{p: c for p, c in one.items() if p not in written} for one in wanted]
    assert found in wanted, f"{said}: {found}"


def judge_rebuilt(verb: Verb, said: str, found: Tree, end: str) -> None:
    """No file half there, none that was removed, none lost but as said at the verb."""
    before, after, now = (files(one) for one in (BEFORE[verb.name], AFTER[verb.name], found))
    for path, content in now.items():
        assert content in (before.get(path), after.get(path)), f"{said}: {path}: {content!r}"
    if verb.scattered:
        # Directories are renamed disk by disk: no content is lost, nor there twice.
        assert Counter(now.values()) == Counter(after.values()), f"{said}: {now}"
    elif verb.lossy:
        assert list(now.values()).count(b"bystander") == 2, f"{said}: {now}"
    elif verb.torn:
        changed = {p for p in before.keys() | after.keys() if before.get(p) != after.get(p)}
        assert {p: c for p, c in now.items() if p not in changed} == {
            p: c for p, c in after.items() if p not in changed
        }, f"{said}: {now}"
    else:
        wanted = [after] if end == TOO_LATE else [before, after]
        assert now in wanted, f"{said}: {now}"


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name.replace(" ", "-"))
def test_verb_survives_death_at_every_step(verb):
    """The next daemon finds the tree as before or as after, and catalog and disks agree."""
    sweep(verb, judge_kept, lose_catalog=False)


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name.replace(" ", "-"))
def test_verb_survives_death_and_the_loss_of_the_catalog(verb):
    """The scan finds every file whole, and none that was removed before."""
    sweep(verb, judge_rebuilt, lose_catalog=True)
