"""The bench of placements: what it measures is so, and its table says it."""

from pathlib import Path

import pytest

from kvfuse.bench.placement import MEASURES, VARIANTS, Trial, table

FILES = 240


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, list[dict[str, float]]]:
    """One round of every placement."""
    results = {}
    for variant in VARIANTS:
        trial = Trial(Path(tmp_path_factory.mktemp("bench")), variant, FILES)
        try:
            trial.make_disks()
            results[variant.name] = [trial.run()]
        finally:
            trial.end()
    return results


def test_restarts_cost_no_miss(found):
    """Under no placement does a restart lose a file, with or without the catalog."""
    for (values,) in found.values():
        assert values["restart_misses"] == values["lost_misses"] == values["back_misses"] == 0


def test_changes_cost_what_each_placement_says(found):
    """Nearly all with the baseline, a ninth when strict, nothing otherwise."""
    missed = {name: values["added_misses"] for name, (values,) in found.items()}
    assert missed["striped, strict"] == pytest.approx(8 / 9, abs=0.09)
    assert missed["rendezvous, strict"] == pytest.approx(1 / 9, abs=0.09)
    assert missed["rendezvous"] == missed["index"] == 0
    for name, (values,) in found.items():
        if name != "striped, strict":
            assert values["removed_misses"] == values["removed_own"] > 0


def test_table_has_every_measure(found):
    """A row for each measure, a column for each placement; what was not measured is a dash."""
    rows = table(found)
    assert [row[0] for row in rows] == [measure.title for measure in MEASURES]
    assert all(len(row) == 1 + len(VARIANTS) and all(row) for row in rows)
    assert rows[-1][4] == "-"


def test_spread_is_shown_where_rounds_differ():
    """Medians, and lowest and highest where they are not the same."""
    rounds = [{"added_misses": value} for value in (0.1, 0.3, 0.2)]
    row = next(row for row in table({"x": rounds}) if row[0] == "disk added: misses")
    assert row[1] == "20.0 % (10.0 % to 30.0 %)"
