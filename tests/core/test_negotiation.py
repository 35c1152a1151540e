"""What a connection begins with depends on the kernel and on what is wanted."""

import pytest

from kvfuse.drivers.direct import abi
from kvfuse.drivers.direct.negotiation import Agreement, agree
from kvfuse.drivers.direct.protocol import Init

EVERYTHING = (1 << 64) - 1


def agreed(
    flags: int = EVERYTHING, minor: int = abi.KERNEL_MINOR, **wishes: object
) -> tuple[Init, Agreement]:
    init = Init(abi.KERNEL_MAJOR, minor, 131072, flags)
    wishes = {"passthrough": True, "stack_depth": 1, **wishes}
    return init, agree(init, **wishes)


def test_nothing_is_agreed_on_that_the_kernel_does_not_offer():
    """The reply's flags are a subset of what INIT said."""
    for bit in range(64):
        _, agreement = agreed(flags=1 << bit)

        assert agreement.flags & ~(1 << bit) == 0


def test_what_would_switch_passthrough_off_is_never_asked_for():
    """No writeback cache, and no ACLs, which imply that the kernel checks permissions."""
    _, agreement = agreed()

    assert not agreement.flags & abi.WRITEBACK_CACHE
    assert not agreement.flags & 1 << 20


@pytest.mark.parametrize("depth", [1, 2])
def test_passthrough_is_asked_for_with_a_stack_depth(depth: int):
    """Without a depth of 1 or 2 the kernel ignores the flag."""
    init, agreement = agreed(stack_depth=depth)
    reply = agreement.reply(init)

    assert agreement.passthrough
    assert reply.flags & abi.PASSTHROUGH
    assert reply.stack_depth == depth


@pytest.mark.parametrize(
    ("init", "wishes", "says"),
    [
        ({"flags": EVERYTHING & ~abi.PASSTHROUGH}, {}, "Linux 6.9"),
        ({"minor": 39}, {}, "Linux 6.9"),
        ({}, {"minor_max": 39}, "Linux 6.9"),
        ({}, {"passthrough": False}, "switched off"),
    ],
)
def test_without_passthrough_the_agreement_says_why(init: dict, wishes: dict, says: str):
    """The kernel has none, or nobody wants it: then neither flag nor depth is sent."""
    first, agreement = agreed(**init, **wishes)
    reply = agreement.reply(first)

    assert agreement.obstacle is not None
    assert says in agreement.obstacle
    assert not reply.flags & abi.PASSTHROUGH
    assert reply.stack_depth == 0


@pytest.mark.parametrize(
    ("minor", "mediates_writers", "has_epoch"),
    [(40, True, False), (41, False, False), (43, False, False), (44, False, True)],
)
def test_the_minor_decides_what_the_kernel_gets_right(
    minor: int, mediates_writers: bool, has_epoch: bool
):
    """Linux 6.9 to 6.11 lose the size of a file that grows past them; 6.16 has an epoch."""
    _, agreement = agreed(minor=minor)

    assert agreement.mediates_writers == mediates_writers
    assert agreement.has_epoch == has_epoch


def test_a_newer_kernel_is_spoken_to_in_the_newest_minor_known():
    """It then behaves as the kernel of that minor did."""
    init, agreement = agreed(minor=99)

    assert agreement.reply(init).minor == abi.KERNEL_MINOR


def test_requests_are_a_mebibyte_and_many_may_be_under_way():
    """The largest that the kernel sends without being told more, and far more than its twelve."""
    init, agreement = agreed()
    reply = agreement.reply(init)

    assert reply.max_write_bytes == reply.max_pages * 4096 == 1 << 20
    assert reply.max_background == 256
    assert reply.max_readahead_bytes == init.max_readahead_bytes
