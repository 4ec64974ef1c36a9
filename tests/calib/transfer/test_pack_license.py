"""The license in a pack's card is the one in the head of the model's card, or none."""

import pytest

from calib.transfer.pack import license_of

TAGS = "---\ntags: [x]\n---\n"


@pytest.mark.parametrize(
    ("card", "license"),
    [
        ("---\nlicense: mit\n---\n# A model\n", "mit"),
        ("---\nlicense: 'apache-2.0' # as agreed\ntags:\n- x\n---\n", "apache-2.0"),
        (f"{TAGS}\nlicense: mit\n\n---\n", None),
        (f"{TAGS}\n---\nlicense: mit\n---\n", None),
        ("---\nbase:\n  license: mit\n---\n", None),
        ("---\nabout: |\n  x\n  license: mit\n---\n", None),
        ("---\nlicense: [mit, x]\n---\n", None),
        ('---\nlicense: "mit\\ntags: x"\n---\n', None),
        ("---\nlicense: {\n---\n", None),
        ("---\nlicense: 2001-99-99\n---\n", None),
        ("---\n- license: mit\n---\n", None),
        ("license: mit\n", None),
        ("", None),
    ],
)
def test_license_of_a_card(card, license, tmp_path):
    (tmp_path / "README.md").write_text(card)
    assert license_of(tmp_path) == license


def test_no_card(tmp_path):
    assert license_of(tmp_path) is None
