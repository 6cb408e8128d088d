"""labkit bench: the list, errors, and the cache benchmark from end to end (nothing is timed)."""

from __future__ import annotations

import importlib.util
import re
import sys

import pytest
import torch
from typer.testing import CliRunner

import labkit
from labkit import paths
from labkit.cli import app

runner = CliRunner()


def bench(*words):
    return runner.invoke(app, ["bench", *words])


def section(output, heading):
    """The lines below a heading, up to the next blank line."""
    return output.partition(heading)[2].partition("\n\n")[0].splitlines()


@pytest.fixture(scope="module")
def output():
    threads = torch.get_num_threads()
    result = bench("cache", "--quick", "--hit", "320", "--suffix", "16", "--threads", "1")
    torch.set_num_threads(threads)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_bytes_a_token_of_flash_are_those_of_the_design(output):
    lines = section(output, "shapes of flash")
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:]}
    assert rows["packed"][:6] == ["890.0", "720.0", "170.0", "534.0", "356.0", "67,584"]
    assert rows["fp8"][0] == "1650.0" and rows["bf16"][0] == "3200.0"
    assert rows["packed"][6] == f"{3 * 67584:,}"         # the draft's windows, three stages
    # The next pair of tokens opens a page in every store: a page less what it holds.
    assert rows["packed"][7] == f"{890 * (128 - 2):,}"
    mini = {line.split()[0]: line.split()[1] for line in section(output, "shapes of mini")[2:]}
    assert mini["packed"] == "105.0"


def test_every_table_names_its_model_threads_and_sizes(output):
    tables = re.findall(r"^  .*torch (\S+), (\d+) threads?; .*\d", output, re.M)
    assert len(tables) == 7 and all(t == (torch.__version__, "1") for t in tables)


def test_quality_says_what_must_hold(output):
    # bf16 loses nothing; an exact halo and a full hit change no choice; passes are as derived.
    # (Lines of the packing and decoding tables begin with the same names: these come after.)
    quality = output.partition("Store forms")[2]
    bf16 = next(line for line in quality.splitlines() if line.startswith("  bf16"))
    assert bf16.split()[1:3] == ["0.00e+00", "0.00e+00"] and bf16.endswith("100.0%")
    halos = [line for line in output.splitlines() if re.match(r"  (inside|after) +exact", line)]
    assert len(halos) == 2 and all(float(line.split()[3]) < 1e-4 for line in halos)
    c = labkit.ModelConfig.preset("mini")
    texts, layers, window = 2, c.num_hidden_layers, c.sliding_window
    reuse = {line[2:22].strip(): line[22:].split() for line in quality.splitlines()
             if line.startswith(("  cold", "  full hit", "  global-only"))}
    wanted = {"cold": 320 + 16, "full hit": 16, "global-only bounded": window + 16,
              "global-only exact": 320 + 16}
    for kind, tokens in wanted.items():
        assert reuse[kind][2] == f"{texts * layers * tokens:,}", kind
    assert float(reuse["full hit"][5]) < 1e-4


def test_without_a_name_it_lists_every_benchmark():
    result = bench()
    assert result.exit_code == 0
    listed = {line.split()[0]: line.split("  ", 1)[1].strip() for line in
              result.stdout.splitlines()}
    assert set(listed) == set(paths.benchmarks()) >= {"cache", "dspark", "kernels", "prefill"}
    assert listed["prefill"] == "Full against CED prefill, side by side in one run."


@pytest.mark.parametrize("name", ["cache", "dspark", "prefill"])
def test_help_of_a_benchmark_is_its_own(name):
    result = bench(name, "--help")
    assert result.exit_code == 0
    assert "--threads" in result.stdout and "examples:" in result.stdout


def test_an_unknown_name_and_a_wheel_are_one_sentence(tmp_path, monkeypatch):
    result = bench("no-such")
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr.startswith("labkit: there is no benchmark 'no-such': choose one of cache")
    monkeypatch.setattr(paths, "_PACKAGE", tmp_path / "labkit")
    for words in ((), ("cache",)):
        result = bench(*words)
        assert result.exit_code == 1 and "clone of the repository" in result.stderr
        assert result.stderr.count("\n") == 1 and "Traceback" not in result.output


def test_errors_inside_a_benchmark_are_reported_as_anywhere(tmp_path, monkeypatch):
    scripts = tmp_path / "benchmarks"
    scripts.mkdir()
    (scripts / "stopped.py").write_text('"""Stops."""\nraise KeyboardInterrupt\n')
    (scripts / "refused.py").write_text(
        '"""Refuses."""\nimport sys\nfrom labkit.errors import LabError\n'
        'raise LabError(" ".join(sys.argv[1:]))\n')
    monkeypatch.setattr(paths, "_PACKAGE", tmp_path / "labkit")
    stopped = bench("stopped")
    assert stopped.exit_code == 130 and stopped.stderr == "labkit: stopped\n"
    refused = bench("refused", "--unknown", "3", "-h")
    assert refused.exit_code == 1 and refused.stderr == "labkit: --unknown 3 -h\n"


@pytest.mark.parametrize(("words", "said"), [
    (["--texts", "0"], "--texts is 0"),
    (["--hit", "2000"], "the context of mini is 2048"),
    (["--only", "speed"], "invalid choice"),
])  # fmt: skip
def test_options_that_do_not_fit_are_refused(words, said):
    result = bench("cache", *words)
    assert result.exit_code == 2 and said in result.stderr


def test_agreement_is_what_it_says():
    script = paths.benchmarks()["cache"]
    spec = importlib.util.spec_from_file_location("bench_cache", script)
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_cache"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    p, q = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]), torch.tensor([[0.25, 0.5, 0.25]] * 2)
    found = module.Agreement()
    found.add(p.log(), q.log())
    expected = (p * (p / q).log()).sum(-1)
    assert found.same == 1 and torch.allclose(torch.tensor(found.kl), expected)
