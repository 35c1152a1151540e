"""The configuration: what it means, where it came from, and each mistake in one line."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfuse.core.config import COMMAND_LINE, DEFAULT, Config, Resolved, parse
from kvfuse.core.errors import EXIT_USAGE, ConfigError
from kvfuse.core.placement import Policy
from kvfuse.core.routing import DEFAULT_PATTERNS, final_name
from kvfuse.core.settings import Reserve

DISKS = '[pool]\ndisks = ["/mnt/a", "/mnt/b"]\n'


def read(text: str | None = DISKS, environment=None, flags=None) -> Resolved:
    return parse(text, source="/etc/k.toml", environment=environment or {}, flags=flags or {})


def refused(text: str | None = DISKS, environment=None, flags=None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(text, environment, flags)
    assert caught.value.exit_code == EXIT_USAGE
    lines = str(caught.value).split("\n")
    for line in lines:
        assert line.isprintable()
        assert len(line) < 400
        assert line.count(": ") >= 1
    return lines


def refusal(text: str | None = DISKS, environment=None, flags=None) -> str:
    (line,) = refused(text, environment, flags)
    return line


def test_only_the_disks_are_needed():
    """With nothing but disks everything has its documented default."""
    config = read().config
    assert [disk.path for disk in config.pool.disks] == ["/mnt/a", "/mnt/b"]
    assert {(disk.weight, disk.mode) for disk in config.pool.disks} == {(1.0, "rw")}
    assert config.pool.mountpoint == ""
    assert config.pool.placement is Policy.RENDEZVOUS
    assert (config.pool.driver, config.pool.access) == ("auto", "posix")
    assert (config.pool.state_dir, config.pool.run_dir) == ("/var/lib/kvfuse", "/run/kvfuse")
    assert not config.pool.require_all_disks
    assert not config.pool.allow_shared_device
    assert config.space.reserve == Reserve(ratio=0.02)
    assert config.space.statfs == "evictable"
    assert (config.space.high_watermark, config.space.low_watermark) == (0.9, 0.8)
    assert (config.space.lease_ttl, config.space.temp_max_age) == (10.0, 3600.0)
    assert config.space.pin == ("config.json",)
    assert (config.space.eviction, config.space.stale_first) == ("lru", True)
    assert config.metadata_cache.negative_ttl_secs == 1
    assert config.health.op_timeout == 5
    assert (config.recovery.scan_files_per_s, config.recovery.check_after) == (0, 300.0)
    assert config.socket_path("p") == "/run/kvfuse/p/control.sock"


def test_every_key_is_read():
    """Each key of the reference, with a value that is not its default."""
    resolved = read(
        """
        [pool]
        mountpoint = "/kvcache/"
        disks = ["/mnt/a/../a"]
        """.replace("/../a", "")
        + """
        placement = "striped"
        driver = "pyfuse3"
        access = "owner"
        state_dir = "/s"
        run_dir = "/r"
        serve_displaced = false
        require_all_disks = true
        temp_dirs = ["tmp/", "/a/b", "c/d"]
        temp_patterns = ['(?P<final>.+)\\.part']
        allow_shared_device = true
        [space]
        reserve = "1.5G"
        statfs = "physical"
        high_watermark = "70%"
        low_watermark = "60.5%"
        lease_ttl = "2s"
        temp_max_age = "5m"
        pin = ["*.cfg", "a/b"]
        eviction = "s3fifo"
        stale_first = false
        [metadata_cache]
        negative_ttl_secs = 0
        [health]
        op_timeout = "250ms"
        [recovery]
        scan_files_per_s = 5000
        check_after = "10m"
        [control]
        socket = "/r/s.sock"
        """
    )
    config = resolved.config
    assert config.pool.mountpoint == "/kvcache"
    assert config.pool.placement is Policy.STRIPED
    assert not config.pool.serve_displaced
    assert config.pool.routing_dirs() == {b"tmp", b"/a/b", b"/c/d"}
    patterns = config.pool.routing_patterns()
    assert final_name(b"x.bin.part", patterns=patterns) == b"x.bin"
    assert config.space.reserve == Reserve(size_bytes=3 << 29)
    assert (config.space.high_watermark, config.space.low_watermark) == (0.7, 0.605)
    assert (config.space.lease_ttl, config.space.temp_max_age) == (2.0, 300.0)
    assert config.space.pin == ("*.cfg", "a/b")
    assert (config.space.eviction, config.space.stale_first) == ("s3fifo", False)
    assert config.metadata_cache.negative_ttl_secs == 0
    assert config.health.op_timeout == 0.25
    assert (config.recovery.scan_files_per_s, config.recovery.check_after) == (5000, 600.0)
    assert config.socket_path("p") == "/r/s.sock"
    assert {row.origin for row in resolved.rows()} == {"file /etc/k.toml"}


def test_no_added_patterns_are_the_default_ones():
    """Without temp_patterns the very tuple with the fast path is used."""
    assert read().config.pool.routing_patterns() is DEFAULT_PATTERNS


def test_disk_tables():
    """[[disk]] tables say weight and mode; strings and tables may be mixed in pool.disks."""
    tables = read('[[disk]]\npath = "/mnt/a"\nweight = 2\n[[disk]]\npath = "/mnt/b"\nmode = "ro"\n')
    assert [(d.path, d.weight, d.mode) for d in tables.config.pool.disks] == [
        ("/mnt/a", 2.0, "rw"),
        ("/mnt/b", 1.0, "ro"),
    ]
    mixed = read('[pool]\ndisks = ["/mnt/a", {path = "/mnt/b", weight = 0.5}]')
    assert [d.weight for d in mixed.config.pool.disks] == [1.0, 0.5]


def test_environment_over_file_and_command_line_over_both():
    """Each value tells where it came from, the strongest source wins."""
    resolved = read(
        DISKS + 'placement = "striped"\ndriver = "direct"\naccess = "owner"\n',
        {"KVFUSE_POOL_DRIVER": "pyfuse3", "KVFUSE_POOL_ACCESS": "posix"},
        {"pool.access": "owner", "pool.disks": ("/mnt/c",), "pool.placement": None},
    )
    pool = resolved.config.pool
    assert (pool.placement, pool.driver, pool.access) == ("striped", "pyfuse3", "owner")
    assert [disk.path for disk in pool.disks] == ["/mnt/c"]
    assert resolved.origins["pool.placement"] == "file /etc/k.toml"
    assert resolved.origins["pool.driver"] == "environment KVFUSE_POOL_DRIVER"
    assert resolved.origins["pool.access"] == COMMAND_LINE
    assert resolved.origins["pool.disks"] == COMMAND_LINE
    assert resolved.origins["space.reserve"] == DEFAULT


def test_no_file_is_needed():
    """Flags alone make a configuration."""
    resolved = read(None, flags={"pool.disks": ["/mnt/a"], "pool.require_all_disks": True})
    assert resolved.config.pool.require_all_disks


@pytest.mark.parametrize(
    ("variable", "text", "key", "value"),
    [
        ("KVFUSE_POOL_REQUIRE_ALL_DISKS", "true", "pool.require_all_disks", True),
        ("KVFUSE_POOL_REQUIRE_ALL_DISKS", "0", "pool.require_all_disks", False),
        ("KVFUSE_METADATA_CACHE_NEGATIVE_TTL_SECS", "2.5", "metadata_cache.negative_ttl_secs", 2.5),
        ("KVFUSE_SPACE_RESERVE", "64M", "space.reserve", "64M"),
        ("KVFUSE_SPACE_RESERVE", "1048576", "space.reserve", "1M"),
        ("KVFUSE_SPACE_RESERVE", "5%", "space.reserve", "5%"),
        ("KVFUSE_HEALTH_OP_TIMEOUT", "1m", "health.op_timeout", "1m"),
        ("KVFUSE_POOL_TEMP_DIRS", "tmp:a/b", "pool.temp_dirs", ["tmp", "/a/b"]),
        ("KVFUSE_POOL_TEMP_DIRS", '["x:y"]', "pool.temp_dirs", ["x:y"]),
        ("KVFUSE_POOL_TEMP_DIRS", "", "pool.temp_dirs", []),
        ("KVFUSE_POOL_TEMP_PATTERNS", "(?P<final>.+):p", "pool.temp_patterns", ["(?P<final>.+):p"]),
    ],
)
def test_environment_values(variable, text, key, value):
    """Text of the environment becomes what the key holds."""
    rows = {row.key: row for row in read(environment={variable: text}).rows()}
    assert rows[key].value == value
    assert rows[key].origin == f"environment {variable}"


def test_disks_of_the_environment():
    """Disks are directories joined by colons, or a TOML array."""
    for text in ("/x:/y", '["/x", {path = "/y"}]'):
        pool = read(environment={"KVFUSE_POOL_DISKS": text}).config.pool
        assert [disk.path for disk in pool.disks] == ["/x", "/y"]


def test_other_peoples_variables_are_left_alone():
    """Only variables of a known section are judged."""
    assert read(environment={"KVFUSE_TEST_DIR": "x", "KVFUSE": "1", "KVFUSE_POOL": "p", "A": "b"})


def test_handed_over_as_json():
    """Another process gets the same configuration and origins."""
    resolved = read(
        DISKS + 'temp_dirs = ["t"]\n[space]\nreserve = "7%"\n', {"KVFUSE_POOL_ACCESS": "owner"}
    )
    assert Resolved.from_json(json.loads(json.dumps(resolved.to_json()))) == resolved
    assert Config.model_validate_json(resolved.config.model_dump_json()) == resolved.config


def test_rows_can_be_written_as_a_file():
    """What `config show` prints is what one may write."""
    rows = {row.key: row.value for row in read().rows()}
    assert rows["space.reserve"] == "2%"
    assert rows["health.op_timeout"] == "5s"
    assert rows["pool.disks"][0] == {"path": "/mnt/a", "weight": 1.0, "mode": "rw"}
    assert next(iter(rows)) == "pool.mountpoint"
    assert len(rows) == 26


F = "/etc/k.toml: "
CACHE = F + "metadata_cache.negative_ttl_secs: "
BAD = [
    (None, F + "pool.disks: none given; name at least one disk directory"),
    ("", F + "pool.disks: none given; name at least one disk directory"),
    ("[pool]\ndisks = []", F + "pool.disks: none given; name at least one disk directory"),
    ("[pool]\nx = \n", "/etc/k.toml:2: Invalid value; mend the TOML there"),
    ("[pool", "/etc/k.toml:1: Expected ']' at the end of a table declaration; mend the TOML there"),
    ("a = " + "[" * 100_000, "/etc/k.toml: nested too deeply; write plain tables and lists"),
    (DISKS + "drvier = 1", F + "pool.drvier: unknown key; did you mean driver?"),
    (DISKS + 'reserve = "1%"', F + "pool.reserve: unknown key; it belongs to [space]"),
    (DISKS + "zzzzzzzz = 1", F + "pool.zzzzzzzz: unknown key; known are mountpoint, disks, "),
    (DISKS + '"a\\u0007b" = 1', F + "pool.'a\\x07b': unknown key; "),
    (DISKS + "[spce]", F + "spce: unknown section; did you mean space?"),
    ("driver = 1\n" + DISKS, F + "driver: unknown section; it is a key of [pool]"),
    ("space = 3\n" + DISKS, F + "space: 3 is no table; write [space] and its keys below it"),
    ("disk = 3", F + "disk: 3 is no disk; write [[disk]]"),
    (DISKS + "[[disk]]\npath='/c'", F + "disk: disks are in pool.disks already; use one"),
    ("[[disk]]\nweight=1", F + "disk[0].path: is missing; write it"),
    ("[[disk]]\npath='/a'\nwieght=1", F + "disk[0].wieght: unknown key; did you mean weight?"),
    ("[[disk]]\npath='/a'\nweight=0", F + "disk[0].weight: 0 is out of range; write 0.001 to 1000"),
    ("[[disk]]\npath='/a'\nweight=-1.5", F + "disk[0].weight: -1.5 is out of range; "),
    ("[[disk]]\npath='/a'\nweight=nan", F + "disk[0].weight: nan is out of range; "),
    ("[[disk]]\npath='/a'\nweight=inf", F + "disk[0].weight: inf is out of range; "),
    ("[[disk]]\npath='/a'\nweight=true", F + "disk[0].weight: true is no number; write one"),
    ("[[disk]]\npath='/a'\nweight='1'", F + "disk[0].weight: '1' is no number; write one"),
    ("[[disk]]\npath='/a'\nmode='rx'", F + "disk[0].mode: 'rx' is unknown; write rw or ro"),
    ("[pool]\ndisks='/a'", F + "pool.disks: '/a' is no list; write "),
    ("[pool]\ndisks=[3]", F + "pool.disks[0]: 3 is no disk; write its directory"),
    ("[pool]\ndisks=['a']", F + "pool.disks[0]: 'a' is not absolute; write it from /"),
    ("[pool]\ndisks=['']", F + "pool.disks[0]: path is empty; write one from /"),
    ("[pool]\ndisks=['/a/../b']", F + "pool.disks[0]: '/a/../b' holds '..'; write "),
    ('[pool]\ndisks=["/a\\u0000"]', F + "pool.disks[0]: '/a\\x00' holds a control character; "),
    ('[pool]\ndisks=["/a\\n"]', F + "pool.disks[0]: '/a\\n' holds a control character; "),
    (f"[pool]\ndisks=['/{'a' * 4095}']", F + "pool.disks[0]: path of over 4095 bytes; "),
    ("[pool]\ndisks=['/']", F + "pool.disks: '/' cannot be a disk; "),
    ("[pool]\ndisks=['/a','/b','/a/']", F + "pool.disks: /a is listed 2 times; keep one"),
    ("[pool]\ndisks=['/a/b','/a','/a-b']", F + "pool.disks: /a/b is inside /a; disks must"),
    (f"[pool]\ndisks={['/a'] * 257}", F + "pool.disks: 257 entries; write at most 256"),
    (DISKS + "mountpoint='/'", F + "pool.mountpoint: '/' cannot be mounted over; "),
    (DISKS + "mountpoint='/mnt/a'", F + "pool.mountpoint: /mnt/a is a disk of the pool; "),
    (DISKS + "mountpoint='/mnt/a/m'", F + "pool.mountpoint: /mnt/a/m is inside disk /mnt/a; "),
    ("[pool]\ndisks=['/m/a']\nmountpoint='/m'", F + "pool.mountpoint: disk /m/a is inside /m; "),
    (DISKS + "mountpoint='m'", F + "pool.mountpoint: 'm' is not absolute; "),
    (DISKS + "mountpoint=3", F + "pool.mountpoint: 3 is no text; write it in quotes"),
    (DISKS + "state_dir='/mnt/a/s'", F + "pool.state_dir: /mnt/a/s is on disk /mnt/a; "),
    (DISKS + "mountpoint='/run'", F + "pool.run_dir: /run/kvfuse is below the mountpoint; "),
    (DISKS + "[control]\nsocket='/mnt/b/s'", F + "control.socket: /mnt/b/s is on disk /mnt/b; "),
    (DISKS + "state_dir=''", F + "pool.state_dir: path is empty; "),
    (DISKS + "placement='indx'", F + "pool.placement: 'indx' is unknown; write "),
    (DISKS + "placement=[]", F + "pool.placement: [] is unknown; write rendezvous, index or "),
    (
        DISKS + "placement='index'\nserve_displaced=false",
        F + "pool.serve_displaced: false, but placement index has no owners; write true",
    ),
    (DISKS + "serve_displaced=0", F + "pool.serve_displaced: 0 is neither true nor false; "),
    (DISKS + "driver='x'", F + "pool.driver: 'x' is unknown; write auto, direct or pyfuse3"),
    (DISKS + "require_all_disks=1", F + "pool.require_all_disks: 1 is neither true nor false; "),
    (DISKS + "temp_dirs=['..']", F + "pool.temp_dirs[0]: '..' names no directory; "),
    (DISKS + "temp_dirs=['/']", F + "pool.temp_dirs[0]: '/' names no directory; "),
    (DISKS + "temp_dirs=[1]", F + "pool.temp_dirs[0]: 1 is no text; write it in quotes"),
    (DISKS + "temp_patterns=['(']", F + "pool.temp_patterns[0]: not a regular expression: "),
    (DISKS + "temp_patterns=['a']", F + "pool.temp_patterns[0]: no group (?P<final>…) "),
    (DISKS + "[space]\nreserve='100%'", F + "space.reserve: '100%' leaves no room; "),
    (DISKS + "[space]\nreserve=-1", F + "space.reserve: -1 is out of range; "),
    (DISKS + "[space]\nreserve=0.5", F + "space.reserve: 0.5 is no size; "),
    (DISKS + "[space]\nreserve=1979-05-27", F + "space.reserve: datetime.date(1979, 5, 27) is no "),
    (DISKS + "[metadata_cache]\nnegative_ttl_secs=-1", CACHE + "-1 is out of range; write 0 to "),
    (DISKS + "[metadata_cache]\nnegative_ttl_secs=nan", CACHE + "nan is out of range; "),
    (DISKS + "[health]\nop_timeout=5", F + "health.op_timeout: 5 is no duration; write "),
    (
        DISKS + "[recovery]\nscan_files_per_s=-1",
        F + "recovery.scan_files_per_s: -1 is out of range; write 0 to ",
    ),
    (DISKS + "[recovery]\ncheck_after='2y'", F + "recovery.check_after: '2y' is no duration; "),
    (DISKS + "[health]\nop_timeout='0s'", F + "health.op_timeout: 0s is out of range; "),
    (DISKS + "[health]\nop_timeout='2h'", F + "health.op_timeout: 2h is out of range; write "),
]  # fmt: skip


@pytest.mark.parametrize(("text", "line"), BAD, ids=[line[11:60] for _, line in BAD])
def test_each_mistake_is_one_line(text, line):
    """One mistake, one line: where, which key, what is wrong, what to do."""
    got = refusal(text)
    assert got.startswith(line)
    assert re.search(r"; \w|did you mean", got)


@pytest.mark.parametrize(
    ("variable", "text", "problem"),
    [
        ("POOL_DISK", "/a", "unknown; did you mean KVFUSE_POOL_DISKS?"),
        ("POOL_DRIVER", "\udcff", "pool.driver: '\\udcff' is not UTF-8; "),
        ("POOL_MOUNTPOINT", "/\udcff", "pool.mountpoint: '/\\udcff' is not UTF-8; "),
        ("POOL_REQUIRE_ALL_DISKS", "x", "pool.require_all_disks: 'x' is neither true nor "),
        ("METADATA_CACHE_NEGATIVE_TTL_SECS", "x", "metadata_cache.negative_ttl_secs: 'x' is no "),
        ("POOL_DISKS", "[1", "pool.disks: '[1' is no list; "),
        ("POOL_DISKS", "a:/b", "pool.disks[0]: 'a' is not absolute; "),
    ],
)
def test_mistakes_of_the_environment_name_the_variable(variable, text, problem):
    """A mistake in the environment says which variable made it."""
    line = refusal(environment={f"KVFUSE_{variable}": text})
    assert line.startswith(f"environment KVFUSE_{variable}: {problem}")


def test_odd_names_of_variables_are_escaped():
    """A control character in a variable's name does not reach the terminal."""
    line = refusal(environment={"KVFUSE_POOL_\n": ""})
    assert line.startswith("environment 'KVFUSE_POOL_\\n': unknown; ")


