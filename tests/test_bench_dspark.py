"""labkit bench dspark from end to end: its tables hold what must hold; nothing is timed."""

import importlib.util
import re
import sys

import pytest
import torch
from typer.testing import CliRunner

from labkit import paths
from labkit.cli import app

runner = CliRunner()


def bench(*words):
    return runner.invoke(app, ["bench", "dspark", *words])


@pytest.fixture(scope="module")
def output():
    threads = torch.get_num_threads()
    result = bench("--quick")
    torch.set_num_threads(threads)
    assert result.exit_code == 0, result.output
    return result.stdout


def table(output, heading):
    """The lines below a heading, up to the next blank line, without its sizes."""
    return output.partition(heading)[2].partition("\n\n")[0].splitlines()[2:]


def test_greedy_texts_are_the_same_in_every_domain_and_policy(output):
    rows = [line for line in table(output, "Speculation against plain")[1:] if "/1" in line]
    assert len(rows) == 9 and all(line.endswith("1/1") for line in rows)
    assert {line.split()[0] for line in rows} == {"prose", "code", "counting"}
    for line in rows:
        name, rest = line[12:28].strip(), line[28:].split()
        step, plain, spec, ratio = float(rest[0]), *(float(x) for x in rest[-4:-1])
        assert 1 <= step <= (3 if name == "fixed 2" else 6)
        assert ratio == pytest.approx(spec / plain, abs=0.02)


def test_costs_add_up_and_break_even_follows(output):
    lines = table(output, "What a step costs")[1:]
    cost = {line[2:30].strip(): [float(x) for x in line[30:].split()] for line in lines[:4]}
    plain, draft, check, both = cost.values()
    assert both[0] == pytest.approx(draft[0] + check[0], abs=0.02) and plain[1] == 1.0
    assert both[1] == pytest.approx(both[0] / plain[0], abs=0.02)
    assert float(re.search(r"break-even: ([\d.]+)", lines[4])[1]) == pytest.approx(both[1])


def test_confidence_tables_count_every_slot(output):
    for name in ("sampled, temperature 1", "greedy"):
        lines = table(output, f"believed and seen ({name})")[1:]
        assert [line.split()[0] for line in lines[:5]] == ["1", "2", "3", "4", "5"]
        seen = [float(line.split()[1]) for line in lines[:5]]
        assert seen == sorted(seen, reverse=True)
        head = output.partition(f"seen ({name})")[2].splitlines()[1]
        proposals = int(re.search(r"(\d+) proposals", head)[1])
        assert sum(int(line[16:26]) for line in lines[7:]) == 5 * proposals


def test_every_load_has_every_policy_and_the_measured_rates(output):
    loads = re.findall(r"  R = (\d+): SPS without drafts ([\d.]+); with drafts, by B  (.*)", output)
    assert [int(R) for R, *_ in loads] == [1, 4]
    for R, _, points in loads:
        tokens = [int(p.split(":")[0]) for p in points.split("  ")]
        assert tokens[0] == int(R) and tokens[-1] == 6 * int(R)
        lines = output.partition(f"  R = {R}: ")[2].partition("\n\n")[0].splitlines()[2:]
        found = {line[2:20].strip(): line[20:].split() for line in lines}
        assert set(found) == {"none", "fixed 5", "survival > 0.5", "scheduler", "delayed budget"}
        for name, row in found.items():
            width, step = float(row[0]), float(row[1])
            assert int(R) <= width <= 6 * int(R) and 1 <= step <= 6
            if name == "none":
                assert width == int(R) and step == 1 and row[2] == "-" and row[4] == "1.00"


@pytest.mark.parametrize(("words", "code", "said"), [
    (["--slots", "0"], 2, "--slots is 0"), (["--requests", "0"], 2, "at least 1"),
    (["--length", "1000"], 2, "the context of mini is 1024"),
    (["--only", "speed"], 2, "invalid choice"), (["--slots", "17"], 1, "from 0 (no draft) to 16"),
    (["--temperature", "-1", "--quick", "--only", "pairs"], 1, "temperature is -1"),
])  # fmt: skip
def test_options_that_do_not_fit_are_refused(words, code, said):
    result = bench(*words)
    assert result.exit_code == code and said in result.output, result.output
    assert "Traceback" not in result.output


def test_the_help_has_examples():
    result = bench("--help")
    assert result.exit_code == 0 and "examples:" in result.stdout and "--requests" in result.stdout


def test_even_acceptance_solves_its_equation():
    spec = importlib.util.spec_from_file_location("bench_dspark", paths.benchmarks()["dspark"])
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_dspark"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    for slots in (1, 5, 16):
        for tokens in (1.0, 1.3, 1 + slots / 2, 1 + slots):
            p = module.even_acceptance(tokens, slots)
            assert sum(p**k for k in range(slots + 1)) == pytest.approx(tokens, abs=1e-9)
