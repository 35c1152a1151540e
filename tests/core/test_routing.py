"""Routing names: a temporary name and its final name have one owner."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfuse.core.routing import (
    PATTERN_CHARS_MAX,
    final_name,
    is_temp,
    routing_name,
    temp_pattern,
    with_patterns,
)

HEX32 = b"0123456789abcdef0123456789abcdef"
UUID = b"01234567-89ab-cdef-0123-456789abcdef"
LMCACHE = b"meta-llama-SEP-Llama-3.1-8B-Instruct@0x01000100@0@b18efa847f7a3fa4"
HICACHE = b"b18efa84_meta-llama-Llama-3.1-8B-Instruct_0_1"

# temp, final, who
PAIRS = [
    (b"m_r0/b18/ef_g0/b18e.bin_4294967295.tmp", b"m_r0/b18/ef_g0/b18e.bin", "llm-d"),
    (b"m_r0/b18/ef_g0/b18e.bin_9223372036854775807.tmp", b"m_r0/b18/ef_g0/b18e.bin", "vLLM"),
    (LMCACHE + b".tmp", LMCACHE + b".data", "LMCache fs"),
    (b"d/" + LMCACHE + b"@k%v.tmp", b"d/" + LMCACHE + b"@k%v.data", "LMCache with tags"),
    (LMCACHE + b".data.tmp." + HEX32, LMCACHE + b".data", "LMCache nixl"),
    (b"01/22/k.kvcache.safetensors.tmp0a1b2c3d", b"01/22/k.kvcache.safetensors", "LMCache GDS"),
    (
        b"01/22/k.kvcache.safetensors.metadata.tmp0a1b2c3d",
        b"01/22/k.kvcache.safetensors.metadata",
        "LMCache GDS twin",
    ),
    (HICACHE + b".bin.tmp.123.140000000000000." + UUID, HICACHE + b".bin", "older SGLang"),
    (HICACHE + b".bin.tmp.123.456." + HEX32, HICACHE + b".bin", "older SGLang, hex"),
    (HICACHE + b".tmp.1.2." + UUID, HICACHE, "no extension"),
    (LMCACHE + b".data." + HEX32 + b".tmp", LMCACHE + b".data", "LMCache proposed"),
    (b"new\nline.bin_1.tmp", b"new\nline.bin", "a newline"),
    (b"\xff.bin_1.tmp", b"\xff.bin", "not UTF-8"),
]


@pytest.mark.parametrize(("temp", "final"), [pair[:2] for pair in PAIRS], ids=[p[2] for p in PAIRS])
def test_temp_and_final_route_alike(temp, final):
    """Each derivable form of the contract has the routing name of its final name."""
    assert routing_name(temp) == routing_name(final)
    assert is_temp(temp.rpartition(b"/")[2])
    assert not is_temp(final.rpartition(b"/")[2])
    assert routing_name(final).rpartition(b"/")[0] == final.rpartition(b"/")[0]


@pytest.mark.parametrize(("temp", "final"), [pair[:2] for pair in PAIRS], ids=[p[2] for p in PAIRS])
def test_final_name_is_told(temp, final):
    """The final basename is known, but for <stem>.tmp, which tells the stem only."""
    temp, final = temp.rpartition(b"/")[2], final.rpartition(b"/")[2]
    known = final.removesuffix(b".data") if temp == final[:-5] + b".tmp" else final
    assert final_name(temp) == known


@pytest.mark.parametrize("name", [b"." + HEX32 + b".tmp", b".tmpAb3dE9", b".tmp000000"])
def test_unknowable_temps_route_by_themselves(name):
    """A temp name that says nothing is known as one, and is routed unchanged."""
    assert is_temp(name)
    assert final_name(name) is None
    assert routing_name(b"d/" + name) == b"d/" + name


@pytest.mark.parametrize(
    ("key", "routing"),
    [
        (b"a.bin", b"a"),
        (b"a.tar.gz", b"a"),
        (b"a.b/c", b"a.b/c"),
        (HICACHE, HICACHE),
        (b".bashrc", b".bashrc"),
        (b"d/.hidden.bin", b"d/.hidden"),
        (b"a.0bin", b"a.0bin"),
        (b"a.", b"a."),
        (b"a." + b"x" * 16, b"a"),
        (b"a." + b"x" * 17, b"a." + b"x" * 17),
        (b"a.bin\n", b"a.bin\n"),
        (b"\n.bin", b"\n"),
        (b"0000000000001.bucket", b"0000000000001"),
        (b"config.json", b"config"),
    ],
)
def test_extensions_are_removed(key, routing):
    """A dot starts an extension only before a letter, and never at the start of a name."""
    assert routing_name(key) == routing
    assert not is_temp(key.rpartition(b"/")[2])


@pytest.mark.parametrize(
    ("name", "final"),
    [
        (b"stem_123.tmp", b"stem_123"),  # no extension before the number: it belongs to the stem
        (b"m-3.1-8B_0_1.tmp", b"m-3.1-8B_0_1"),
        (b"a.bin_12345678901234567890.tmp", b"a.bin_12345678901234567890"),
        (b".o_direct_probe_5.tmp", b".o_direct_probe_5"),
        (b"config.json.tmp", b"config.json"),
        (b".tmp.tmp", b".tmp"),
    ],
)
def test_other_tmp_names_are_stems(name, final):
    """What ends in .tmp in no other form is <stem>.tmp: a file called so shares its disk."""
    assert final_name(name) == final
    assert routing_name(name) == routing_name(final)


@pytest.mark.parametrize("stem", [b"a", b"x.bin", LMCACHE, LMCACHE + b"@v1.beta", b"m-3.1-8B_0_1"])
def test_stem_tmp_meets_whatever_extension_the_final_name_adds(stem):
    """<stem>.tmp becomes <stem>.data or <stem>: both are where the temp is."""
    assert routing_name(stem + b".tmp") == routing_name(stem + b".data") == routing_name(stem)


def test_twins_share_a_disk():
    """A file and what is written beside it under a longer name have one owner."""
    assert routing_name(b"d/k.kvcache.safetensors") == routing_name(
        b"d/k.kvcache.safetensors.metadata"
    )
    assert routing_name(b"1700000000000.bucket") == routing_name(b"1700000000000.meta")


@pytest.mark.parametrize(
    "name", [b".tmp", b"tmp", b"a.tmpx", b"a.tmp1234567", b".tmpab", b"a.TMP", b"a.tmp.zz"]
)
def test_lookalikes_are_no_temps(name):
    """A name in no temporary form is a final name, whatever it holds."""
    assert not is_temp(name)
    assert final_name(name) is None


@pytest.mark.parametrize(
    ("temp_dirs", "key", "routing"),
    [
        ({b"tmp"}, b"tmp/x.data", b"x"),
        ({b"tmp"}, b"a/b/tmp/x.data", b"a/b/x"),
        ({b"tmp"}, b"tmp/tmp/x.data", b"tmp/x"),
        ({b"tmp"}, b"tmp", b"tmp"),
        ({b"tmp"}, b"tmp/a/x.data", b"tmp/a/x"),
        ({b"tmp"}, b"tmpx/x.data", b"tmpx/x"),
        ({b"/tmp"}, b"tmp/x.data", b"x"),
        ({b"/tmp"}, b"a/tmp/x.data", b"a/tmp/x"),
        ({b"/a/tmp"}, b"a/tmp/x.data", b"a/x"),
        ({b"a/tmp"}, b"a/tmp/x.data", b"a/x"),
        ({b"a/tmp"}, b"b/a/tmp/x.data", b"b/a/tmp/x"),
        ({b"tmp"}, b"tmp/x.bin_1.tmp", b"x"),
    ],
)
def test_files_of_temp_dirs_route_to_the_parent(temp_dirs, key, routing):
    """A file in a listed directory has the owner of ../<same name>, others are left alone."""
    assert routing_name(key, temp_dirs=frozenset(temp_dirs)) == routing


def test_operators_pattern_comes_first():
    """An added pattern is tried before <stem>.tmp, needs no .tmp in it, and loses its extension."""
    patterns = with_patterns([temp_pattern(r"(?P<final>.+)\.(part|v2\.tmp)")])
    assert final_name(b"a.bin.part", patterns=patterns) == b"a.bin"
    assert routing_name(b"d/a.bin.part", patterns=patterns) == b"d/a"
    assert routing_name(b"d/a.bin.v2.tmp", patterns=patterns) == b"d/a"
    assert routing_name(b"d/a.bin_1.tmp", patterns=patterns) == b"d/a"
    assert not is_temp(b"a.bin.part")


def test_operators_group_that_matches_nothing_is_no_match():
    """An empty final name names no file, so the pattern is passed over."""
    patterns = with_patterns([temp_pattern(r"(?P<final>.*)\.part|x(\.tmp)?")])
    assert not is_temp(b".part", patterns=patterns)
    assert final_name(b"x.tmp", patterns=patterns) == b"x"


@pytest.mark.parametrize(
    ("regex", "problem"),
    [
        ("(", "not a regular expression"),
        (".+", "no group"),
        ("(?P<last>.+)", "no group"),
        ("x" * (PATTERN_CHARS_MAX + 1), "at most"),
        ("(?P<final>a{99999999999999})", "not a regular expression"),
    ],
)
def test_bad_patterns_are_refused(regex, problem):
    """A pattern that cannot work says why."""
    with pytest.raises(ValueError, match=re.escape(problem)):
        temp_pattern(regex)


NAMES = st.binary(min_size=1, max_size=255).filter(lambda b: b"/" not in b and b"\0" not in b)


@given(NAMES)
def test_every_name_has_a_routing_name(name):
    """No name routes to nothing, and the directory part is kept."""
    routing = routing_name(b"d/" + name)
    assert routing.startswith(b"d/")
    assert len(routing) > 2


@given(NAMES.map(lambda b: b[:200]), st.integers(0, 2**63 - 1))
def test_any_name_with_an_extension_survives_a_numbered_temp(stem, number):
    """<any stem>.bin_<u63>.tmp goes where <any stem>.bin goes, unless that is a temp itself."""
    final = stem + b".bin"
    if not is_temp(final):
        assert routing_name(final + b"_%d.tmp" % number) == routing_name(final)
