"""The table in docs/formats.md is what the formats write."""

from formats_table import PAGE, page


def test_the_table_of_formats_is_fresh():
    assert PAGE.read_text() == page(), "make formats-table"