@pytest.mark.parametrize(
    ("flag", "value", "problem"),
    [
        ("pool.disks", ["a"], "pool.disks[0]: 'a' is not absolute; "),
        ("pool.placment", "x", "pool.placment: unknown key; did you mean placement?"),
        ("pol.placement", "x", "'pol.placement': unknown section; did you mean pool?"),
        ("pool.mountpoint", "/mnt/a", "pool.mountpoint: /mnt/a is a disk of the pool; "),
    ],
)
def test_mistakes_of_the_command_line_say_so(flag, value, problem):
    """A mistake on the command line is told from one in the file."""
    assert refusal(flags={flag: value}).startswith(f"command line: {problem}")


def test_all_mistakes_at_once():
    """Mistakes of all sources and sections come in one go, conflicts included."""
    lines = refused(
        "[pool]\ndisks = ['/a', '/a']\n[space]\nreserve = 'x'\n[health]\nop_timout = '1s'\n",
        {"KVFUSE_SPACE_STATFS": "y"},
        {"control.socket": "s"},
    )
    assert len(lines) == 4
    lines = refused("[pool]\ndisks = ['/a', '/a']\n[space]\nreserve = 'x'\nstatfs = 1\n")
    assert [line.split(": ")[1] for line in lines] == [
        "space.reserve",
        "space.statfs",
        "pool.disks",
    ]


