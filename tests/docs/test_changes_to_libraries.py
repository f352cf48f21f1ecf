"""The page on changes to other libraries names every file that makes one."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs/explanation/changes-to-libraries.md"

# How a change to a library or the process looks in the code.
CHANGES = re.compile(
    r"""
    \b(?:Attention|AttentionMask|Experts)Interface\.register\(
    | \bALL_[A-Z_]+\.register\(
    | \bregistry\.register\((?!\w*Collector\()         # of strategies, not of metrics
    | \bAuto[A-Z]\w+\.register\(
    | \bLORA_TARGETS\.(?:setdefault|update)\(
    | ^\s+[A-Z]\w+\.\w+\ =\ (?!.*\bself\b)                # an attribute of an imported class
    | ^\s+weight_conversion\.\w+\ =\                     # a function of an imported module
    | \bsys\.meta_path\.(?:insert|append)\(
    | \bset_num_threads\(
    | \bmallopt\( | \bmalloc_trim\b
    | \bsignal\.signal\( | \badd_signal_handler\(
    | \bos\.environ(?:\[[^]]+\]\ =|\.setdefault\()
    | \blogging\.basicConfig\( | \.setLevel\( | \.addFilter\( | \bwarnings\.filterwarnings\( | \bset_verbosity_
    | \bregister_at_fork\(
    | \bos\.register_at_fork\b
    """,
    re.VERBOSE | re.MULTILINE,
)


def changing_files() -> set[str]:
    package = ROOT / "swarm_plugins"
    return {str(file.relative_to(package)) for file in package.rglob("*.py") if CHANGES.search(file.read_text())}


def test_the_search_sees_the_known_ones() -> None:
    assert {"transport/guards.py", "backbone/attention.py", "backbone/injection.py", "noise.py"} <= changing_files()


def test_every_file_that_changes_a_library_is_listed_and_no_other() -> None:
    listed = set(re.findall(r"`((?:\w+/)*\w+\.py)`", PAGE.read_text()))
    listed -= {name for name in listed if name.startswith("tests/")}
    assert changing_files() - listed == set(), "list them in docs/explanation/changes-to-libraries.md"
    assert listed - changing_files() == set(), "these make no change any more"
