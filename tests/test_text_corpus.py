"""The corpus, its held-out part, and where data is looked for."""

import gzip
import hashlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit import paths
from labkit.errors import InputError, LabError
from labkit.paths import data_dir
from labkit.text import corpus, load_corpus
from labkit.text.corpus import split_point


def test_the_two_parts_are_the_whole_novel():
    train, heldout = load_corpus("train"), load_corpus("heldout")
    assert list(train) == list(heldout) and len(train) == 6
    for name in train:
        whole = gzip.decompress((data_dir() / f"corpus/{name}.txt.gz").read_bytes()).decode()
        assert train[name] + heldout[name] == whole


def test_five_percent_of_each_novel_is_held_out_from_a_paragraph_on():
    train, heldout = load_corpus("train"), load_corpus("heldout")
    for name, text in heldout.items():
        share = len(text) / (len(text) + len(train[name]))
        assert 0.045 < share <= 0.05, name
        assert train[name].endswith("\n\n") and not text[0].isspace()


def test_the_readme_gives_the_digests_of_the_files():
    readme = (data_dir() / "corpus/README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\S+\.gz)` \| ([\d,]+) \| `([0-9a-f]{64})` \|$", readme, re.M)
    assert len(rows) == 6
    for name, size, digest in rows:
        packed = (data_dir() / "corpus" / name).read_bytes()
        assert hashlib.sha256(packed).hexdigest() == digest
        assert len(gzip.decompress(packed)) == int(size.replace(",", ""))


@given(st.text(alphabet="ab \n", max_size=300))
def test_the_cut_is_never_before_95_percent_and_leaves_something_held_out(text):
    cut = split_point(text)
    assert cut >= len(text) * 19 // 20
    assert cut < len(text) or not text


def test_the_cut_prefers_a_paragraph_to_a_line():
    text = "x" * 380 + "y\nz\n\nheld out"
    assert text[split_point(text) :] == "held out"
    line = "x" * 190 + "y\nheld"
    assert line[split_point(line) :] == "held"


def test_an_unknown_split_is_refused():
    with pytest.raises(InputError, match="'test'.*heldout"):
        load_corpus("test")  # type: ignore[arg-type]


def test_data_dir_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("LABKIT_DATA", str(tmp_path))
    assert data_dir() == tmp_path
    monkeypatch.setenv("LABKIT_DATA", str(tmp_path / "absent"))
    with pytest.raises(LabError, match="LABKIT_DATA names .*absent"):
        data_dir()


def test_data_dir_of_a_wheel_of_a_clone_and_of_neither(monkeypatch, tmp_path):
    monkeypatch.delenv("LABKIT_DATA", raising=False)
    package = tmp_path / "labkit"
    package.mkdir()
    monkeypatch.setattr(paths, "_PACKAGE", package)
    with pytest.raises(LabError, match="set LABKIT_DATA"):
        data_dir()
    (tmp_path / "data").mkdir()
    assert data_dir() == tmp_path / "data"
    (package / "_data").mkdir()
    assert data_dir() == package / "_data"


def test_a_missing_and_a_damaged_corpus_are_named(monkeypatch, tmp_path):
    monkeypatch.setenv("LABKIT_DATA", str(tmp_path))
    corpus._novels.cache_clear()
    try:
        with pytest.raises(LabError, match=r"No \*\.txt\.gz"):
            load_corpus()
        (tmp_path / "corpus").mkdir()
        whole = gzip.compress(b"text " * 1000)
        (tmp_path / "corpus/novel.txt.gz").write_bytes(whole[:-20])
        with pytest.raises(LabError, match=r"novel\.txt\.gz cannot be read"):
            load_corpus()
    finally:
        corpus._novels.cache_clear()