def test_unreadable_file_is_not_blamed_for_missing_disks():
    """A syntax error hides the disks of the file, so only the error is reported."""
    assert len(refused("[pool]\ndisks = [")) == 1


def test_reserve_in_bytes():
    """A ratio is rounded up, and no reserve is larger than its disk."""
    assert Reserve(ratio=0.02).of(101) == 3
    assert Reserve(size_bytes=50).of(1000) == 50
    assert Reserve(size_bytes=5000).of(1000) == 1000


def complaints(text: str, flags: dict[str, object]) -> list[str]:
    try:
        read(text, flags=flags)
    except ConfigError as exc:
        return str(exc).split("\n")
    return []


@given(st.text(max_size=60))
def test_no_text_breaks_the_reader(text):
    """Whatever a file holds, the answer is a configuration or readable lines."""
    assert all(line.isprintable() for line in complaints(text, {}))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
        ),
        max_leaves=6,
    ),
    st.sampled_from([row.key for row in read().rows()]),
)
def test_no_value_breaks_the_reader(value, key):
    """Whatever a value is, the answer is a configuration or readable lines."""
    assert all(line.isprintable() for line in complaints(DISKS, {key: value}))


@pytest.mark.parametrize("text", ["/x:", ":/x", "/x::/y", '[""]'])
def test_an_empty_path_among_the_disks_is_refused(text):
    """It is not passed over: a variable of a script may never have been set."""
    with pytest.raises(ConfigError, match="empty"):
        read(environment={"KVFUSE_POOL_DISKS": text})
